"""Workflows, trajectories, the worker's answers, and rewards in a process of their own."""

import asyncio
import inspect
import re
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from patience import extend

from hpc_rl.config.options.inference import GenerationHyperparameters, InferenceEngineConfig
from hpc_rl.config.options.operations import EvaluatorConfig, HeldOutSetConfig
from hpc_rl.config.rules.generation_rules import WORKFLOW_ARGS
from hpc_rl.core.errors import ConfigError, EndpointUnavailable, InputRefused, RequestRefused, RoleFailed
from hpc_rl.core.types import Reply, TrajectoryGroup, Turn, decode, encode
from hpc_rl.rollout.batch_log.ledger import MAX_NOTE_BYTES, GroupRecord
from hpc_rl.rollout.rewards import (
    Rejection,
    check_number,
    contains,
    exact_match,
    import_object,
    make_built_in,
    score_each,
)
from hpc_rl.rollout.rewards import reward_process as reward_process_module
from hpc_rl.rollout.rewards.reward_process import (
    OUTPUT_BYTES,
    OUTPUT_BYTES_PER_S,
    LimitedOutput,
    RewardProcess,
)
from hpc_rl.rollout.server_pool import ServerPool
from hpc_rl.rollout.worker import Worker
from hpc_rl.rollout.workflow import trajectory
from hpc_rl.rollout.workflows import WORKFLOWS, load_workflow, single_turn

pytestmark = pytest.mark.waits


class Tokenizer:
    eos_token_ids = (99, 7)

    def decode(self, ids):
        return "".join(map(str, ids))


