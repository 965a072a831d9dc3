"""The wire protocol, checked alike against atroposlib's own `run-api` and against ours.

What passes on the peer is what environments of atroposlib rely on; where ours answers more, it says so.
"""

import asyncio
import contextlib
import gzip
import json
import subprocess

import aiohttp
import pytest
from patience import extend

from hpc_rl.core.net import bind
from tests.unit.atropos.test_atropos_api import TRAINER, World, group

pytestmark = pytest.mark.timeout(120)
BATCH = TRAINER["batch_size"]  # sequences


class Ours:
    """A rollout service; its trainer is the one of the trial."""

    def __init__(self, world: World) -> None:
        self.world, self.step = world, 0
        self.url = str(world.client.make_url("/t/" + "d" * 8))

    async def start_trainer(self) -> None:
        assert await self.world.trainer_at(1) is None

    async def take_batch(self) -> list[list[list[int]]]:
        """The tokens of each group of the next batch."""
        self.step += 1
        batch = await self.world.trainer_at(self.step)
        return [[one.ids.tolist() for one in found.trajectories] for found in batch.groups]


class Peer:
    """run-api, between whose tests all is reset; a trainer registers, and asks for a batch."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def start_trainer(self) -> None:
        async with aiohttp.ClientSession() as session:
            await session.post(self.url + "/register", json=TRAINER)
            async with session.get(self.url + "/batch") as response:
                assert await response.json() == {"batch": None}

    async def take_batch(self) -> list[list[list[int]]]:
        async with aiohttp.ClientSession() as session, session.get(self.url + "/batch") as response:
            return [found["tokens"] for found in (await response.json())["batch"]]


@pytest.fixture(scope="module")
def peer_url(atropos_python):
    listener = bind("127.0.0.1")
    port = listener.getsockname()[1]
    listener.close()
    argv = [atropos_python, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(extend(30))


@pytest.fixture(params=["peer", "ours"])
async def api(request, tmp_path):
    if request.param == "ours":
        world = await World(tmp_path).start()
        yield Ours(world)
        await world.stack.aclose()
        await world.service.close()
        return
    url = request.getfixturevalue("peer_url")
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            with contextlib.suppress(aiohttp.ClientConnectorError):
                async with session.get(url + "/reset_data") as response:
                    assert await response.text() == "Reset successful"
                    break
            await asyncio.sleep(0.1)
    yield Peer(url)


async def ask(api, method, path, body=None, status=200, **settings):
    request = aiohttp.request(method, api.url + path, json=body, **settings)
    async with request as response:
        assert response.status == status, await response.text()
        return await response.json() if status in (200, 422) else None


async def register(api, name="conf", size=4, **more):
    asked = {"max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": size}
    return await ask(api, "POST", "/register-env", asked | more)


async def test_environments_wait_for_the_first_batch_of_the_trainer(api):
    assert await ask(api, "GET", "/") == {"message": "AtroposLib API"}
    assert await ask(api, "GET", "/wandb_info") == {"group": None, "project": None}
    assert {"current_step": 0, "queue_size": 0}.items() <= (await ask(api, "GET", "/status")).items()
    assert await register(api) == {"status": "wait for trainer to start"}
    await api.start_trainer()
    first, second, third = await register(api), await register(api), await register(api, "other")
    assert first["status"] == "success" and first["starting_step"] == 0
    assert {"env_id", "wandb_name", "checkpoint_dir", "checkpoint_interval", "num_steps"} < first.keys()
    assert [one["env_id"] for one in (first, second, third)] == [0, 1, 2]
    assert [one["wandb_name"] for one in (first, second, third)] == ["conf_0", "conf_1", "other_0"]
    assert await ask(api, "GET", "/info") == {"batch_size": BATCH, "max_token_len": 64}


async def test_fields_that_are_missing_or_wrong_are_422(api):
    await api.start_trainer()
    assert "detail" in await ask(api, "POST", "/register-env", {"desired_name": "x"}, status=422)
    without = {name: value for name, value in TRAINER.items() if name != "num_steps"}
    assert "detail" in await ask(api, "POST", "/register", without, status=422)
    for name in ("tokens", "masks", "scores"):
        body = {key: value for key, value in group(None, 1).items() if key != name}
        assert "detail" in await ask(api, "POST", "/scored_data", body, status=422)
    no_role = group(None, 1, messages=[[{"content": "hi"}]] * 4)
    assert "detail" in await ask(api, "POST", "/scored_data", no_role, status=422)
    no_content = group(None, 1, messages=[[{"role": "user", "content": None}]] * 4)
    assert (await ask(api, "POST", "/scored_data", no_content))["status"] == "received"


async def test_a_second_register_of_a_trainer_changes_nothing_for_environments(api):
    await api.start_trainer()
    env_id = (await register(api))["env_id"]
    assert len({(await ask(api, "POST", "/register", TRAINER))["uuid"] for _ in range(2)}) == 2
    await ask(api, "POST", "/scored_data", group(env_id, 1))
    assert (await ask(api, "GET", "/status-env", {"env_id": env_id}))["queue_size"] == 1


async def test_an_environment_polls_with_a_body(api):
    await api.start_trainer()
    ids = [(await register(api, size=size))["env_id"] for size in (4, 4)]
    view = await ask(api, "GET", "/status-env", {"env_id": ids[0]})
    assert view == {
        "current_step": 0, "queue_size": 0, "unallocated_fraction": 1.0, "self_queue_size": 0,
        "max_group_size": view["max_group_size"], "env_weight": 0.5,
    }  # fmt: skip
    assert view["max_group_size"] >= 1
    for tag in range(3):
        await ask(api, "POST", "/scored_data", group(ids[0], tag))
    own, other = [await ask(api, "GET", "/status-env", {"env_id": number}) for number in ids]
    assert own["self_queue_size"] == own["queue_size"] == 3
    assert other["self_queue_size"] == 0 and other["queue_size"] == 3


async def test_bodies_may_be_compressed_and_have_unknown_keys(api):
    await api.start_trainer()
    env_id = (await register(api))["env_id"]
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    data = gzip.compress(json.dumps(group(env_id, 5, unheard_of=[1])).encode())
    async with aiohttp.ClientSession() as session:
        async with session.post(api.url + "/scored_data", data=data, headers=headers) as response:
            assert await response.json() == {"status": "received"}
        async with session.post(api.url + "/scored_data", data=b"no gzip", headers=headers) as response:
            assert response.status == 400
    assert (await ask(api, "GET", "/latest_example"))["tokens"] == group(env_id, 5)["tokens"]


async def test_parts_of_a_group_wait_for_each_other(api):
    await api.start_trainer()
    env_id = (await register(api))["env_id"]
    three = await ask(api, "POST", "/scored_data", group(env_id, 1, size=3))
    assert three == {"status": "buffered", "buffer_size": 3}
    one = await ask(api, "POST", "/scored_data", group(env_id, 2, size=1))
    assert one == {"status": "buffered", "buffer_size": 0}
    several = await ask(api, "POST", "/scored_data_list", [group(env_id, 3), group(env_id, 4, size=2)])
    assert several == {"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 2}
    assert (await ask(api, "GET", "/status-env", {"env_id": env_id}))["queue_size"] == 2


async def test_a_batch_has_whole_groups_and_exactly_its_sequences(api):
    await api.start_trainer()
    small, large = [(await register(api, size=size))["env_id"] for size in (2, 8)]
    for tag in range(4):
        await ask(api, "POST", "/scored_data", group(small, tag, size=2))
    await ask(api, "POST", "/scored_data", group(large, 8, size=8))
    batch = await api.take_batch()
    assert sum(map(len, batch)) == BATCH and sorted(map(len, batch)) == [2, 2, 2, 2, 8]
    sent = [group(small, tag, size=2)["tokens"] for tag in range(4)] + [group(large, 8, size=8)["tokens"]]
    assert sorted(batch) == sorted(sent)


async def test_an_environment_that_is_not_there_can_not_disconnect(api):
    await api.start_trainer()
    env_id = (await register(api))["env_id"]
    assert (await ask(api, "POST", "/disconnect-env", {"env_id": 77}))["status"] == "failure"
    assert await ask(api, "POST", "/disconnect-env", {"env_id": env_id}) == {"status": "success"}
