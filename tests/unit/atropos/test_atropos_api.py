"""The rollout API of Atropos over a real ledger: what environments see, and what the trainer gets."""

import asyncio
import contextlib
import gzip
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from hpc_rl.atropos import api as atropos_api
from hpc_rl.atropos import routes as atropos_routes_module
from hpc_rl.atropos.api import AtroposApi, TrialFacts
from hpc_rl.atropos.intake import SequenceLimits
from hpc_rl.atropos.routes import make_batch_handler, make_routes
from hpc_rl.core.types import decode
from hpc_rl.rollout import outside as outside_module
from hpc_rl.rollout.outside import OutsideGroups
from hpc_rl.rollout.report import describe_progress
from hpc_rl.rollout.routes import make_application, make_rollout_routes
from hpc_rl.rollout.sequencer import Rules, Sequencer
from hpc_rl.rollout.service import RolloutService
from tests.unit.atropos.test_intake import nothing_known
from tests.unit.rollout.test_rollout_service import Instant, Prompts

TOKENS = {"control": "c" * 8, "data": "d" * 8}
TRIAL = TrialFacts(SequenceLimits(1000, 64), "group", None, "/checkpoints", 0, 100)


class World:
    """A rollout service that environments feed; `restart` is a kill and a new incarnation."""

    def __init__(self, folder, **rules):
        self.folder = folder
        given = {"batch_size": 4, "max_concurrent": 8, "eta": 10, "batch_sequences": 16, "own_prompts": False}
        self.rules = Rules(**{**given, "n_samples": 4, **rules})
        self.stack = contextlib.AsyncExitStack()

    async def start(self):
        sequencer, lineages = Sequencer(self.rules), lambda: (0, [])
        self.service = RolloutService(self.folder, sequencer, Prompts(50), {}, lineages, Instant())
        self.api = AtroposApi(OutsideGroups(self.service), nothing_known, TRIAL)
        own = make_rollout_routes(self.service, atropos_batch=make_batch_handler(self.api))
        defs = [*make_routes(self.api), *own]
        server = TestServer(make_application(defs, TOKENS))
        await server.start_server(auto_decompress=False)  # as HttpService
        self.client = TestClient(server)
        await self.stack.enter_async_context(self.client)
        return self

    async def restart(self):
        await self.stack.aclose()  # no service.close(): what was not committed is lost
        self.stack = contextlib.AsyncExitStack()
        return await self.start()

    async def ask(self, method, path, body=None, status=200, token="data", **settings):
        headers = {"Authorization": f"Bearer {TOKENS[token]}", **settings.pop("headers", {})}
        async with self.client.request(method, path, json=body, headers=headers, **settings) as response:
            assert response.status == status, await response.text()
            return await response.json() if status in (200, 422) else None

    async def trainer_at(self, step):
        """The trainer asks for batch `step`; returns it, or None."""
        query = {"step": step, "lineage": 0, "wait_s": 0}
        headers = {"Authorization": f"Bearer {TOKENS['control']}"}
        async with self.client.get("/batch", params=query, headers=headers) as response:
            assert response.status in (200, 204), await response.text()
            return decode(await response.read()) if response.status == 200 else None

    async def register(self, name="conf", size=4, **more):
        body = {"max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": size}
        return await self.ask("POST", "/register-env", {**body, "min_batch_allocation": None, **more})

    async def push(self, env_id, tag, size=4, **fields):
        return await self.ask("POST", "/scored_data", group(env_id, tag, size), **fields)

    async def push_all(self, env_id, tags):
        for tag in tags:
            assert await self.push(env_id, tag) == {"status": "received"}

    async def post(self, data, status, **headers):
        """A body as it is, to /scored_data; returns the answer where it is JSON."""
        headers["Authorization"] = f"Bearer {TOKENS['data']}"
        async with self.client.post("/scored_data", data=data, headers=headers) as response:
            assert response.status == status
            return await response.json() if response.content_type == "application/json" else None

    async def get_queue_view(self, env_id):
        return await self.ask("GET", "/status-env", {"env_id": env_id})