class Client:
    """Answers with [1, 2, 99]; `errors` are raised first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.requests = []

    async def generate_many(self, requests):
        self.requests += requests
        if self.errors:
            raise self.errors.pop(0)
        spans = [("0.3", 0, 1), ("1.2", 1, 3)]
        return [Turn([1, 2, 99], [-1.0, -2.0, -3.0], spans, "stop") for _ in requests]


def make(client, workflow=single_turn, name="own:f", checking=False, others=None, context=None, **gconfig):
    rollout = InferenceEngineConfig(workflow=name, check_trajectory_format=checking)
    tracing = gconfig.pop("tracing", False)
    of_evaluator = {name: gconfig.pop(name) for name in ("sets", "blocking") if name in gconfig}
    evaluator = EvaluatorConfig(keep_samples=1, **of_evaluator)
    sampled = GenerationHyperparameters(**{"n_samples": 3, "max_new_tokens": 6, **gconfig})
    config = SimpleNamespace(
        seed=1, purpose="train", gconfig=sampled, eval_gconfig=None, rollout=rollout, evaluator=evaluator
    )
    pool = ServerPool("rollout", client, Tokenizer(), sampled, context, trace=tracing)
    sent = []

    def write(data: bytes) -> None:
        sent.append(data)
        frame = decode(data[4:])
        if frame["op"] == "note":  # is on disk in no time
            asyncio.get_running_loop().call_soon(made.continue_workflow, {**frame, "op": "kept"})

    made = Worker(config, pool, others or {}, workflow, score_each(make_built_in("exact_match")), write, 100)
    return made, sent


async def answer(
    made: Worker,
    sent: list[bytes],
    evaluate: bool = False,
    input_ids=(5, 6),
    notes=None,
    held_out_set="",
    **columns,
) -> dict:
    content = {"input_ids": list(input_ids), "version": "0.3", "evaluate": evaluate, "notes": notes or {}}
    content["held_out_set"] = held_out_set
    content["columns"] = {"prompt": "x", "answer": "1299", **columns}
    await made.answer({"op": "run", "ticket": 4, "index": 40, "epoch": 0, "row": 2, **content})
    return decode(sent[-1][4:])


async def outcome_of(workflow, **options) -> dict:
    """What a worker says of a prompt that this workflow answers."""
    return await answer(*make(Client(), workflow, **options))


async def test_a_group_has_scored_trajectories_with_versions_by_token():
    client = Client()
    outcome = await answer(*make(client, stop_token_ids=[3]))
    group = decode(outcome["group"])
    assert (outcome["op"], outcome["ticket"], group.index, len(group.trajectories)) == ("group", 4, 40, 3)
    assert GroupRecord(*outcome["record"]) == GroupRecord(40, 3, 2, 0, 3, 15, 3.0)
    first = group.trajectories[0]
    assert first.ids.tolist() == [5, 6, 1, 2, 99]
    assert first.loss_mask.tolist() == [False, False, True, True, True]
    assert first.logprobs.tolist() == [0, 0, -1, -2, -3]
    assert first.steps.tolist() == [-1, -1, 3, 2, 2] and first.lineages.tolist() == [-1, -1, 0, 1, 1]
    request = client.requests[0]
    assert (request.min_version, request.sampling["top_k"]) == ("0.3", -1)
    assert request.sampling["stop_token_ids"] == [3, 99, 7]
    assert len({r.sampling["sampling_seed"] for r in client.requests}) == 3
    assert len({len(r.rid) for r in client.requests}) == 1 and len({r.rid for r in client.requests}) == 3


async def test_each_held_out_set_is_sampled_in_its_own_way_by_held_servers():
    client = Client()
    made, sent = make(client, sets={"hard": HeldOutSetConfig(path="h", n_samples=2, temperature=0.5)})
    await answer(made, sent)
    await answer(made, sent, evaluate=True)
    await answer(made, sent, evaluate=True, held_out_set="hard")
    found = [(one.exact, one.sampling["temperature"]) for one in client.requests]
    assert found == [(False, 1.0)] * 3 + [(True, 1.0)] + [(True, 0.5)] * 2
    await answer(*make(client, blocking=True), evaluate=True)
    assert not client.requests[-1].exact


async def test_a_group_brings_the_columns_of_its_row():
    long = "s" * 5000
    made, sent = make(Client())
    group = decode((await answer(made, sent, story=long))["group"])
    assert group.columns == {"answer": "1299", "story": long[:1000]}
    assert group.shortened == ["story"]
    made.config.rollout.keep_samples = 0
    assert not decode((await answer(made, sent))["group"]).columns
    kept = decode((await answer(made, sent, evaluate=True))["group"] or encode(None))
    assert kept is None  # row 40 is not one of the first, which are kept


async def test_columns_with_the_names_of_what_a_reward_is_given_are_no_clash():
    outcome = await answer(*make(Client()), completion="another", input_ids=(5, 6), messages=[])
    assert outcome["op"] == "group"
    assert [one.reward for one in decode(outcome["group"]).trajectories] == [1.0] * 3


async def test_what_is_made_once_is_sent_and_not_made_again():
    made = []

    async def workflow(prompt, generate):
        async def make():
            made.append(prompt["prompt"])
            return {"approach": "add", "answers": ("2", "3")}

        both = await asyncio.gather(*(generate.once("probe", make) for _ in range(2)))
        assert both == [{"approach": "add", "answers": ["2", "3"]}] * 2
        return await single_turn(prompt, generate)

    worker, sent = make(Client(), workflow)
    assert (await answer(worker, sent))["op"] == "group"
    note = decode(sent[0][4:])
    assert (note["op"], note["ticket"], note["key"], len(sent), len(made)) == ("note", 4, "probe", 2, 1)
    assert (note["index"], note["version"]) == (40, "0.3")
    await answer(worker, sent, notes={"probe": note["value"]})
    assert (len(sent), len(made)) == (3, 1), "it has its note: nothing is made or sent again"
    await answer(worker, sent, evaluate=True)
    assert (len(sent), len(made)) == (4, 2), "an evaluation keeps no notes"


async def test_a_workflow_waits_until_its_note_is_kept_and_goes_by_the_one_that_counts():
    calls, results = [], []

    async def workflow(prompt, generate):
        async def make():
            calls.append(1)
            return "mine"

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await generate.once("probe", make)
        results.append(await generate.once("probe", make))
        return await single_turn(prompt, generate)

    worker, sent = make(Client(), workflow)
    kept, worker.continue_workflow = worker.continue_workflow, lambda frame: None
    task = asyncio.create_task(answer(worker, sent))
    async with asyncio.timeout(extend(10)):
        while len(sent) < 2:
            await asyncio.sleep(0.01)
    assert [decode(data[4:])["op"] for data in sent] == ["note", "note"] and results == []
    kept({"op": "kept", "ticket": 4, "key": "another", "value": encode(0)})
    kept({"op": "kept", "ticket": 4, "key": "probe", "value": encode("of an earlier ticket")})
    assert (await task)["op"] == "group"
    assert (results, len(calls)) == (["of an earlier ticket"], 1)
    kept({"op": "kept", "ticket": 4, "key": "probe", "value": encode("late")})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (3, 1),
        ("", 1),
        ("é" * 501, 1),
        ("\ud800", 1),
        ("key", object()),
        ("key", {(1, 2): 3}),  # could be written, but not read
        ("key", b"x" * (MAX_NOTE_BYTES + 1)),
    ],
    ids=["number", "empty", "long", "surrogate", "object", "tuple_as_key", "large"],
)
async def test_what_can_be_no_note_fails_its_prompt_only(key, value):
    async def workflow(prompt, generate):
        async def make():
            return value

        await generate.once(key, make)

    worker, sent = make(Client(), workflow)
    assert (await answer(worker, sent))["op"] == "failed" and len(sent) == 1


async def test_what_could_not_be_made_is_tried_again():
    tries = []

    async def workflow(prompt, generate):
        async def make():
            tries.append(1)
            if len(tries) == 1:
                raise ValueError("the first time")
            return 7

        with pytest.raises(ValueError):
            await generate.once("seven", make)
        assert await generate.once("seven", make) == 7
        return await single_turn(prompt, generate)

    worker, sent = make(Client(), workflow)
    assert (await answer(worker, sent))["op"] == "group" and len(sent) == 2


class Elsewhere:
    """A pool that answers with the numbers of its seeds."""

    async def ask(self, messages, seeds, max_new_tokens=None, temperature=None):
        return [Reply(str(seed), max_new_tokens or 0, "stop") for seed in seeds]


def chatting(tokenizer):
    tokenizer.chat = lambda messages: messages[0]["content"]
    tokenizer.encode = lambda text, add_special_tokens: [ord(letter) for letter in text]
    return tokenizer


def servers(client, **gconfig):
    """A frozen pool on the fake client."""
    tokenizer, gconfig = chatting(Tokenizer()), GenerationHyperparameters(max_new_tokens=4, **gconfig)
    return ServerPool("student", client, tokenizer, gconfig, 10)


async def asking(workflow, client=None, **options) -> list[Any]:
    """What a workflow returns to the test; it makes no group."""
    said = []

    async def run(prompt, generate):
        said.append(await workflow(generate))

    made, sent = make(Client(), run, others={"student": servers(client or Client()), "judge": Elsewhere()})
    outcome = await answer(made, sent, **options)
    return said or [outcome]


async def test_a_workflow_asks_other_pools():
    client = Client()
    asks = lambda generate: generate.ask([{"content": "ab"}], "student", 2, "probe", 3)  # noqa: E731
    (replies,) = await asking(asks, client)
    assert replies == [Reply("1299", 3, "stop")] * 2
    assert [request.input_ids for request in client.requests] == [[97, 98]] * 2
    assert {request.min_version for request in client.requests} == {""}  # a frozen model has no version
    assert client.requests[0].sampling["max_new_tokens"] == 3
    (turn,) = await asking(lambda generate: generate([5], pool="student"), client)
    assert turn.output_ids == [1, 2, 99] and client.requests[-1].sampling["max_new_tokens"] == 4


async def test_seeds_of_other_pools_follow_from_the_label_not_from_what_was_asked_before():
    async def seeds(generate):
        first = await generate.ask([], "judge", 2, "probe")
        await generate([5], pool="student", label="answers")
        return [one.text for one in first + await generate.ask([], "judge", 3, "probe")]

    (found,) = await asking(seeds)
    assert found[:2] == found[2:4] and len(set(found)) == 3
    assert await asking(seeds) == [found] and (await asking(seeds, evaluate=True))[0] != found


async def test_the_trained_pool_can_be_asked_by_its_name_and_makes_new_enough_weights():
    client = Client()

    async def ask(prompt, generate):
        return await generate.ask([{"content": "ab"}], "rollout", 1)

    made, sent = make(client, ask)
    chatting(made._sampler.keywords["pool"].tokenizer)
    await answer(made, sent)
    assert client.requests[0].min_version == "0.3"


async def test_a_pool_that_is_not_there_or_takes_no_tokens_is_named(caplog):
    (outcome,) = await asking(lambda generate: generate.ask([], "studnet"))
    assert "unknown pool 'studnet'; allowed: rollout, student, judge." in outcome["error"]
    (outcome,) = await asking(lambda generate: generate([5], pool="judge"))
    assert "pool 'judge' is an external endpoint" in outcome["error"]
    (outcome,) = await asking(lambda generate: generate.ask([{"content": "a" * 10}], "student"))
    assert outcome["reason"] == "too_long" and "the model's context is 10 (pool student)" in outcome["error"]


async def test_a_pool_has_at_most_so_many_requests_at_once():
    class Slow(Client):
        running = most = 0

        async def generate_many(self, requests):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.01)
            self.running -= 1
            return await super().generate_many(requests)

    client = Slow()
    pool = ServerPool("student", client, Tokenizer(), GenerationHyperparameters(), max_requests=2)
    await asyncio.gather(*(pool.generate([pool.request([5], 1)]) for _ in range(6)))
    assert client.most == 2 and len(client.requests) == 6


async def test_all_samples_of_a_group_are_one_call():
    class Counting(Client):
        calls = 0

        async def generate_many(self, requests):
            self.calls += 1
            return await super().generate_many(requests)

    client = Counting()
    outcome = await answer(*make(client, n_samples=8))
    assert (outcome["op"], client.calls, len(client.requests)) == ("group", 1, 8)


async def test_an_evaluation_samples_once_and_tells_every_version():
    client = Client()
    outcome = await answer(*make(client), evaluate=True)
    assert len(client.requests) == 1
    assert (outcome["op"], outcome["rewards"], outcome["num_tokens"]) == ("scored", [1.0], 3)
    assert outcome["versions"] == ["0.3", "1.2"]


async def test_an_evaluation_tells_the_means_of_what_its_trajectories_measured():
    async def measured(prompt, generate):
        turn = await generate(prompt["input_ids"])
        made = [trajectory([(prompt["input_ids"], turn)], reward=0.0) for _ in range(2)]
        made[0].stats, made[1].stats = {"hints": 1, "solved": np.True_}, {"hints": np.float32(4)}
        return TrajectoryGroup(0, made)

    outcome = await answer(*make(Client(), measured), evaluate=True)
    assert outcome["stats"] == {"hints": 2.5, "solved": 1.0}
    assert (await answer(*make(Client()), evaluate=True))["stats"] == {}


@pytest.mark.parametrize("stats", [{"hints": "many"}, {"hints": None}, {3: 1.0}])
@pytest.mark.parametrize("evaluate", [False, True])
async def test_a_stat_that_is_no_number_by_a_name_makes_a_bad_group(stats, evaluate):
    async def measured(prompt, generate):
        turn = await generate(prompt["input_ids"])
        made = trajectory([(prompt["input_ids"], turn)], reward=0.0)
        made.stats = stats
        return TrajectoryGroup(0, [made])

    outcome = await answer(*make(Client(), measured), evaluate=evaluate)
    assert (outcome["reason"], "stats must map names to numbers" in outcome["error"]) == ("bad_group", True)


@pytest.mark.parametrize(
    ("limit", "input_len", "room"),
    [
        ({"max_tokens": 10}, 2, 6),
        ({"max_tokens": 10}, 7, 3),
        ({"max_tokens": 10}, 10, None),
        ({"max_tokens": 10}, 12, None),
        ({"context": 8}, 5, 3),
        ({"context": 8}, 8, None),
    ],
)
async def test_new_tokens_fit_into_the_limit_or_the_prompt_is_too_long(limit, input_len, room, caplog):
    client = Client()
    outcome = await answer(*make(client, **limit, min_new_tokens=5), input_ids=range(input_len))
    if room is None:
        assert (outcome["op"], outcome["reason"]) == ("rejected", "too_long")
        told = "prompt 40 is rejected, too_long: 8 tokens, the model's context is 8"
        assert "context" not in limit or told in caplog.text
    else:
        sampling = client.requests[0].sampling
        assert (sampling["max_new_tokens"], sampling["min_new_tokens"]) == (room, min(5, room))


async def test_an_input_that_a_server_refuses_is_rejected_at_once_with_its_words(caplog):
    outcome = await answer(*make(Client(*[InputRefused("answered 400: input too long")] * 3)))
    assert (outcome["op"], outcome["reason"]) == ("rejected", "refused")
    assert "prompt 40 is rejected, refused: refused by a server: answered 400: input too long" in caplog.text
    assert "Traceback" not in caplog.text
    # what is not the input's fault is tried again
    assert (await answer(*make(Client(*[RequestRefused("answered 401")] * 3))))["op"] == "failed"
    outcome = await answer(*make(client := Client()), input_ids=[])
    assert (outcome["reason"], client.requests) == ("refused", [])


async def test_what_a_workflow_does_is_reported():
    async def none(prompt, generate):
        return None

    async def unscored(prompt, generate):
        raise Rejection("reward_timeout", "15 s")

    assert (await outcome_of(none))["reason"] == "workflow_none"
    assert (await outcome_of(unscored))["reason"] == "reward_timeout"


async def test_a_missing_server_is_awaited(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    many = Client(*[RoleFailed("no server")] * 50)
    assert (await answer(*make(many, n_samples=1)))["op"] == "group" and len(slept) == 50


async def test_a_prompt_whose_endpoint_is_gone_is_not_to_blame():
    class Gone:
        async def ask(self, *_args):
            raise EndpointUnavailable("pool judge: answered 401; given up")

    async def asks(prompt, generate):
        return await generate.ask([{"role": "user", "content": "x"}], "judge")

    outcome = await answer(*make(Client(), asks, others={"judge": Gone()}))
    assert outcome["op"] == "unavailable" and "answered 401" in outcome["error"]


async def test_a_cancelled_ticket_is_not_answered():
    async def slow(prompt, generate):
        await asyncio.sleep(30)

    made, sent = make(Client(), slow)
    task = asyncio.create_task(answer(made, sent))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sent == []


def test_several_turns_make_one_record():
    turns = [
        ([5, 6], Turn([1], [-1.0], [("0.1", 0, 1)], "stop")),
        ([7], Turn([2, 3], [-2.0, -3.0], [("0.2", 0, 2)], "length")),
    ]
    made = trajectory(turns, 0.5)
    assert made.ids.tolist() == [5, 6, 1, 7, 2, 3]
    assert made.loss_mask.tolist() == [False, False, True, False, True, True]
    assert made.steps.tolist() == [-1, -1, 1, -1, 2, 2] and made.oldest_step() == 1
    assert (made.reward, made.finish_reason, made.logprobs.dtype) == (0.5, "length", np.float32)
    assert made.turn_rewards is None
    divided = trajectory(turns, 0.5, [0.75, -0.25])
    assert divided.turn_rewards.tolist() == [0, 0, 0.75, 0, 0, -0.25]
    assert divided.turn_rewards.dtype == np.float32
    for wrong in ([0.5], [0.5, 0.5]):
        with pytest.raises(ValueError, match="must be a number for each of 2 turns"):
            trajectory(turns, 0.5, wrong)


def test_workflows_by_import_path(user_code):
    user_code(
        "own_workflow",
        "class W:\n    def __init__(self, size=1): self.size = size\n"
        "    async def run(self, prompt, generate):\n        return None\n"
        "class C(W):\n    @classmethod\n    def create(cls, config, size=2):\n"
        "        made = cls(size)\n        made.seed = config.seed\n        return made\n"
        "async def f(prompt, generate): return None\nx = 1\n",
    )

    def load(path, **args):
        rollout = InferenceEngineConfig(workflow=path, workflow_args=args)
        return load_workflow(SimpleNamespace(rollout=rollout, seed=5))

    assert load("single_turn", n_trajs=4) is single_turn
    assert load("multi_turn").__self__.max_turns == 2
    assert load("multi_turn", max_turns=7, n_trajs=4).__self__.max_turns == 7
    assert load("own_workflow:W", size=3).__self__.size == 3
    made = load("own_workflow:C", size=3).__self__
    assert (made.seed, made.size) == (5, 3)
    assert load("own_workflow:f").__name__ == "f"
    for path, args, words in [
        ("own_workflow:x", {}, "method"),
        ("own_workflow:y", {}, "no attribute 'y'"),
        ("own_workflow:W", {"sise": 3}, "unexpected keyword argument 'sise'"),
        ("own_workflow:C", {"sise": 3}, "own_workflow:C.create.* 'sise'"),
        ("own_workflow:f", {"size": 3}, "which is not a class"),
        ("nowhere:f", {}, "imported"),
        ("multi", {}, "neither"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load(path, **args)
    for name in ("multi_turn", "agent"):
        assert set(inspect.signature(WORKFLOWS[name]).parameters) == set(WORKFLOW_ARGS[name])
    assert import_object("k", "own_workflow:x") == 1


def test_builtin_rewards():
    assert exact_match("q", " 12\n", answer=12) == 1.0 and exact_match("q", "12.", answer=12) == 0.0
    assert contains("q", "it is 12.", answer="12") == 1.0 and contains("q", "it is 13.", answer="12") == 0.0


async def test_a_column_that_the_reward_needs_and_the_row_lacks_is_named():
    with pytest.raises(Rejection, match=r"answer.*columns \['solution'\]"):
        await make_built_in("exact_match")("q", "1", {"solution": "1"})


@pytest.mark.parametrize("value", ["0.5", None, float("nan"), float("-inf"), [1.0, 2.0]])
def test_a_reward_that_is_no_finite_number_is_refused(value):
    with pytest.raises(Rejection, match=r"reward_exception.*allowed: a finite number"):
        check_number(value)


def test_numbers_of_other_kinds_are_rewards():
    values = [True, 2, np.float32(0.5), np.array(1.5)]
    assert [check_number(value) for value in values] == [1.0, 2.0, 0.5, 1.5]


@pytest.fixture
async def reward_process(user_code):
    """Starts the user's reward functions below in their process."""
    source = """
import asyncio, json, os, sys, time
def score(prompt, completion, wait_s=0.0, **columns):
    print("noise")
    time.sleep(wait_s)
    return float(completion)
def runs(prompt, completion, **columns):
    return asyncio.run(together(prompt, completion))
def hangs(prompt, completion, **columns):
    while True:
        time.sleep(0.1)
async def waits(prompt, completion, **columns):
    await forever()
async def forever():
    await asyncio.Event().wait()
async def blocks(prompt, completion, **columns):
    time.sleep(600)
class Returning:
    def __call__(self, prompt, completion, **columns):
        return together(prompt, completion)
returning = Returning()
def die(prompt, completion, **columns):
    os._exit(3)
def helper(columns):
    return json.loads(columns["weight"])
def raises(prompt, completion, **columns):
    return helper(columns)
def needs(prompt, completion, answer):
    return 1
async def together(prompt, completion, **columns):
    await asyncio.sleep(0.2)
    return 1
num_met = 0
async def meets(prompt, completion, **columns):
    global num_met
    num_met += 1
    while num_met < 20:
        await asyncio.sleep(0.01)
    return 1
"""
    user_code("own_rewards", source)
    started = []

    async def start(name: str, timeout_s: float = 5.0, module: str = "own_rewards") -> RewardProcess:
        process = RewardProcess(f"{module}:{name}", timeout_s)
        started.append(process)
        await process.start()
        return process

    yield start
    for process in started:
        await process.close()


