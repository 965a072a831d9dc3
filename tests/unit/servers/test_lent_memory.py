"""A server that shares its GPUs with the trainer: when it starts, when it holds memory, which failures end it."""

import asyncio
import threading

import pytest
from patience import extend

from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.servers.replica import Identity, Replica

TOKENS = {"control": "c" * 8, "data": "d" * 8}
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
AWAKE = [(RESUME, ["weights"]), ("/update_weights_from_disk", None), (RESUME, ["kv_cache"])]
AWAKE += [("/continue_generation", None)]


class Backend:
    receiver = None

    def __init__(self) -> None:
        self.started: list[str] = []
        self.calls: list[tuple[str, list[str] | None]] = []
        self.fails = ""

    async def start(self, path, version):
        self.started.append(version)

    async def request(self, path, body):
        self.calls.append((path, body.get("tags")))
        return (500, "out of memory") if path == self.fails else (200, {"path": path})

    def alive(self):
        return ""

    async def stop(self):
        pass


class Server:
    """A replica in this process."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.backend, self.stopping = trial, Backend(), threading.Event()
        self.names = open_names(trial)
        who = Identity(0, "7.1", 0)
        self.replica = Replica(self.backend, trial, self.names, TOKENS, who, "", shares_gpus=True)
        self.task = asyncio.create_task(self.replica.run(self.stopping))

    async def call(self, path):
        return await self.replica.proxy.control(path, {})

    async def until(self, state: str) -> None:
        async with asyncio.timeout(extend(20)):
            while self.replica.proxy.state != state:
                await asyncio.sleep(0.01)

    @property
    def state_in_lease(self) -> str:
        return self.names.list_leases(keys.servers("rollout"))["server/rollout/0"].value["state"]


@pytest.fixture
async def server(tmp_path):
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    made = Server(trial)
    await made.until("released")
    yield made
    made.stopping.set()
    await asyncio.gather(made.task, return_exceptions=True)


def publish(trial: Trial, label: str) -> None:
    write_json(trial.current_weights, {"label": label, "path": f"/weights/{label}"})


async def start_serving(server: Server) -> None:
    publish(server.trial, "0.1")
    assert (await server.call(RESUME))[0] == 200
    await server.until("serving")


async def test_it_starts_when_weights_are_published_and_the_trainer_lends_the_gpus(server):
    publish(server.trial, "0.1")
    await asyncio.sleep(0.3)  # nothing happens by itself
    assert server.backend.started == [] and server.state_in_lease == "released"
    assert (await server.call(RESUME))[0] == 200
    await server.until("serving")
    assert server.backend.started == ["0.1"]


async def test_without_weights_it_does_not_start_and_a_take_back_needs_nothing(server):
    assert (await server.call(RESUME))[0] == 503
    assert await server.call(RELEASE) == (200, {"state": "released"})
    publish(server.trial, "0.1")
    await asyncio.sleep(0.3)
    assert server.backend.started == []


async def test_it_interrupts_requests_and_comes_back_with_the_newest_weights(server):
    await start_serving(server)
    assert await server.call(RELEASE) == (200, {"state": "released"})
    assert server.backend.calls == [("/pause_generation", None), (RELEASE, None)]
    assert server.state_in_lease == "serving"  # requests wait here
    publish(server.trial, "0.2")
    assert (await server.call("/switch_weights"))[0] == 503
    server.backend.calls.clear()
    assert await server.call(RESUME) == (200, {"state": "serving"})
    assert server.backend.calls == AWAKE
    assert server.replica.proxy.version == "0.2"
    server.backend.calls.clear()
    assert await server.call(RESUME) == (200, {"state": "serving"})  # again: nothing to do
    assert server.backend.calls == []


async def test_twice_released_is_released_and_the_same_weights_come_back(server):
    await start_serving(server)
    for _ in range(2):
        assert await server.call(RELEASE) == (200, {"state": "released"})
    assert [path for path, _ in server.backend.calls] == ["/pause_generation", RELEASE]
    assert await server.call(RESUME) == (200, {"state": "serving"})
    assert ("/update_weights_from_disk", None) in server.backend.calls


@pytest.mark.parametrize("path", ["/update_weights_from_disk", RELEASE])
async def test_a_failure_ends_it_because_nobody_knows_what_it_holds(server, path):
    await start_serving(server)
    server.backend.fails = path
    answers = [await server.call(one) for one in (RELEASE, RESUME)]
    assert 503 in [status for status, _ in answers]
    with pytest.raises(RoleFailed, match="out of memory"):
        await server.task


async def test_a_server_with_gpus_of_its_own_keeps_its_memory(tmp_path):
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    replica = Replica(Backend(), trial, open_names(trial), TOKENS, Identity(0, "7.1", 0), "")
    status, answer = await replica.proxy.control(RELEASE, {})
    assert status == 400 and "shares no GPU" in answer["message"]
