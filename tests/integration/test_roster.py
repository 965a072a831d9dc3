"""What a poll of 1,000 servers costs the file system, counted by strace in a process that only reads."""

import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import extend

from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.roster import HEARTBEAT_S, Registrar
from hpc_rl.name_resolve.shared_fs import LEASE_TTL_S, Lease, NameResolve

SERVERS = 1000
POLLS = 20
READER = """
import asyncio, os, sys
from pathlib import Path
from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import open_names, roster
from hpc_rl.name_resolve.roster import RosterReader
from hpc_rl.servers.router import Router
from hpc_rl.weights.publish import Publisher

trial, polls, num_servers = Trial(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
list_leases, num_polls = RosterReader.list_leases, 0

def count_poll(reader, at_once=False):
    global num_polls
    num_polls += 1
    return list_leases(reader, at_once)

RosterReader.list_leases = count_poll
roster.STUCK_S = 600.0  # the registrar lives, even if this machine is slow

async def wait_for_roster(owner):
    while owner._roster._moved_at < 0:
        await asyncio.sleep(0.05)

def mark(name):
    os.access(f"/{name}/{num_polls}", os.F_OK)

async def count_router():
    async with Router(open_names(trial), "data", poll_s=0.05) as router:
        await wait_for_roster(router)
        while len(router._servers) != num_servers:
            await asyncio.sleep(0.05)
        mark("router-begins")
        end = num_polls + polls
        while num_polls < end:
            await asyncio.sleep(0.01)
        router._poller.cancel()
        mark("router-ends")

async def count_publisher():
    publisher = Publisher(trial, open_names(trial), {"data": "d", "control": "c"}, watch_s=0.05)
    await wait_for_roster(publisher)
    publisher._watcher.cancel()
    # its polls run in this loop: once it comes to something new, none is under way
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), publisher._loop).result()
    mark("publisher-begins")
    for _ in range(polls):
        assert len(publisher._targets()) == num_servers
    mark("publisher-ends")
    publisher.close()

asyncio.run(count_router())
asyncio.run(count_publisher())
"""


@pytest.fixture
def names(tmp_path):
    """A trial with 1,000 registered servers, and its registrar."""
    names = NameResolve(tmp_path / "trial" / "names")
    folder = names.root / keys.servers("rollout")
    folder.mkdir(parents=True)
    for index in range(SERVERS):
        value = {"url": f"http://127.0.0.1:{index + 1}", "version": "0.1", "state": "serving"}
        lease = Lease(folder / str(index), keys.server("rollout", index), 1, value, LEASE_TTL_S)
        lease.path.write_text(lease.encode())
    registrar, ending = Registrar(names, [keys.servers("rollout")], 1), threading.Event()
    while not folder.with_name("rollout.json").exists():
        registrar.poll()

    def register() -> None:
        while not ending.wait(HEARTBEAT_S / 4):
            registrar.poll()

    thread = threading.Thread(target=register)
    thread.start()
    yield names
    ending.set()
    thread.join()


def test_a_poll_of_1000_servers_is_one_open_and_one_read(names, tmp_path):
    strace = shutil.which("strace")
    assert strace, "strace is not on the PATH; install the package strace, which counts the calls of a poll"
    log, script = tmp_path / "strace.log", tmp_path / "reader.py"
    script.write_text(READER)
    calls = "trace=%file,getdents64,read,pread64,write,rename,fsync"
    tracing = [strace, "-f", "-qq", "-y", "-s1", "-e", calls, "-o", str(log)]
    reading = [sys.executable, str(script), str(names.root.parent), str(POLLS), str(SERVERS)]
    process = subprocess.run([*tracing, *reading], capture_output=True, text=True, timeout=extend(600))
    assert process.returncode == 0, process.stderr[-3000:]
    for reader in ("router", "publisher"):
        rows, num_polls = cut_rows(log, reader)
        counts = count_calls([row for row in rows if str(names.root) in row])
        # a poll of the router may be under way at each mark
        slack = 1 if reader == "router" else 0
        assert num_polls >= POLLS
        assert counts.keys() == {"openat", "read"}, counts
        for call, count in counts.items():
            assert abs(count - num_polls) <= slack, (reader, call, count, num_polls)


def cut_rows(log: Path, reader: str) -> tuple[list[str], int]:
    """Return the calls between the two marks of a reader, and the number of its polls meanwhile."""
    rows = [line.split(None, 1)[1] for line in log.read_text().splitlines()]
    marks = []
    for number, row in enumerate(rows):
        if match := re.search(rf'"/{reader}-(?:begins|ends)/(\d+)"', row):
            marks.append((number, int(match[1])))
    (begin, first), (end, last) = marks
    return rows[begin:end], last - first


def count_calls(rows: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        if not row.startswith("<"):  # the second line of an interrupted call
            name = row.partition("(")[0]
            counts[name] = counts.get(name, 0) + 1
    return counts