async def test_the_users_reward_runs_elsewhere_with_a_time_limit_per_call(reward_process):
    limit_s = extend(0.4)
    process = await reward_process("score", timeout_s=limit_s)
    calls = [process.reward("p", str(i), {"wait_s": limit_s * 0.375}) for i in range(4)]
    # 1.5 times the limit in all: the clock of a call starts when the call does
    assert await asyncio.gather(*calls) == [0.0, 1.0, 2.0, 3.0]
    slow = process.reward("p", "1", {"wait_s": 60.0})
    others = [process.reward("p", str(i), {}) for i in range(3)]
    outcomes = await asyncio.gather(slow, *others, return_exceptions=True)
    assert outcomes[0].reason == "reward_timeout" and outcomes[1:] == [0.0, 1.0, 2.0]
    for completion, words in (("no number", "ValueError"), ("nan", "the reward is nan")):
        with pytest.raises(Rejection, match=words):
            await process.reward("p", completion, {})


async def test_async_rewards_run_together(reward_process):
    process = await reward_process("meets", timeout_s=extend(10))
    assert sum(await asyncio.gather(*(process.reward("p", "", {}) for _ in range(20)))) == 20


@pytest.mark.parametrize("name", ["runs", "returning"])
async def test_a_sync_reward_may_run_an_event_loop_or_return_what_is_awaited(reward_process, name):
    process = await reward_process(name)
    assert await asyncio.gather(*(process.reward("p", "", {}) for _ in range(3))) == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "place"),
    [("hangs", "11, in hangs"), ("waits", "15, in forever"), ("blocks", "17, in blocks")],
)
async def test_a_reward_over_its_time_limit_is_told_with_its_place(reward_process, name, place):
    process = await reward_process(name, timeout_s=0.5)
    told = rf"more than 0.5 s \(rollout.reward_timeout_s\): it was at own_rewards.py:{place}$"
    with pytest.raises(Rejection, match=told) as raised:
        await process.reward("p", "1", {})
    assert raised.value.reason == "reward_timeout" and f"in {name}" in raised.value.trace


