"""Lending the GPUs: servers get memory only while they are lent, also those that start late or fail."""

from __future__ import annotations

import asyncio
import threading

import pytest
from aiohttp import web
from patience import extend, until

from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import WeightVersion
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.weights.lending import LendingPublisher

TOKENS = {"control": "c-token", "data": "d-token"}


class Server:
    """Has memory or not; it starts in `starts` calls."""

    def __init__(self, trial: Trial, index: int, starts: int = 0) -> None:
        self.names, self.index, self.starts = open_names(trial), index, starts
        self.holds, self.keeps, self.version = False, False, ""

    async def start(self) -> Server:
        app = web.Application()
        app.router.add_post("/release_memory_occupation", self.release)
        app.router.add_post("/resume_memory_occupation", self.resume)
        app.router.add_post("/prepare_weights", self.prepare)
        app.router.add_post("/switch_weights", self.switch)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        value = {"url": url, "version": "", "state": "released"}  # an old state: leases are read late
        self.lease = self.names.lease(keys.server("rollout", self.index), value, ttl_s=60)
        return self

    async def release(self, request: web.Request) -> web.Response:
        self.holds = self.holds and self.keeps
        return web.json_response({}, status=503 if self.holds else 200)

    async def resume(self, request: web.Request) -> web.Response:
        self.starts -= 1
        self.holds = True
        return web.json_response({"state": "serving" if self.starts < 0 else "loading"})

    async def prepare(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def switch(self, request: web.Request) -> web.Response:
        assert self.holds and self.starts < 0
        self.version = (await request.json())["weight_version"]
        return web.json_response({"weight_version": self.version, "paused_s": 0.1})


@pytest.fixture
def trial(tmp_path):
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    (trial.weights / "0.1").mkdir()
    return trial


@pytest.fixture
async def servers(trial):
    started = [await Server(trial, index).start() for index in range(2)]
    yield started
    for server in started:
        await server.runner.cleanup()


@pytest.fixture
def publisher(trial, servers):
    made = LendingPublisher(
        trial, open_names(trial), TOKENS, setup_timeout_s=extend(5), update_timeout_s=extend(5), watch_s=0.05
    )
    yield made
    made.close()


def publish(publisher: LendingPublisher, trial: Trial, stopping: threading.Event | None = None):
    arguments = (WeightVersion(0, 1), trial.weights / "0.1", 7, stopping)
    return asyncio.create_task(asyncio.to_thread(publisher.publish, *arguments))


async def test_a_publication_waits_until_the_gpus_are_lent(publisher, trial, servers):
    task = publish(publisher, trial)
    await asyncio.sleep(0.3)
    assert not task.done() and not any(server.holds for server in servers)
    publisher.lend()
    assert sorted((await task).acknowledged) == ["server/rollout/0", "server/rollout/1"]
    assert all(server.holds and server.version == "0.1" for server in servers)
    await asyncio.to_thread(publisher.take_back)
    assert not any(server.holds for server in servers)
    publisher.lend()
    await asyncio.to_thread(publisher.resume)  # without a publication
    assert all(server.holds for server in servers)


async def test_a_stop_ends_the_wait(publisher, trial, servers):
    stopping = threading.Event()
    task = publish(publisher, trial, stopping)
    stopping.set()
    assert (await task).acknowledged == []


async def test_a_server_that_starts_slowly_or_late_gets_memory_while_it_is_lent(publisher, trial, servers):
    servers[0].starts = servers[1].starts = 2
    publisher.lend()
    assert (await publish(publisher, trial)).acknowledged
    late = await Server(trial, 2).start()
    await until(lambda: late.holds)
    await asyncio.to_thread(publisher.take_back)
    assert not late.holds
    later = await Server(trial, 3).start()
    await asyncio.sleep(0.3)
    assert not later.holds
    for server in (late, later):
        await server.runner.cleanup()


async def test_the_trainer_waits_for_a_server_that_still_holds_memory(publisher, trial, servers):
    servers[0].holds = servers[0].keeps = True
    task = asyncio.create_task(asyncio.to_thread(publisher.take_back))
    await asyncio.sleep(0.3)
    assert not task.done()
    servers[0].keeps = False
    await task


async def test_it_gives_up_on_a_server_that_keeps_its_memory(publisher, servers):
    publisher.setup_timeout_s = 0.3
    servers[1].holds = servers[1].keeps = True
    with pytest.raises(RoleFailed, match="server 1 of pool rollout did not release"):
        await asyncio.to_thread(publisher.take_back)
