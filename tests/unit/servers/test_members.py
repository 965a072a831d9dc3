"""A replica on several nodes: its members start, follow the weights, and end with it."""

import asyncio
import contextlib
import threading
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from patience import extend
from version_history import SHAPES, publish_version

from hpc_rl.core.errors import Damaged, ExitCode, RoleFailed
from hpc_rl.core.net import LOOPBACK
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.types import WeightVersion
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.servers.members import Member, Members
from hpc_rl.servers.node_backend import NodeBackend
from hpc_rl.weight_files.model_copy import ModelCopy

pytestmark = pytest.mark.waits

TOKENS = {"control": "c" * 32, "data": "d" * 32}
FIRST, SECOND = WeightVersion(0, 1), WeightVersion(0, 2)


class Program:
    """A backend that runs nothing, on the first node or on another; `calls` is what it was asked."""

    receiver = None

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.problem = ""
        self.rendezvous: tuple[str, int] | None = None
        self.starts = asyncio.Event()  # once set, `start` returns
        self.starts.set()

    async def start(self, path: str, version: str) -> None:
        self.calls.append(("start", path))
        await self.starts.wait()

    async def start_member(self, path: str) -> None:
        self.calls.append(("start", path))

    async def request(self, path, body):
        self.calls.append((path, body.get("model_path", "")))
        return 200, {}

    async def prepare_changes(self, folder: Path) -> None: ...

    def alive(self) -> str:
        return self.problem

    async def stop(self) -> None:
        self.calls.append(("stop", ""))


class Replica:
    """A replica of two nodes. Here they share their disk, so the member's copies are in another directory."""

    def __init__(self, here: Path) -> None:
        self.here, self.names = here, NameResolve(here / "names")
        self.first, self.second = Program(), Program()
        self.opened: list[Path] = []
        self.key = "member/1.0/0/0/1"
        self.stopping = threading.Event()
        self.copy = ModelCopy(here / "node/weights", here / "versions")

    def make_second(self, rendezvous):
        self.second.rendezvous = rendezvous
        return self.second

    async def run_member(self) -> int:
        member = Member(self.make_second, self.opened.append, self.copy.versions, NodeCopies(), TOKENS)
        return await member.run(LOOPBACK, lambda url: self.names.put(self.key, {"url": url}), self.stopping)

    def open(self, token: str = TOKENS["control"]) -> NodeBackend:
        members = Members(self.names, [self.key], token, (LOOPBACK, 7), extend(10))
        return NodeBackend(self.first, self.copy, NodeCopies(), str(self.here / "base"), members)


@pytest.fixture
async def replica(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "node").mkdir()
    rng = np.random.default_rng(0)
    values = {name: rng.integers(0, 9, shape).astype(np.uint16) for name, shape in SHAPES.items()}
    changed = {name: one + 1 for name, one in values.items()}
    versions = tmp_path / "versions"
    publish_version(versions, rng, FIRST, None, values, values, 1, True)
    publish_version(versions, rng, SECOND, FIRST, values, changed, 1, False)
    made = Replica(tmp_path)
    task = asyncio.create_task(made.run_member())
    yield made, task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, RoleFailed):
        await task


async def ends(task: asyncio.Task) -> int:
    async with asyncio.timeout(extend(20)):
        return await task


async def test_each_node_starts_follows_and_stops(replica):
    made, task = replica
    backend = made.open()
    await backend.start(str(made.here / "base"), "")
    assert made.second.calls == made.first.calls == [("start", str(made.here / "base"))]
    assert made.second.rendezvous == (LOOPBACK, 7)
    body = {"model_path": "elsewhere", "weight_version": str(FIRST)}
    assert await backend.request("/prepare_weights", body) != (200, {}) and made.copy.find_version() == FIRST
    assert made.opened == [made.copy.folder], "once: the role holds it"
    assert (await backend.request("/update_weights_from_disk", body))[0] == 200
    # the copies may change again
    assert (await backend.request("/prepare_weights", {**body, "weight_version": str(SECOND)}))[0] == 200
    await backend.stop()
    assert await ends(task) == ExitCode.STOPPED
    assert made.second.calls[-1] == ("stop", "") and not backend.alive()


