"""Publishing against fake servers over real HTTP: good, slow, dead, refusing, lying ones."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from aiohttp import web
from patience import extend

from hpc_rl.core.errors import RoleFailed, Stale
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.weights import disk
from hpc_rl.weights.publish import Publisher

pytestmark = pytest.mark.waits

TOKENS = {"control": "c-token", "data": "d-token"}


class FakeServer:
    """Speaks the two calls; `control` may be replaced by a test."""

    def __init__(self, names: NameResolve, index: int) -> None:
        self.names, self.index = names, index
        self.calls: list[str] = []
        self.version = ""
        self.slow = False
        self.ending = asyncio.Event()
        self.refuse = False
        self.lie = False
        self.damaged = False
        self.held = ""
        self.act = None  # answers in place of `control`

    async def start(self) -> FakeServer:
        app = web.Application()
        for path in (
            "/prepare_weights",
            "/switch_weights",
            "/hold_weights",
        ):
            app.router.add_post(path, self.control)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.lease = self.names.lease(
            keys.server("rollout", self.index), {"url": self.url, "version": ""}, ttl_s=60
        )
        return self

    async def control(self, request: web.Request) -> web.Response:
        if self.act:
            return await self.act(self, request)
        assert request.headers["Authorization"] == "Bearer c-token"
        self.calls.append(request.path)
        body = await request.json()
        if request.path == "/hold_weights":
            if self.damaged:
                return web.json_response({"error": "damaged", "message": "0.1/rank-00000"}, status=424)
            self.held = body["weight_version"]
        if request.path == "/prepare_weights" and self.damaged:
            return web.json_response({"error": "damaged", "message": "0.1/rank-00000"}, status=424)
        if request.path == "/switch_weights":
            if self.slow:
                await self.ending.wait()
            if self.refuse:
                return web.json_response({"error": "bad file"}, status=400)
            if not self.lie:
                self.version = body["weight_version"]
            return web.json_response({"weight_version": self.version, "paused_s": 0.25})
        return web.json_response({})

    async def stop(self) -> None:
        self.ending.set()
        await self.runner.cleanup()


@pytest.fixture
def trial(tmp_path):
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    return trial


@pytest.fixture
async def servers(trial):
    names = open_names(trial)
    started = [await FakeServer(names, index).start() for index in range(3)]
    yield started
    for server in started:
        await server.stop()


@pytest.fixture
def publisher(trial, servers):
    made = Publisher(
        trial, servers[0].names, TOKENS, setup_timeout_s=2.0, update_timeout_s=extend(0.7), watch_s=0.05
    )
    yield made
    made.close()


def write(trial: Trial, lineage: int, step: int) -> tuple[WeightVersion, object]:
    version = WeightVersion(lineage, step)
    half_written(trial, version)
    return version, disk.finish(trial, version)


def half_written(trial: Trial, version: WeightVersion) -> None:
    folder = trial.weights / f".{version}.tmp"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")


async def publish(publisher: Publisher, trial: Trial, step: int, stopping: threading.Event | None = None):
    version, path = write(trial, 0, step)
    return await asyncio.to_thread(publisher.publish, version, path, 7, stopping)


def test_a_trainer_that_was_overtaken_publishes_nothing(trial):
    write(trial, 0, 1)
    write_json(trial.lineage(1), {"lineage": 1, "from_step": 0})
    with pytest.raises(Stale, match=r"lineage 1\) has taken the place"):
        write(trial, 0, 2)
    assert json.loads(trial.current_weights.read_text())["label"] == "0.1"


async def test_every_live_server_gets_the_weights_in_the_right_order(publisher, trial, servers):
    result = await publish(publisher, trial, 1)
    assert result.acknowledged == ["server/rollout/0", "server/rollout/1", "server/rollout/2"]
    for server in servers:
        assert server.version == "0.1"
        assert server.calls == ["/prepare_weights", "/switch_weights"]
    assert list(result.pauses_s.values()) == [0.25] * 3
    pointer = json.loads(trial.current_weights.read_text())
    assert pointer.pop("written_at") > 0
    assert pointer == {"label": "0.1", "lineage": 0, "step": 1, "path": str(trial.published("0.1"))}


async def test_slow_and_dead_servers_are_left_out(publisher, trial, servers):
    slow, dead, good = servers
    slow.slow = True
    await dead.stop()
    start = time.monotonic()
    result = await publish(publisher, trial, 1)
    assert result.acknowledged == ["server/rollout/2"]
    assert set(result.failed) == {"server/rollout/0", "server/rollout/1"}
    assert time.monotonic() - start < extend(5)
    assert good.version == "0.1"
    good.calls.clear()
    start = time.monotonic()
    await publish(publisher, trial, 2)  # neither is asked again: no time is lost on them
    assert time.monotonic() - start < extend(0.4)
    assert len(slow.calls) == 2


async def test_a_server_that_loaded_by_itself_is_asked_again(publisher, trial, servers):
    bad = servers[0]
    bad.refuse = True
    result = await publish(publisher, trial, 1)
    assert "bad file" in result.failed["server/rollout/0"]
    bad.refuse = False
    assert "server/rollout/0" not in (await publish(publisher, trial, 2)).acknowledged
    bad.lease.renew({"url": bad.url, "version": "0.2"})
    assert "server/rollout/0" in (await publish(publisher, trial, 3)).acknowledged


async def test_a_server_with_a_new_epoch_is_asked_again(publisher, trial, servers):
    servers[0].lie = True
    assert (await publish(publisher, trial, 1)).failed[
        "server/rollout/0"
    ] == "reports weights version '' after the update"
    servers[0].lie = False
    servers[0].lease = servers[0].names.lease(
        keys.server("rollout", 0), {"url": servers[0].url, "version": ""}, ttl_s=60
    )
    assert "server/rollout/0" in (await publish(publisher, trial, 2)).acknowledged


async def test_a_server_with_damaged_files_asks_for_all_values(publisher, trial, servers):
    servers[1].damaged = True
    result = await publish(publisher, trial, 1)
    assert result.needs_whole and result.acknowledged == ["server/rollout/0", "server/rollout/2"]
    assert "0.1/rank-00000" in result.failed["server/rollout/1"]
    assert "/switch_weights" not in servers[1].calls  # it generates with the weights that it has
    servers[1].damaged = False
    value = {"url": servers[1].url, "version": "", "state": "loading"}
    servers[1].lease.renew({**value, "lacks_files": True})  # as one that starts
    assert (await publish(publisher, trial, 2)).needs_whole
    servers[1].lease.renew(value)
    assert not (await publish(publisher, trial, 3)).needs_whole


async def test_servers_are_paused_in_turns(publisher, trial, servers):
    publisher.max_paused = 1
    paused, most = set(), 0

    async def control(self, request):
        nonlocal most
        if request.path == "/switch_weights":
            paused.add(self.index)
            most = max(most, len(paused))
            await asyncio.sleep(0.02)
            paused.discard(self.index)
            self.version = (await request.json())["weight_version"]
        return web.json_response({"weight_version": self.version})

    for server in servers:
        server.act = control
    assert len((await publish(publisher, trial, 1)).acknowledged) == 3
    assert most == 1 and not paused
    publisher.max_paused = None
    await publish(publisher, trial, 2)
    assert most == 3


async def test_no_server_at_all_fails_in_words(publisher, trial, servers):
    for server in servers:
        server.lease.release()
    with pytest.raises(
        RoleFailed, match=r"no generation server loaded weights 0\.1 within 2 s .*: none is ready"
    ):
        await publish(publisher, trial, 1)


async def test_it_waits_for_the_first_server_to_appear(publisher, trial, servers):
    for server in servers:
        server.lease.release()
    waiting = asyncio.create_task(publish(publisher, trial, 1))
    await asyncio.sleep(0.3)
    servers[1].lease = servers[1].names.lease(
        keys.server("rollout", 1), {"url": servers[1].url, "version": ""}, ttl_s=60
    )
    assert (await waiting).acknowledged == ["server/rollout/1"]


async def test_a_server_that_still_loads_is_not_asked_and_not_held_against_it(publisher, trial, servers):
    servers[0].lease.renew({"url": servers[0].url, "version": "", "state": "loading"})
    assert (await publish(publisher, trial, 1)).acknowledged == ["server/rollout/1", "server/rollout/2"]
    servers[0].lease.renew({"url": servers[0].url, "version": "", "state": "waiting"})
    assert "server/rollout/0" in (await publish(publisher, trial, 2)).acknowledged


async def test_told_to_stop_it_does_not_wait_for_servers(publisher, trial, servers):
    for server in servers:
        server.lease.release()
    stopping = threading.Event()
    stopping.set()
    assert (await publish(publisher, trial, 1, stopping)).acknowledged == []


async def test_a_publish_is_cheap(publisher, trial, servers):
    await publish(publisher, trial, 1)
    times = []
    for step in range(2, 12):
        version, path = write(trial, 0, step)
        start = time.monotonic()
        await asyncio.to_thread(publisher.publish, version, path, 7)
        times.append(time.monotonic() - start)
    assert min(times) < extend(0.016)  # no pause is waited for; a busy machine slows some of them


async def test_old_folders_go_but_for_the_newest_two_and_held_ones(publisher, trial, servers):
    await publish(publisher, trial, 1)
    servers[0].lease.renew({"url": servers[0].url, "version": "0.1"})
    for step in range(2, 6):
        await publish(publisher, trial, step)
    deadline = time.monotonic() + extend(5)
    while time.monotonic() < deadline:
        folders = sorted(path.name for path in trial.weights.iterdir() if path.is_dir())
        if folders == ["0.1", "0.4", "0.5"]:
            break
        await asyncio.sleep(0.02)
    assert folders == ["0.1", "0.4", "0.5"]


def test_versions_order_by_lineage_first_and_by_number(trial):
    for lineage, step in ((0, 9), (0, 10), (0, 30), (1, 2)):
        write(trial, lineage, step)
    assert disk.prune(trial, held=[]) == ["0.10", "0.9"]
    with pytest.raises(Stale, match=r"weights 0\.31 are not published"):
        write(trial, 0, 31)


def test_a_trial_that_is_done_keeps_no_published_weights(trial):
    for step in (1, 2):
        write(trial, 0, step)
    half_written(trial, WeightVersion(0, 3))
    assert disk.drop(trial) == 2 * len(b"weights")
    assert list(trial.weights.iterdir()) == [] and disk.drop(trial) == 0


def test_what_a_killed_trainer_left_is_not_seen_and_goes(trial):
    write(trial, 0, 1)
    half_written(trial, WeightVersion(0, 2))
    (trial.weights / ".current.json.abc.tmp").write_text("{")
    assert disk.prune(trial, held=[]) == []
    disk.clear_leftovers(trial)
    assert sorted(path.name for path in trial.weights.iterdir()) == ["0.1", "current.json"]


async def wait_until(holds) -> None:
    async with asyncio.timeout(extend(10)):
        while not holds():
            await asyncio.sleep(0.02)


async def test_a_share_of_the_servers_stays_at_the_version_of_an_evaluation(publisher, trial, servers):
    publisher.server_share = publisher.held.share = 0.4  # 1.2 of 3
    publisher.hold("0.1")
    publisher.kept = frozenset({"0.1"})
    assert not publisher.held.keys, "it is not published yet"
    for step in (1, 2, 3, 4):
        result = await publish(publisher, trial, step)
    assert result.acknowledged == ["server/rollout/1", "server/rollout/2"]
    assert [server.version for server in servers] == ["0.1", "0.4", "0.4"]
    assert [server.held for server in servers] == ["0.1", "", ""]
    record = json.loads(trial.held_weights.read_text())
    assert record == {"label": "0.1", "path": str(trial.published("0.1")), "servers": ["server/rollout/0"]}
    assert trial.published("0.1").is_dir()
    await asyncio.to_thread(publisher.release)
    publisher.kept = frozenset()
    assert servers[0].held == "" and not trial.held_weights.exists()
    assert len((await publish(publisher, trial, 5)).acknowledged) == 3


async def test_with_one_server_a_publication_waits_for_the_evaluation(publisher, trial, servers):
    for server in servers[1:]:
        server.lease.release()
    await publish(publisher, trial, 1)
    publisher.hold("0.1")
    await wait_until(lambda: servers[0].held == "0.1")
    publisher.setup_timeout_s = 0.1
    newer = asyncio.create_task(publish(publisher, trial, 2))
    await asyncio.sleep(0.5)  # longer than the limit for servers that are missing
    assert not newer.done() and servers[0].version == "0.1"
    publisher.setup_timeout_s = 5.0
    await asyncio.to_thread(publisher.release)
    assert (await newer).acknowledged == ["server/rollout/0"]


async def test_a_version_that_no_server_can_load_is_a_problem_of_its_evaluation(publisher, trial, servers):
    for server in servers:
        server.damaged = True
    publisher.hold("0.1", is_published=True)
    await wait_until(lambda: "0.1/rank-00000" in publisher.held.problem)
