"""What a server costs the shared file system: counted in the calls of the operating system, minutes in seconds."""

import asyncio
import os
import sys
import threading
import time
from collections import Counter

import pytest
from patience import extend

from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.servers import replica as replica_module
from hpc_rl.servers.replica import Identity, Replica

SPEED = 250.0  # of the simulated clock
TOKENS = {"control": "c" * 8, "data": "d" * 8}
CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.truncate"}
_counting: list[tuple[str, Counter[str]]] = []  # a hook of the interpreter stays for good


class Backend:
    receiver = None

    async def start(self, path, version):
        pass

    async def request(self, path, body):
        return 200, {}

    def alive(self):
        return ""

    async def stop(self):
        pass


class Clock:
    """Seconds of a clock that runs fast, or stands still."""

    stopped_at = None

    def __call__(self) -> float:
        return SPEED * time.monotonic() if self.stopped_at is None else self.stopped_at


def _hook(event: str, args: tuple) -> None:
    for root, counted in _counting:
        if event in CHANGES | {"open", "os.scandir", "os.listdir"} and str(args[0]).startswith(root):
            if event != "open":
                counted[event] += 1
            elif args[1] is None:  # os.open; open() with an opener is told twice
                counted["create" if args[2] & os.O_CREAT else "open"] += 1


sys.addaudithook(_hook)


@pytest.fixture
def counted(tmp_path, monkeypatch):
    calls: Counter[str] = Counter()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.update(["fsync"]), fsync(fd)))
    _counting.append((str(tmp_path), calls))
    yield calls
    _counting.clear()


@pytest.fixture
async def served(tmp_path, monkeypatch):
    clock = Clock()
    for name in ("CHECK_S", "FOLLOW_S"):
        monkeypatch.setattr(replica_module, name, getattr(replica_module, name) / SPEED)
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    names = NameResolve(trial.names, clock)
    stopping = threading.Event()
    replica = Replica(Backend(), trial, names, TOKENS, Identity(0, "7.1", 0), "/base")
    task = asyncio.create_task(replica.run(stopping))
    while replica.proxy.lifecycle != "waiting":
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    yield replica, names, clock
    stopping.set()
    assert await task == ExitCode.STOPPED


async def test_a_quiet_server_shows_its_lease_six_times_a_minute_and_writes_and_syncs_nothing(
    served, counted
):
    _, names, _ = served
    counter = names.list_leases(keys.servers("rollout"))["server/rollout/0"].counter
    counted.clear()
    begun = time.monotonic()
    await asyncio.sleep(3 * 60 / SPEED)
    minutes = (time.monotonic() - begun) * SPEED / 60
    seen = Counter(counted)
    written = names.list_leases(keys.servers("rollout"))["server/rollout/0"].counter - counter
    assert 1 <= written <= 6 * minutes + 1
    # one may be on its way; the first one creates the file that the others rename
    assert written - 1 <= seen["os.rename"] + seen["create"] <= written + 1
    assert seen["create"] <= 1
    assert set(seen) <= {"create", "os.rename", "os.scandir", "open"}
    assert seen["os.scandir"] <= written + 1
    assert seen["open"] <= 30 * minutes + 1, "looks for weights that were published"


async def test_a_change_is_written_at_once_and_a_pause_is_none(served, counted):
    replica, names, clock = served
    clock.stopped_at = clock()
    await asyncio.sleep(0.05)
    counted.clear()
    await replica.proxy.control("/pause_generation", {"mode": "retract"})
    await asyncio.sleep(0.05)
    body = {"model_path": "/weights/0.0", "weight_version": "0.0"}
    await replica.proxy.control("/update_weights_from_disk", body)
    await replica.proxy.control("/continue_generation", {})
    async with asyncio.timeout(extend(5)):
        while names.list_leases(keys.servers("rollout"))["server/rollout/0"].value["version"] != "0.0":
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert counted["os.rename"] <= 2 and counted["create"] <= 2, "the lease, and the file beside it"