@contextlib.asynccontextmanager
async def worlds(folder, **rules):
    made = await World(folder, **rules).start()
    try:
        yield made
    finally:
        await made.stack.aclose()
        await made.service.close()


def group(env_id, tag, size=4, **fields):
    """A group that its first token names."""
    tokens = [[tag, 7, 8 + i] for i in range(size)]
    masks = [[-100, *row[1:]] for row in tokens]
    scores = [float(i) for i in range(size)]
    return {"tokens": tokens, "masks": masks, "scores": scores, "env_id": env_id, **fields}


def tags_of(one):
    return int(one.trajectories[0].ids[0])


def tags(batch):
    return [tags_of(one) for one in batch.groups]


@pytest.fixture
async def world(tmp_path):
    async with worlds(tmp_path) as made:
        yield made


@pytest.fixture
async def joined(world):
    """A world with a trainer and environment 0."""
    await world.trainer_at(1)
    await world.register()
    return world


async def test_before_there_is_a_trainer_environments_wait(world):
    assert await world.ask("GET", "/") == {"message": "AtroposLib API"}
    assert await world.register() == {"status": "wait for trainer to start"}
    assert await world.ask("GET", "/info") == {"batch_size": 16, "max_token_len": 64}
    assert await world.ask("GET", "/sampling") == {"temperature": 1.0}
    assert (await world.ask("GET", "/status"))["current_step"] == 0
    assert await world.trainer_at(1) is None
    first, second = await world.register(), await world.register(weight=1.0)
    assert first == {
        "status": "success", "env_id": 0, "wandb_name": "conf_0", "checkpoint_dir": "/checkpoints",
        "starting_step": 0, "checkpoint_interval": 0, "num_steps": 100,
    }  # fmt: skip
    assert second["env_id"] == 1 and second["wandb_name"] == "conf_1"
    assert (await world.get_queue_view(0))["env_weight"] == 0.5
    assert (await world.register(None))["wandb_name"] == "environment_0"  # ends an environment upstream


async def test_missing_fields_are_422_with_their_names(world):
    await world.trainer_at(1)
    answer = await world.ask("POST", "/register-env", {"desired_name": None}, status=422)
    assert answer["detail"][0]["loc"] == ["body", "max_token_length"]
    answer = await world.ask("POST", "/scored_data", {"tokens": [[1]], "masks": [[1]]}, status=422)
    assert answer["detail"][0]["loc"] == ["body", "scores"]
    bad = group(0, 1, messages=[[{"content": "no role"}]] * 4)
    answer = await world.ask("POST", "/scored_data", bad, status=422)
    assert answer["detail"][0]["loc"][1] == "messages[0][0]"
    assert (await world.ask("POST", "/status-env", {"env_id": 0}, status=405)) is None


async def test_batches_are_the_oldest_groups_and_the_step_counts_acknowledged_ones(joined):
    await joined.push_all(0, range(100, 109))
    assert tags(await joined.trainer_at(1)) == [100, 101, 102, 103]
    status = await joined.get_queue_view(0)
    # the batch that is trained on still counts: 9 groups
    assert (status["current_step"], status["queue_size"], status["self_queue_size"]) == (0, 9, 9)
    assert tags(await joined.trainer_at(2)) == [104, 105, 106, 107]
    await asyncio.sleep(2 * outside_module.COUNT_AGAIN_S)
    assert (await joined.get_queue_view(0))["current_step"] == 1
    assert (await joined.get_queue_view(0))["queue_size"] == 5
    assert await joined.trainer_at(3) is None


async def test_bodies_may_be_compressed_and_wrong_ones_are_400(joined):
    gzipped = {"Content-Encoding": "gzip"}
    await joined.post(gzip.compress(json.dumps(group(0, 5)).encode()), 200, **gzipped)
    await joined.post(b"no gzip", 400, **gzipped)
    example = await joined.ask("GET", "/latest_example")
    assert example["tokens"][0][0] == 5 and len(example) == 12
    for deep in (b"[" * 100_000, b'{"tokens": ' + b"[" * 300 + b"]" * 300 + b"}"):  # the parser recurses
        await joined.post(deep, 422)


