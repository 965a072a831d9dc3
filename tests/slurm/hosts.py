"""A private Slurm cluster whose nodes are hosts of their own: namespaces of this machine. Needs root.

Each host has its network, host name, process ids, boot id, /tmp, /dev/shm and /run; all else is shared, as by
a cluster's NFS. Hosts are joined by two networks, eth0 (10.77.1.0/24, Slurm's own) and ib0 (10.77.2.0/24),
which lie in a namespace too: nothing of this machine's network is touched, and clusters do not see each other.
There is no default route unless `route` names an interface.

    with HostsCluster.started(slurm, folder, 4) as cluster: cluster.run("srun", "-N4", "hostname")
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# this file is a program too
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, Slurm, speak_to
from patience import extend

CHECKOUT = Path(__file__).resolve().parents[2]
PRIVATE = ("/tmp", "/dev/shm", "/run")
CLIENTS = ("sbatch", "srun", "salloc", "squeue", "sinfo", "scancel", "scontrol", "sacct")
MUNGE_SOCKET = Path("/run/munge/munge.sock")
NETWORKS = {"eth0": "10.77.1", "ib0": "10.77.2"}


@dataclass(frozen=True)
class HostsCluster(Cluster):
    """A cluster by its directory, which must be shared: not below /tmp or /run."""

    route: str = ""  # interface of a default route, to a gateway that drops everything
    loop_name: bool = False  # /etc/hosts gives a host's own name as 127.0.1.1, as Debian's installer does
    ipv6: bool = False  # ib0 has IPv6 alone
    same_everywhere: str = ""  # an interface with one address on every node, as "docker0=172.17.0.1/16"
    hosts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def started(cls, slurm: Slurm, num_nodes: int = 4, **more: object) -> Iterator[HostsCluster]:
        """A running cluster in a new directory below /var/tmp, gone at the end."""
        folder = Path(tempfile.mkdtemp(prefix="hpcrl-", dir="/var/tmp"))
        cluster = cls(folder, slurm, num_nodes, **more)  # type: ignore[arg-type]
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()

    @property
    def env(self) -> dict[str, str]:
        env = super().env
        env.pop("HPC_RL_INTERFACE")
        env["PATH"] = ":".join(part for part in env["PATH"].split(":") if part != str(self._clients))
        return env

    @property
    def client_env(self) -> dict[str, str]:
        """Of a process of this machine, whose Slurm commands are run on the login node."""
        env = super().client_env
        return env | {"PATH": f"{self._clients}:{env['PATH']}"}

    @property
    def _clients(self) -> Path:
        return self.dir / "clients"

    def up(self, timeout_s: float = 60) -> None:
        """Start hosts and daemons that do not run, and wait until every node is usable."""
        if not self.conf.exists():
            self._write_files(0)
            self._write_hosts()
        for name in ("switch", "ctl", "login", *self.nodes):
            if name not in self.hosts:
                self._boot(name)
        deadline = time.monotonic() + extend(timeout_s)
        while self._num_usable() < self.num_nodes:
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in (self.dir / "log").iterdir())
                raise RuntimeError(f"{self._num_usable()} of {self.num_nodes} nodes came up:\n{logs}")
            time.sleep(0.1)

    def down(self) -> None:
        """Power off all hosts, and remove the directory."""
        for name in list(self.hosts):
            self.power_off(name)
        shutil.rmtree(self.dir, ignore_errors=True)

    def power_off(self, name: str) -> None:
        """Power loss: the kernel ends every process of the host with its first one."""
        process = self.hosts.pop(name)
        process.kill()  # and with it, by --kill-child, the first process of the host
        process.wait()
        if "switch" in self.hosts:
            for interface in NETWORKS:
                self._in("switch", ["ip", "link", "del", f"{name}-{interface}"], check=False)

    def kill_node(self, node: str) -> None:
        self.power_off(node)

    def partition(self, name: str, cut: bool, interfaces: Iterable[str] = tuple(NETWORKS)) -> None:
        """Cut a host off from all others, silently, or join it again; on some of its networks."""
        for interface in interfaces:
            self._in("switch", ["ip", "link", "set", f"{name}-{interface}", "down" if cut else "up"])

    def part(self, name: str, peer: str, interface: str, cut: bool) -> None:
        """Have what one host sends to another one get lost, silently, or arrive again."""
        address = self.address(peer, interface)
        nowhere = ["lladdr", "02:00:00:00:00:01", "nud", "permanent"] if cut else []
        self._in(name, ["ip", "neigh", "replace" if cut else "del", address, *nowhere, "dev", interface])

    def on(self, name: str, argv: list[str], cwd: Path) -> list[str]:
        """Return the command that runs another on a host, in a shared directory."""
        namespaces = ["-m", "-u", "-i", "-n", "-p"]
        command = ["env", f"--chdir={cwd}", f"PATH={self.env['PATH']}", *argv]
        return ["nsenter", "-t", str(self._first_pid(name)), *namespaces, "--", *command]

    def run(self, *argv: str, timeout_s: float = 60) -> str:
        """Output of a client command on the login node."""
        done = subprocess.run(
            self.on("login", list(argv), self.dir),
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=extend(timeout_s),
        )
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
        return done.stdout

    def _boot(self, name: str) -> None:
        if name == "switch":
            self._start_host(name)
            for interface, network in NETWORKS.items():
                bridge = f"br-{interface}"
                self._in(name, ["ip", "link", "add", bridge, "type", "bridge"])
                self._in(name, ["ip", "link", "set", bridge, "up"])
                self._in(name, ["ip", "addr", "add", f"{network}.254/24", "dev", bridge])
            return
        self._start_host(name)
        pid = str(self._first_pid(name))
        for interface, network in NETWORKS.items():
            end = f"{name}-{interface}"
            peer = ["peer", "name", interface, "netns", pid]
            self._in("switch", ["ip", "link", "add", end, "type", "veth", *peer])
            self._in("switch", ["ip", "link", "set", end, "master", f"br-{interface}", "up"])
            address, length = self.address(name, interface), "64" if self._has_ipv6(interface) else "24"
            nodad = ["nodad"] if self._has_ipv6(interface) else []
            self._in(name, ["ip", "addr", "add", f"{address}/{length}", "dev", interface, *nodad])
            self._in(name, ["ip", "link", "set", interface, "up"])
            if self.route == interface:
                self._in(name, ["ip", "route", "add", "default", "via", f"{network}.254"])
        if self.same_everywhere and name in self.nodes:
            interface, _, address = self.same_everywhere.partition("=")
            self._in(name, ["ip", "link", "add", interface, "type", "bridge"])
            self._in(name, ["ip", "addr", "add", address, "dev", interface])
            self._in(name, ["ip", "link", "set", interface, "up"])
        if name == "ctl":
            self._daemon(name, [self._program("slurmctld")])
        elif name in self.nodes:
            stepd = ["-d", self._program("slurmstepd")] if self.slurm.root else []
            self._daemon(name, [self._program("slurmd"), *stepd])
        else:
            self._write_clients()

    def _write_clients(self) -> None:
        """Write commands of Slurm for processes of this machine."""
        self._clients.mkdir(exist_ok=True)
        for name in CLIENTS:
            words = self.on("login", [name], Path("PLACE"))
            line = shlex.join(words).replace("PLACE", '"$PWD"')
            here = shlex.join(["env", f"PATH={self.env['PATH']}", name])
            lines = ["#!/bin/bash", f'[[ $HOSTNAME != login ]] || exec {here} "$@"', f'exec {line} "$@"']
            (self._clients / name).write_text("\n".join(lines) + "\n")
            (self._clients / name).chmod(0o755)

    def _start_host(self, name: str) -> None:
        ready = self.dir / "run" / f"{name}.ready"
        ready.unlink(missing_ok=True)
        kinds = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--propagation", "private"]
        # a host dies with the process that started it
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--kill-child"]
        with (self.dir / "log" / f"host.{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, sys.executable, __file__, name, str(self.dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
            )
        self.hosts[name] = process
        deadline = time.monotonic() + extend(30)
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                log_text = (self.dir / "log" / f"host.{name}.log").read_text()
                raise RuntimeError(f"host {name} did not start: {log_text}")
            time.sleep(0.02)

    def _daemon(self, name: str, argv: list[str]) -> None:
        with (self.dir / "log" / "start.log").open("ab") as log:
            command = self.on(name, argv, self.dir)
            subprocess.run(command, env=self.env, stdout=log, stderr=log, check=True, timeout=extend(30))

    def _in(self, name: str, argv: list[str], check: bool = True) -> None:
        """Run a command of this machine in the network of a host."""
        command = ["nsenter", "-t", str(self._first_pid(name)), "-n", "--", *argv]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=extend(20))
        assert done.returncode == 0 or not check, f"{name}: {argv}: {done.stderr}"

    def _first_pid(self, name: str) -> int:
        """Pid of the first process of a host, as this machine counts."""
        pid = self.hosts[name].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def address(self, name: str, interface: str) -> str:
        prefix = "fd77::" if self._has_ipv6(interface) else f"{NETWORKS[interface]}."
        return f"{prefix}{self._number(name)}"

    def _has_ipv6(self, interface: str) -> bool:
        return self.ipv6 and interface == "ib0"

    def outer_pid(self, host: str, pid: int) -> int:
        """Return the id that this machine gives a process of a host. Raises ProcessLookupError."""
        if host in self.hosts:
            space = os.readlink(f"/proc/{self._first_pid(host)}/ns/pid")
            for path in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    ids = re.search(r"^NSpid:.*\s(\d+)$", (path / "status").read_text(), re.MULTILINE)
                    if ids and int(ids[1]) == pid and os.readlink(path / "ns/pid") == space:
                        return int(path.name)
        raise ProcessLookupError(f"no process {pid} on {host}")

    def _number(self, name: str) -> int:
        return {"ctl": 2, "login": 3}.get(name) or 10 + int(name[1:])

    def _write_hosts(self) -> None:
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for name in ("ctl", "login", *self.nodes):
            lines += [f"{self.address(name, 'eth0')} {name}", f"{self.address(name, 'ib0')} {name}-ib"]
        for name in ("switch", "ctl", "login", *self.nodes):
            folder = self.dir / "hosts" / name
            folder.mkdir(parents=True)
            own = [f"127.0.1.1 {name}"] if self.loop_name else []
            (folder / "hosts").write_text("\n".join([*own, *lines]) + "\n")
            (folder / "machine-id").write_text(uuid.uuid4().hex + "\n")

    def _slurm_conf(self, port0: int) -> str:
        lines = super()._slurm_conf(20_000).splitlines()
        dropped = (
            "SlurmctldPort=",
            "SlurmdPort=",
            "CommunicationParameters=",
            "SlurmctldHost=",
            "NodeName=",
            "AuthInfo=",
        )
        kept = [line for line in lines if not line.startswith(dropped)]
        sockets = next(line for line in lines if line.startswith("NodeName=")).partition("Sockets=")[2]
        address = f"{NETWORKS['eth0']}.[11-{10 + self.num_nodes}]"
        nodes = f"NodeName=n[1-{self.num_nodes}] NodeAddr={address} Sockets={sockets}"
        return "\n".join([*kept, "SlurmctldHost=ctl", f"AuthInfo=socket={MUNGE_SOCKET}", nodes]) + "\n"


def speak_from_login_node(cluster: HostsCluster, monkeypatch: Any) -> None:
    """Make this process a client of the cluster, and `hpc_rl` run on its login node, until the test ends."""
    import toy_trials

    speak_to(cluster, monkeypatch)
    monkeypatch.setattr(toy_trials, "on_host", lambda command, cwd: cluster.on("login", command, cwd))
    monkeypatch.setattr(toy_trials, "outer_pid", cluster.outer_pid)


def first_process(name: str, folder: Path) -> None:
    """Make a host's own mounts, say that it is ready, and reap orphans until it is killed."""
    own = folder / "hosts" / name
    socket.sethostname(name)
    mount = ["mount", "-t"]
    subprocess.run([*mount, "proc", "-o", "nosuid,nodev,noexec", "proc", "/proc"], check=True)
    # a sysfs of this network namespace, so that /sys/class/net has this host's interfaces
    (own / "cgroup").mkdir(exist_ok=True)
    subprocess.run(["mount", "--rbind", "/sys/fs/cgroup", str(own / "cgroup")], check=True)
    subprocess.run([*mount, "sysfs", "-o", "ro", "sysfs", "/sys"], check=True)
    subprocess.run(["mount", "--rbind", str(own / "cgroup"), "/sys/fs/cgroup"], check=True)
    (own / "checkout").mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", str(CHECKOUT), str(own / "checkout")], check=True)
    for private in PRIVATE:
        mode = "0755" if private == "/run" else "1777"
        subprocess.run([*mount, "tmpfs", "-o", f"nosuid,nodev,mode={mode}", name, private], check=True)
    if not CHECKOUT.is_dir():  # it is below /tmp
        CHECKOUT.mkdir(parents=True)
        subprocess.run(["mount", "--bind", str(own / "checkout"), str(CHECKOUT)], check=True)
    boot_id = own / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    subprocess.run(["mount", "--bind", str(boot_id), "/proc/sys/kernel/random/boot_id"], check=True)
    for file in ("hosts", "machine-id"):
        if Path("/etc", file).exists():
            subprocess.run(["mount", "--bind", str(own / file), f"/etc/{file}"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if name != "switch":
        from packages import find_or_fetch

        cluster = HostsCluster(folder, find_or_fetch())
        MUNGE_SOCKET.parent.mkdir()
        subprocess.run(munged(cluster, MUNGE_SOCKET.parent), check=True)
    (folder / "run" / f"{name}.ready").touch()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


def munged(cluster: Cluster, here: Path) -> list[str]:
    """Return the command of a host's own munged; all have the key of the cluster."""
    key = cluster.dir / "munge" / "munge.key"
    files = {"key-file": key, "socket": MUNGE_SOCKET, "pid-file": here / "munged.pid"}
    files |= {"log-file": here / "munged.log", "seed-file": here / "seed"}
    program = shutil.which("munged", path=cluster.slurm.env["PATH"]) or "munged"
    return [program, "--force", "--num-threads=2", *(f"--{name}={path}" for name, path in files.items())]


if __name__ == "__main__":
    first_process(sys.argv[1], Path(sys.argv[2]))