async def test_a_start_from_published_weights_holds_the_copies_until_all_have_loaded(replica):
    made, _ = replica
    backend = made.open()
    made.first.starts.clear()
    starting = asyncio.create_task(backend.start("", str(FIRST)))
    async with asyncio.timeout(extend(20)):
        while not made.first.calls:
            await asyncio.sleep(0.01)
    assert made.second.calls == [("start", str(made.copy.model))]
    later = asyncio.create_task(asyncio.to_thread(made.copy.bring_to, SECOND))
    await asyncio.sleep(0.1)
    assert not later.done() and made.copy.find_version() == FIRST
    made.first.starts.set()
    await starting
    await later
    assert made.copy.find_version() == SECOND
    await backend.stop()


async def test_the_loss_of_a_program_ends_the_replica_while_it_starts_and_later(replica):
    made, task = replica
    backend = made.open()
    await backend.start(str(made.here / "base"), "")
    made.second.problem = "it has ended"
    with pytest.raises(RoleFailed, match="it has ended"):
        await ends(task)
    async with asyncio.timeout(extend(20)):
        while not backend.alive():
            await asyncio.sleep(0.01)
    assert "the part of this replica at http://127.0.0.1:" in backend.alive()
    await backend.stop()
    # a start of the first node's program would wait for ever
    made.second.problem, made.key = "", "member/1.0/0/1/1"
    task = asyncio.create_task(made.run_member())
    await asyncio.to_thread(made.names.wait, made.key, extend(10))
    made.first.starts.clear()
    later = made.open()
    starting = asyncio.create_task(later.start(str(made.here / "base"), ""))
    async with asyncio.timeout(extend(20)):
        while made.first.calls[-1][0] != "start" or len(made.second.calls) < 3:
            await asyncio.sleep(0.01)
    made.second.problem = "its node has no memory left"
    with pytest.raises(RoleFailed, match="its node has no memory left"):
        await starting
    with pytest.raises(RoleFailed):
        await ends(task)
    await later.stop()


async def test_a_member_ends_when_the_first_node_is_gone(replica):
    made, task = replica
    backend = made.open()
    await backend.start(str(made.here / "base"), "")
    assert backend.members is not None and backend.members._session is not None
    await backend.members.close()
    with pytest.raises(RoleFailed, match="the first node of this replica is gone"):
        await ends(task)


async def test_a_member_ends_when_asked_by_the_supervisor_alone(replica, monkeypatch):
    made, task = replica
    monkeypatch.setattr("hpc_rl.servers.members.STOP_S", 0.0)
    made.stopping.set()
    assert await ends(task) == ExitCode.STOPPED


async def test_the_end_of_a_program_is_no_failure_once_it_is_announced(replica):
    made, task = replica
    backend = made.open()
    await backend.start(str(made.here / "base"), "")
    await backend.members.announce_stop()
    made.second.problem = "it ended with the program of the first node"
    assert await ends(task) == ExitCode.STOPPED
    await backend.stop()


async def test_errors_of_a_member_are_those_of_the_replica(replica):
    made, _ = replica
    backend = made.open()
    await backend.start(str(made.here / "base"), "")
    other = ModelCopy(made.here / "other/weights", made.copy.versions)
    with pytest.raises(Damaged):
        await backend.members.prepare(other, "0.9")
    with pytest.raises(OSError, match=r"the node's copy of the weights has version None, not 0\.1"):
        await backend.members.hold(other, str(FIRST))
    with pytest.raises(OSError, match="already running"):
        await backend.members.start(str(made.here / "base"), None, "")
    status, answer = await backend.request("/prepare_weights", {"weight_version": "0.9"})
    assert status == 424 and answer["error"] == "damaged"
    await backend.stop()


async def test_only_the_control_token_commands_a_member(replica):
    made, task = replica
    url = (await asyncio.to_thread(made.names.wait, made.key, extend(10)))["url"]
    async with aiohttp.ClientSession() as session:
        for token in ("", TOKENS["data"]):
            async with session.post(
                f"{url}/stop", json={}, headers={"Authorization": f"Bearer {token}"}
            ) as one:
                assert one.status == 401
    assert not task.done()


async def test_a_node_that_never_starts_its_process_is_named(tmp_path):
    made = Replica(tmp_path)
    backend = made.open()
    backend.members._timeout_s = 0.0
    with pytest.raises(RoleFailed, match=r"a node of this replica did not start its process: .*member/1"):
        await backend.start(str(tmp_path), "")
    await backend.stop()
