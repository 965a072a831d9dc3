"""Joining servers: real groups, and servers that refuse or never answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch
from patience import extend

from hpc_rl.core.errors import RequestRefused
from hpc_rl.name_resolve.shared_fs import LeaseView
from hpc_rl.servers.weight_group import WeightGroup, pack, reach_store
from hpc_rl.weights import process_groups
from hpc_rl.weights.process_groups import ProcessGroups

pytestmark = pytest.mark.waits

BUSY = ("loading",)
TENSORS = [("a", torch.arange(6.0)), ("b", torch.ones(3))]


class Source:
    """Two buckets."""

    def __init__(self) -> None:
        packed = [pack([one]) for one in TENSORS]
        self.buckets = [bucket for bucket, _ in packed]
        self.flat = [flat for _, flat in packed]

    def load(self, index: int) -> torch.Tensor:
        return self.flat[index]


class Server:
    """Receives buckets in this process; a test may let a call fail or wait."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.got: dict[str, torch.Tensor] = {}
        self.fails_at = self.waits_at = ""
        self.ends = asyncio.Event()
        self.group: WeightGroup | None = None

    async def _note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise RequestRefused(f"{name} is refused")
        if name == self.waits_at:
            await self.ends.wait()

    async def join_group(self, name: str, where: tuple[str, int], size: int, backend: str) -> None:
        await self._note("join")
        assert (size, backend) == (2, "gloo")

        def join() -> WeightGroup:
            store = reach_store(*where, extend(60))
            return WeightGroup(store, 1, size, name, address="127.0.0.1", timeout_s=extend(60))

        self.group = await asyncio.to_thread(join)

    async def leave_group(self, name: str) -> None:
        await self._note("leave")

    async def pause(self, mode: str) -> None:
        await self._note("pause")

    async def resume(self) -> None:
        await self._note("resume")

    async def begin_update(self, label: str) -> None:
        await self._note("begin")

    async def receive_bucket(self, body: dict[str, Any]) -> None:
        name = body["names"][0]
        await self._note(name)
        assert self.group is not None
        flat = torch.empty(dict(TENSORS)[name].nbytes, dtype=torch.uint8)
        work = self.group.broadcast(flat)
        await asyncio.to_thread(work.wait)
        self.got[name] = flat.view(torch.float32)

    async def end_update(self) -> None:
        await self._note("end")


def leases(*epochs: int, **value: Any) -> dict[str, LeaseView]:
    body = {"receiver": {"backend": "gloo", "num_ranks": 1}, "state": "serving", **value}
    views = [
        LeaseView(key=f"s{index}", epoch=epoch, value={"url": f"s{index}", **body}, alive=True, age_s=0.0)
        for index, epoch in enumerate(epochs)
    ]
    return {view.key: view for view in views}


@pytest.fixture
async def groups():
    made = ProcessGroups("127.0.0.1", torch.device("cpu"))
    yield made
    await made.close()


@pytest.fixture
def servers():
    return {"s0": Server(), "s1": Server()}


async def choose(groups, servers, seen):
    groups.follow(seen, servers.__getitem__, BUSY)
    return await groups.choose(seen)


async def test_all_joined_servers_receive_all_buckets(groups, servers):
    assert await choose(groups, servers, leases(1, 1)) == ["s0", "s1"]
    sent = await groups.send(["s0", "s1"], "0.1", Source(), "retract")
    assert sent.pauses_s.keys() == {"s0", "s1"} and not sent.failed
    for server in servers.values():
        assert server.calls == ["join", "pause", "begin", "a", "b", "end", "resume"]
        assert all(torch.equal(server.got[name], tensor) for name, tensor in TENSORS)


@pytest.mark.parametrize("call", ["pause", "begin", "a", "b", "end", "resume"])
async def test_a_server_that_refuses_a_call_does_not_concern_others(groups, servers, call):
    await choose(groups, servers, leases(1, 1))
    servers["s0"].fails_at = call
    sent = await groups.send(["s0", "s1"], "0.1", Source(), "retract")
    assert sent.pauses_s.keys() == {"s1"}, sent.failed
    assert f"{call} is refused" in sent.failed["s0"]
    assert servers["s0"].calls[-1] == call
    assert await choose(groups, servers, leases(1, 1)) == ["s1"]  # it joins again after a while
    servers["s0"].fails_at = ""
    assert await choose(groups, servers, leases(2, 1)) == ["s0", "s1"]  # its next start has


async def test_a_server_that_hangs_is_left_out_after_the_limit(groups, servers, monkeypatch):
    await choose(groups, servers, leases(1, 1))
    monkeypatch.setattr(process_groups, "BUCKET_S", extend(1.0))
    servers["s1"].waits_at = "b"
    sent = await groups.send(["s0", "s1"], "0.1", Source(), "retract")
    assert sent.pauses_s.keys() == {"s0"} and "no answer within" in sent.failed["s1"]


async def test_a_publication_waits_only_a_little_for_a_server_that_joins(groups, servers, monkeypatch):
    monkeypatch.setattr(process_groups, "JOIN_WAIT_S", 0.05)
    servers["s0"].waits_at = "join"
    begun = time.monotonic()
    assert await choose(groups, servers, leases(1)) == []
    assert time.monotonic() - begun < extend(2.0)
    monkeypatch.setattr(process_groups, "JOIN_WAIT_S", extend(60))
    servers["s0"].ends.set()
    assert await choose(groups, servers, leases(1)) == ["s0"]
    assert servers["s0"].calls == ["join"]


async def test_lost_servers_lose_their_group(groups, servers):
    seen = leases(1, 1)
    await choose(groups, servers, seen)
    assert await choose(groups, servers, {"s0": seen["s0"]}) == ["s0"]
    assert await choose(groups, servers, leases(3)) == ["s0"]  # another start: it has joined again
    assert servers["s0"].calls == ["join", "join"]


async def test_servers_without_a_receiver_and_busy_ones_do_not_join(groups, servers):
    assert await choose(groups, servers, leases(1, receiver=None)) == []
    assert await choose(groups, servers, leases(1, state="loading")) == []
    assert servers["s0"].calls == []


async def test_trainer_ranks_that_fail_are_an_error(groups, servers):
    await choose(groups, servers, leases(1))
    source = Source()
    source.flat.pop()
    with pytest.raises(IndexError):
        await groups.send(["s0"], "0.1", source, "retract")


async def test_a_server_that_waits_for_a_bucket_notices_a_closed_group(groups, servers):
    await choose(groups, servers, leases(1))
    await groups.send(["s0"], "0.1", Source(), "retract")
    group = servers["s0"].group
    group.limit(extend(600))
    waiting = asyncio.create_task(asyncio.to_thread(group.receive, torch.empty(8, dtype=torch.uint8)))
    await asyncio.sleep(0)
    assert await choose(groups, servers, {}) == []
    with pytest.raises(RuntimeError):
        async with asyncio.timeout(extend(60)):
            await waiting