async def test_parts_that_add_up_are_joined(joined):
    assert await joined.push(0, 1, size=3) == {"status": "buffered", "buffer_size": 3}
    assert await joined.push(0, 2, size=2) == {"status": "buffered", "buffer_size": 5}
    assert await joined.push(0, 3, size=1) == {"status": "buffered", "buffer_size": 2}
    await joined.push_all(0, range(10, 13))
    batch = await joined.trainer_at(1)
    assert [len(one.trajectories) for one in batch.groups] == [4, 4, 4, 4]
    assert sorted(tags(batch)) == [1, 10, 11, 12]
    (whole,) = [one for one in batch.groups if tags_of(one) == 1]
    assert [int(one.ids[0]) for one in whole.trajectories] == [1, 1, 1, 3]
    await joined.restart()
    assert await joined.trainer_at(1) is not None
    # with the part of before
    assert await joined.push(0, 4, size=2) == {"status": "buffered", "buffer_size": 0}


async def test_what_no_trainer_could_use_is_answered_with_its_reason(joined):
    nan = json.dumps(group(0, 1)).replace("3.0", "NaN")
    assert "nan" in (await joined.post(nan, 200))["reason"]
    assert "registered group_size 4" in (await joined.push(0, 1, size=8))["reason"]
    assert "not registered" in (await joined.push(9, 1))["reason"]
    ragged = {**group(0, 1), "masks": [[1]] * 4}
    assert "masks[0]" in (await joined.ask("POST", "/scored_data", ragged))["reason"]
    await joined.push_all(0, range(50, 54))
    assert tags(await joined.trainer_at(1)) == [50, 51, 52, 53]  # none of them is in a batch
    assert joined.api.registry.environments[0].rejected == 3  # that of an unknown environment is nobody's


async def test_status_has_what_became_of_the_groups(joined):
    await joined.push(0, 1)
    await joined.ask("POST", "/scored_data", group(0, 5, scores=[float("nan")] * 4))
    (shown,) = describe_progress(joined.service)["environments"]
    assert shown == {
        "name": "conf_0", "group_size": 4, "queued": 1, "accepted": 1, "rejected": 1, "too_old": 0,
        "last_reason": "scores[0] is nan; allowed: -1e+06 to 1e+06", "silent_s": 0, "ignored": [],
    }  # fmt: skip
    await joined.ask("POST", "/disconnect-env", {"env_id": 0})
    assert describe_progress(joined.service)["environments"][0]["silent_s"] is None


async def test_counters_and_departures_outlive_a_kill_and_a_trim(joined):
    await joined.push_all(0, range(9))
    await joined.push(0, 20, size=3), await joined.push(0, 21, size=1)  # parts of one group
    await joined.ask("POST", "/scored_data", group(0, 5, scores=[float("nan")] * 4))
    wanted = {"accepted": 10, "rejected": 1, "too_old": 0}
    wanted["last_reason"] = "scores[0] is nan; allowed: -1e+06 to 1e+06"

    def shown():
        (one,) = describe_progress(joined.service)["environments"]
        return {name: one[name] for name in wanted}

    assert shown() == wanted
    await joined.restart()
    assert shown() == wanted
    assert await joined.trainer_at(1) and await joined.trainer_at(2)
    await joined.service.retain(1)
    await joined.push(0, 30)
    wanted["accepted"] = 11
    assert shown() == wanted
    await joined.restart()
    assert shown() == wanted
    await joined.ask("POST", "/disconnect-env", {"env_id": 0})
    await joined.restart()
    await joined.get_queue_view(0)
    assert describe_progress(joined.service)["environments"][0]["silent_s"] is None
    assert shown() == wanted