async def test_a_reward_that_fails_is_told_with_its_prompt():
    async def scored(prompt, generate):
        await generate.reward({"prompt": "x"}, "1")

    outcome = await outcome_of(scored)
    assert outcome["error"].startswith("prompt 40: exact_match() missing")


async def test_a_reward_that_ends_its_process_is_given_up(reward_process):
    process = await reward_process("die")
    with pytest.raises(Rejection, match="ended with code 3"):
        await process.reward("p", "", {})
    assert process.num_restarts == 3


async def test_a_reward_exception_names_the_users_line_also_where_a_library_raised_it(reward_process):
    process = await reward_process("raises")
    place = r"\(own_rewards.py:25, in helper\)"
    for weight, kind in (({}, "KeyError: 'weight'"), ({"weight": "{"}, "JSONDecodeError: .*")):
        with pytest.raises(Rejection, match=f"{kind} {place}") as raised:
            await process.reward("p", "", weight)
        assert raised.value.trace.startswith("Traceback") and "line 27, in raises" in raised.value.trace
    assert raised.value.place == "JSONDecodeError (own_rewards.py:25, in helper)"  # without what differs
    process = await reward_process("needs")
    with pytest.raises(Rejection, match=r"TypeError: .* 'answer' \(own_rewards.py:28, needs\)"):
        await process.reward("p", "", {})


