"""Hosts of a network of their own, as network and mount namespaces of this machine.

Needs root and iproute2.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from patience import extend


@dataclass
class NetworkHost:
    """One host: the namespaces of a process that sleeps."""

    name: str
    pid: int

    def run(self, *argv: str, timeout_s: float = 30) -> str:
        """Run a command on this host; returns its output. Raises CalledProcessError."""
        command = ["nsenter", "-t", str(self.pid), "--net", "--mount", "--", *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=extend(timeout_s))
        assert done.returncode == 0, f"{self.name}: {argv}: {done.stderr}"
        return done.stdout.strip()

    def start(self, *argv: str) -> subprocess.Popen[str]:
        command = ["nsenter", "-t", str(self.pid), "--net", "--mount", "--", *argv]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


@contextlib.contextmanager
def two_hosts(
    folder: Path, networks: dict[str, tuple[str, str]], names: str = ""
) -> Iterator[list[NetworkHost]]:
    """Start two hosts that are joined by networks, with no other route; skipped without root, unless it is
    required.

    Args:
        folder: Where the hosts' /etc/hosts is written.
        networks: Interface -> address of either host, with its prefix length.
        names: Content of /etc/hosts.
    """
    if os.geteuid() != 0:
        if "root" in os.environ.get("HPC_RL_TEST_REQUIRE", ""):
            pytest.fail("network namespaces need root")
        pytest.skip("network namespaces need root")
    (folder / "hosts").write_text(names)
    sleeping = [_namespaces() for _ in range(2)]
    hosts = [NetworkHost(name, process.pid) for name, process in zip("ab", sleeping, strict=True)]
    try:
        for host in hosts:
            host.run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
            host.run("ip", "link", "set", "lo", "up")
        for name, addresses in networks.items():
            peer = ["peer", "name", name, "netns", str(hosts[1].pid)]
            hosts[0].run("ip", "link", "add", name, "type", "veth", *peer)
            for host, address in zip(hosts, addresses, strict=True):
                host.run("ip", "link", "set", name, "up")
                host.run("ip", "address", "add", address, "dev", name, *(["nodad"] if ":" in address else []))
        yield hosts
    finally:
        for process in sleeping:
            process.kill()
            process.wait()


def _namespaces() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["unshare", "--net", "--mount", "--propagation", "private", "sleep", "600"])
    deadline = time.monotonic() + extend(10)
    # unshare has its namespaces once it has become sleep
    while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
        assert process.poll() is None and time.monotonic() < deadline, "no namespaces could be made"
        time.sleep(0.01)
    return process