async def test_groups_that_got_too_old_are_rejected_and_counted_once(tmp_path):
    async with worlds(tmp_path, eta=0) as world:
        await world.trainer_at(1)
        await world.register()
        await world.push_all(0, range(6))
        assert tags(await world.trainer_at(1)) == [0, 1, 2, 3]
        assert await world.trainer_at(2) is None  # the others were made by the weights of step 0
        assert world.service.sequencer.log.rejections["stale"] == 2
        await world.service.commit()
        assert describe_progress(world.service)["environments"][0]["too_old"] == 2
        await world.restart()
        assert describe_progress(world.service)["environments"][0]["too_old"] == 2


async def test_what_the_next_batch_waits_for(tmp_path):
    async with worlds(tmp_path) as world:

        def waits_for():
            return describe_progress(world.service)["waits_for"]

        await world.trainer_at(1)
        await world.register(size=4), await world.register("big", size=6)
        assert waits_for() is None
        await world.push(1, 1, size=6), await world.push(0, 2, size=3)
        assert waits_for() == {
            "kind": "sizes", "ready": 6, "needed": 16, "sizes": [6], "parts": 3, "environment": "",
        }  # fmt: skip
        await world.push(0, 3), await world.push(0, 4)
        assert waits_for()["kind"] == "sequences"
        await world.push(0, 5)
        assert waits_for()["kind"] == "combination"  # 6 and three of 4
        await world.push(1, 6, size=6)
        assert waits_for() is None
        await world.register("shared", size=2, min_batch_allocation=0.375)
        found = waits_for()
        assert (found["kind"], found["ready"], found["needed"]) == ("share", 0, 6)
        assert found["environment"] == "shared_0"


async def test_fields_that_the_trial_does_not_use_are_told(joined, caplog):
    more = {"distill_token_ids": [[[1]]] * 4, "distill_logprobs": [], "mine": 1, "overrides": [{"x": 1}] * 4}
    for tag in (1, 2):
        answer = await joined.ask("POST", "/scored_data", {**group(0, tag), **more})
        assert answer == {"status": "received", "ignored": ["distill_token_ids"]}
    answer = await joined.ask("POST", "/scored_data_list", [{**group(0, 3), **more}, group(0, 4)])
    assert answer == {"status": "received", "groups_processed": 2, "ignored": ["distill_token_ids"]}
    wanted = ["distill_token_ids", "mine", "overrides.x"]
    assert describe_progress(joined.service)["environments"][0]["ignored"] == wanted
    assert caplog.text.count("ignores (logged only once): distill_token_ids, mine, overrides.x") == 1
    await joined.restart()
    assert describe_progress(joined.service)["environments"][0]["ignored"] == wanted


async def test_a_list_of_groups_is_taken_at_once(joined):
    bodies = [group(0, 1), group(0, 2, size=2), group(0, 3, size=9)]
    answer = await joined.ask("POST", "/scored_data_list", bodies)
    assert answer["groups_processed"] == 3 and answer["buffered"] == 1 and answer["last_buffer_size"] == 2
    assert "9 sequences" in answer["rejected"][0]


async def test_one_malformed_group_does_not_cost_the_others(joined):
    bodies = [group(0, 1), {"tokens": []}, group(0, 2, scores=[10**400] * 4), group(0, 3)]
    answer = await joined.ask("POST", "/scored_data_list", bodies)
    assert answer["groups_processed"] == 4 and len(answer["rejected"]) == 2
    assert "masks: field required" in answer["rejected"][0]
    assert (await joined.get_queue_view(0))["queue_size"] == 2


async def test_bodies_are_bounded(world, monkeypatch):
    monkeypatch.setattr(atropos_routes_module, "MAX_BODY_BYTES", 10_000)
    await world.post(gzip.compress(b" " * 1_000_000), 413, **{"Content-Encoding": "gzip"})
    await world.ask("POST", "/scored_data", group(None, 1))


async def test_a_wrong_path_is_not_a_wrong_token(world):
    for path, status in (("/t/dddddddd/nope", 404), ("/t/wrong/nope", 401), ("/nope", 401), ("/t", 401)):
        async with world.client.get(path) as response:
            assert response.status == status