async def test_a_workflow_that_is_not_async_is_named_with_its_place():
    def plain(prompt, generate):
        return None

    outcome = await outcome_of(plain)
    assert re.search(r"TypeError: .*await.* \(.*test_rollout_worker.py:\d+, plain\)", outcome["error"])


def test_output_of_user_code_is_limited_and_marked():
    written, now = [], [0.0]
    output = LimitedOutput(written.append, lambda: now[0])
    output.take(b"2026-01-01 00:00:00 trainer 0 host ERROR forged\n\x1b[31mre")
    output.take(b"d\n")
    lines = [b"reward| 2026-01-01 00:00:00 trainer 0 host ERROR forged", b"reward| \\x1b[31mred"]
    assert b"".join(written).splitlines() == lines
    for _ in range(5000):
        output.take(b"x" * 999 + b"\n")
    assert OUTPUT_BYTES - 2000 < sum(map(len, written)) < OUTPUT_BYTES * 1.02
    assert written[-1] == b"reward| the reward writes too much: the log omits the next output\n"
    now[0] = 60.0
    output.take(b"later\n")
    assert b"bytes of output were omitted" in written[-2] and written[-1] == b"reward| later\n"


@pytest.mark.parametrize("pieces", [[b"x" * 1000, b"\n"], [b"\n" * 100]])
def test_output_of_user_code_is_limited_whatever_its_pieces(pieces):
    written, now = [], [0.0]
    output = LimitedOutput(written.append, lambda: now[0])
    for number in range(60_000):
        now[0] = number / 1000
        for piece in pieces:
            output.take(piece)
    assert OUTPUT_BYTES / 2 < sum(map(len, written)) < OUTPUT_BYTES + 70 * OUTPUT_BYTES_PER_S