async def test_a_name_is_short_and_printable(world):
    await world.trainer_at(1)
    name = (await world.register("a\nb\x1b[31m" + "x" * 1000))["wandb_name"]
    assert name.startswith("a_b_[31mxxx") and len(name) < 110


async def test_a_kill_loses_nothing_and_repeats_nothing(joined):
    for tag in range(10, 16):
        await joined.push(0, tag, headers={"Idempotency-Key": f"key-{tag}"})
    await joined.push(0, 16)  # as an environment of atroposlib does: without a key
    await joined.restart()
    # both come again, since their acknowledgements may be lost; then the same content as something new
    await joined.push(0, 15, headers={"Idempotency-Key": "key-15"})
    await joined.push(0, 16)
    await joined.push(0, 16)
    assert tags(await joined.trainer_at(1)) == [10, 11, 12, 13]
    assert tags(await joined.trainer_at(2) or await joined.trainer_at(2)) == [14, 15, 16, 16]
    assert joined.api.repeated[0] == 2
    # the environment is still known, under its id; a new one gets another
    assert (await joined.get_queue_view(0))["max_group_size"] == 4
    assert (await joined.register())["env_id"] == 1


async def test_sealed_batches_replay_as_they_were(joined):
    await joined.push_all(0, range(9))
    before = [tags(await joined.trainer_at(step)) for step in (1, 2)]
    await joined.restart()
    assert [tags(await joined.trainer_at(step)) for step in (1, 2)] == before == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_groups_of_different_sizes_make_whole_batches(world):
    await world.trainer_at(1)
    await world.register(size=4), await world.register("big", size=8)
    await world.push_all(0, range(1, 4))
    assert await world.trainer_at(1) is None
    await world.push(1, 20, size=8)
    batch = await world.trainer_at(1)
    assert sum(len(one.trajectories) for one in batch.groups) == 16
    assert sorted(tags(batch)) == [1, 2, 20]  # two of 4, one of 8; the third waits


@pytest.fixture
async def shared(world):
    """Half of each batch, 8 sequences, is for environment 0; six groups of another one wait for them."""
    await world.trainer_at(1)
    await world.register(min_batch_allocation=0.5), await world.register("other")
    await world.push_all(1, range(6))
    assert await world.trainer_at(1) is None
    return world


async def test_a_share_of_each_batch_is_kept_for_its_environment_while_it_lives(shared):
    await shared.push_all(0, (30, 31))
    assert sorted(tags(await shared.trainer_at(1))) == [0, 1, 30, 31]
    # it falls silent: nobody waits for it
    shared.api.registry.environments[0].seen_s = -1e9
    assert tags(await shared.trainer_at(2)) == [2, 3, 4, 5]


async def test_a_share_that_does_not_come_is_waited_for_a_while(shared, monkeypatch):
    monkeypatch.setattr(outside_module, "ALLOCATION_WAIT_S", 0.0)
    await asyncio.sleep(0.01)
    assert tags(await shared.trainer_at(1)) == [0, 1, 2, 3]


async def test_a_full_queue_holds_then_refuses_with_a_time_to_come_again(joined, monkeypatch):
    monkeypatch.setattr(atropos_api, "HOLD_S", 0.1)
    monkeypatch.setattr(atropos_api, "HARD_BOUND", 2)
    for tag in range(24):  # 3 batches of 16 are the bound, twice that is the hard one
        await joined.push(0, tag)
        await asyncio.sleep(0.06 if tag > 10 else 0)
    assert (await joined.get_queue_view(0))["queue_size"] == 24
    headers = {"Authorization": f"Bearer {TOKENS['data']}"}
    async with joined.client.post("/scored_data", json=group(0, 99), headers=headers) as response:
        assert response.status == 503 and response.headers["Retry-After"]
    assert tags(await joined.trainer_at(1)) == [0, 1, 2, 3]
    assert await joined.trainer_at(2)
    await asyncio.sleep(0.1)
    await joined.push(0, 99)