async def test_a_reward_that_raises_or_prints_a_secret_variable(
    user_code, reward_process, monkeypatch, capfd
):
    raises = "raise ValueError(os.environ['HF_TOKEN'] + 'x' * 999)"
    shows = "print(os.environ['HF_TOKEN'], flush=True)"
    user_code("telling", f"import os\ndef score(*_):\n    {shows}\n    {raises}\n")
    monkeypatch.setenv("HF_TOKEN", "hf_secretvalue1")
    monkeypatch.setattr("hpc_rl.core.log._secrets", ["hf_secretvalue1"])
    process = await reward_process("score", 20.0, "telling")
    with pytest.raises(Rejection, match=r"ValueError: \*\*\*x") as refused:
        await process.reward("p", "", {})
    await process.close()
    said = capfd.readouterr().err
    assert "reward| ***" in said and "hf_secret" not in said + str(refused.value)


async def test_a_workflow_that_rejects_with_a_secret_variable_in_its_message(monkeypatch):
    monkeypatch.setattr("hpc_rl.core.log._secrets", ["hf_secretvalue1"])
    for kind in (partial(Rejection, "exception"), ValueError):

        async def telling(prompt, generate, kind=kind):
            raise kind("401 for hf_secretvalue1")

        outcome = await outcome_of(telling)
        assert "401 for ***" in outcome["error"] and "hf_secret" not in outcome["error"]