async def test_an_environment_that_leaves_is_forgotten_politely(joined):
    assert (await joined.ask("POST", "/disconnect-env", {"env_id": 0}))["status"] == "success"
    for unknown in (0, -1, 7):
        answer = await joined.ask("POST", "/disconnect-env", {"env_id": unknown})
        assert answer["status"] == "failure" and str(unknown) in answer["error"]
    assert (await joined.get_queue_view(77))["queue_size"] > 100
    await joined.ask("GET", "/reset_data", status=403)


TRAINER = {
    "wandb_group": "", "wandb_project": "", "checkpoint_dir": "",
    "batch_size": 16, "max_token_len": 64, "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10,
}  # fmt: skip


async def test_a_second_trainer_changes_nothing(world):
    await world.trainer_at(1)
    env_id = (await world.register())["env_id"]
    await world.push_all(env_id, range(4))
    first, second = [await world.ask("POST", "/register", TRAINER) for _ in range(2)]
    assert first["uuid"] != second["uuid"]
    refused = await world.ask("POST", "/register", {**TRAINER, "batch_size": 8}, status=422)
    assert "this trial trains on 16 sequences a step" in refused["detail"]
    missing = await world.ask("POST", "/register", {"batch_size": 16}, status=422)
    assert missing["detail"][0]["loc"] == ["body", "wandb_group"]
    # it gets no batch: those are for the trial's own trainer
    assert await world.ask("GET", "/batch") == {"batch": None}
    assert (await world.get_queue_view(env_id))["queue_size"] == 4
    assert tags(await world.trainer_at(1)) == [0, 1, 2, 3]


async def test_groups_that_come_before_the_trainer_are_in_its_first_batch(world):
    assert await world.ask("GET", "/batch") == {
        "status": "error", "message": "the trainer has not started", "batch": [],
    }  # fmt: skip
    await world.push_all(None, range(3))
    await world.restart()
    await world.push(None, 3)
    assert tags(await world.trainer_at(1)) == [0, 1, 2, 3]
    assert (await world.register())["status"] == "success"


async def test_groups_that_never_add_up_to_a_batch_are_refused_when_they_register(tmp_path):
    async with worlds(tmp_path, batch_sequences=12) as world:
        await world.trainer_at(1)
        body = {"max_token_length": 1, "desired_name": "x", "weight": 1}
        for size, words in ((8, "12 sequences, which groups of 8 never add up to"), (32, "a batch has 12")):
            refused = await world.ask("POST", "/register-env", body | {"group_size": size}, status=422)
            assert words in refused["detail"]
        # beside groups of 4 they do
        await world.register("four", 4)
        assert (await world.register("eight", 8))["status"] == "success"


async def test_own_prompts_and_environments_share_batches(tmp_path):
    async with worlds(tmp_path, own_prompts=True, eta=3) as world:
        await world.trainer_at(1)
        await world.register()
        await world.push_all(0, range(2))
        groups = []
        for step in range(1, 5):
            while (batch := await world.trainer_at(step)) is None:
                await asyncio.sleep(0.01)
            groups += batch.groups
            assert len(batch.groups) == 4
        from_outside = [one for one in groups if one.index >= 1 << 48]
        assert [tags_of(one) for one in from_outside] == [0, 1]
        assert len({one.index for one in groups}) == 16


async def test_order_of_acknowledgement_is_the_order_of_batches(tmp_path):
    async with worlds(tmp_path, order="in_order") as world:
        await world.trainer_at(1)
        await world.register()
        await asyncio.gather(*(world.push(0, tag) for tag in range(8)))
        acknowledged = [int(one) for batch in (1, 2) for one in tags(await world.trainer_at(batch))]
        records = world.service.sequencer.log.outside
        assert sorted(acknowledged) == list(range(8)) and sorted(records) == list(records)
        await world.restart()
        assert [int(one) for batch in (1, 2) for one in tags(await world.trainer_at(batch))] == acknowledged