async def test_a_call_that_is_never_started_is_bounded(monkeypatch):
    """As where user code forked, and its child reads the calls."""
    monkeypatch.setattr(reward_process_module, "IDLE_GRACE_S", 0.1)
    deaf = "import sys, time; from hpc_rl.rollout import pipes; "
    deaf += "sys.stdout.buffer.write(pipes.pack({'ready': True})); sys.stdout.flush(); time.sleep(60)"
    process = RewardProcess("x:y", 0.2, [sys.executable, "-c", deaf])
    await process.start()
    calls = [process.reward("p", "", {}) for _ in range(2)]
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), extend(20))
    assert [outcome.reason for outcome in outcomes] == ["reward_timeout"] * 2
    assert "was not started" in str(outcomes[0])
    await process.close()


async def test_a_workflow_exception_names_its_line_in_few_lines_of_the_log(caplog):
    async def broken(prompt, generate):
        raise KeyError("\x1b[31mred\n")

    made, sent = make(Client(), broken)
    for _ in range(9):
        outcome = await answer(made, sent)
    assert caplog.text.count("failed: KeyError") == 4 and "(8 prompts so far)" in caplog.text
    assert "test_rollout_worker.py:" in outcome["error"] and ", in broken)" in outcome["error"]
    assert outcome["op"] == "failed" and outcome["error"].isprintable()
    assert "raise KeyError" in outcome["trace"]


async def test_a_workflow_that_exits_fails_its_prompt_and_not_the_worker():
    async def exits(prompt, generate):
        sys.exit(3)

    assert (await outcome_of(exits))["op"] == "failed"


async def test_a_reward_that_can_not_be_imported_is_a_bad_configuration(user_code, reward_process):
    absent = "'own_rewards:nothing' can't be imported: module 'own_rewards' has no attribute"
    with pytest.raises(ConfigError, match=absent):
        await reward_process("nothing")
    user_code("half_written", "def score(:\n")
    with pytest.raises(ConfigError, match=r"half_written:score.*SyntaxError: invalid syntax"):
        await reward_process("score", module="half_written")


async def test_tracing_logs_each_request_and_its_answer(caplog):
    with caplog.at_level("INFO"):
        await answer(*make(Client(), tracing=True))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert len(lines) == 6 and "2 tokens in, at most 6 out" in lines[0] and "3 tokens out" in lines[-1]


def cut_off(made):
    made[0].logprobs = made[0].logprobs[:-1]


def not_a_number(made):
    made[2].logprobs[-1] = np.nan


def unknown_token(made):
    made[1].ids[2] = 1_000_000


@pytest.mark.parametrize("checking", [True, False])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_off, "logprobs has 4 entries, but needs 5"),
        (not_a_number, "must be finite"),
        (unknown_token, "prompt 40, trajectory 1 has token id 1000000; the model has 0 to 99"),
    ],
)
async def test_a_group_that_can_not_be_trained_on_never_reaches_the_ledger(damage, words, checking, caplog):
    async def damaged(prompt, generate):
        made = await single_turn(prompt, generate)
        damage(made.trajectories)
        return made

    outcome = await outcome_of(damaged, checking=checking)
    assert (outcome["op"], outcome["reason"]) == ("rejected", "bad_group")
    assert words in outcome["error"] and "prompt 40, trajectory" in caplog.text


async def test_only_a_users_workflow_may_return_a_group_of_another_size():
    async def two(prompt, generate):
        made = await single_turn(prompt, generate)
        del made.trajectories[0]
        return made

    assert GroupRecord(*(await outcome_of(two))["record"]).num_trajectories == 2
    outcome = await outcome_of(two, name="single_turn")
    assert (outcome["reason"], "gconfig.n_samples is 3" in outcome["error"]) == ("bad_group", True)
