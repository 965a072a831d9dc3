"""Options of `rollout` and `gconfig`: each does what it says."""

import asyncio
import contextlib
import functools
import logging

import numpy as np
import pytest
import tokenizers
from patience import extend
from small_configs import WORDS

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import Trajectory, TrajectoryGroup, decode
from hpc_rl.datasets.order import make_sample_seed
from hpc_rl.name_resolve import open_names
from hpc_rl.roles.rollout_worker import open_servers, open_worker
from hpc_rl.rollout.batch_log.ledger import GroupRecord, RecordPlace
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.rollout.sequencer import Sequencer, make_rules
from hpc_rl.rollout.workflow import check_group
from tests.unit.servers.test_router import announce, answer_of, servers

OPTIONS = [*WORDS, "valid_dataset.path=/v", "train_dataset.batch_size=4", "actor.ppo_n_minibatches=1"]
OPTIONS += ["allocation_mode=sglang:d2+fsdp:d2", "cluster.n_gpus_per_node=4", "evaluator.blocking=true"]


def configured(*overrides, model="/m"):
    return check(load([], [*OPTIONS, f"actor.path={model}", *overrides]), files=False).config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    words = {"<pad>": 0, "<eos>": 1, **{str(number): number for number in range(2, 20)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.save(f"{folder}/tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return folder


@pytest.fixture
def opened(tmp_path, model):
    """`async with opened("rollout.x=1") as (ask, fakes)`: the worker of a configuration, and its servers.

    `await ask()` gives it a prompt of two tokens and returns its outcome.
    """
    trial = Trial(tmp_path / "user" / "e" / "t")
    trial.make_dirs()

    @contextlib.asynccontextmanager
    async def opening(*overrides, announced=1):
        config, sent = configured(*overrides, model=model), []
        async with servers(2) as fakes, contextlib.AsyncExitStack() as stack:
            for index, fake in enumerate(fakes[:announced]):
                announce(open_names(trial, config), index, fake)
            open_pool = functools.partial(open_servers, stack, trial, config, "data")
            worker = await open_worker(stack, config, {}, sent.append, open_pool)

            async def ask(evaluate=False):
                prompt = {"columns": {"prompt": "x", "answer": "12"}, "input_ids": [5, 6], "version": "0.0"}
                place = {"op": "run", "ticket": 4, "index": 40, "epoch": 0, "row": 2, "notes": {}}
                async with asyncio.timeout(extend(5)):
                    await worker.answer({**prompt, **place, "evaluate": evaluate, "held_out_set": ""})
                return decode(sent[-1][4:])

            yield ask, fakes

    return opening


def asked(fakes):
    return [body for fake in fakes for body in fake.bodies]


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("greedy=true", "temperature", 0.0),
        ("temperature=0.7", "temperature", 0.7),
        ("top_p=0.9", "top_p", 0.9),
        ("top_k=50", "top_k", 50),
        ("min_p=0.1", "min_p", 0.1),
        ("repetition_penalty=1.2", "repetition_penalty", 1.2),
        ("frequency_penalty=0.5", "frequency_penalty", 0.5),
        ("stop=[x]", "stop", ["x"]),
        ("stop_token_ids=[7]", "stop_token_ids", [7, 1]),
        ("max_new_tokens=5", "max_new_tokens", 5),
        ("max_tokens=12", "max_new_tokens", 10),
        ("min_new_tokens=3", "min_new_tokens", 3),
    ],
)
async def test_a_request_says_how_to_sample(opened, override, name, value):
    most = [] if override.startswith("max_new") else ["gconfig.max_new_tokens=11"]
    async with opened(*most, f"gconfig.{override}") as (ask, fakes):
        assert (await ask())["op"] == "group"
    (body,) = asked(fakes)
    assert body["sampling_params"][name] == value
    async with opened(*most, f"eval_gconfig.{override}") as (ask, fakes):
        await ask()
        await ask(evaluate=True)
    trained, held_out = (body["sampling_params"] for body in asked(fakes))
    assert held_out.pop(name) == value != trained.pop(name, None)
    assert held_out | {"sampling_seed": 0} == trained | {"sampling_seed": 0}


async def test_a_sample_is_drawn_by_the_seed_of_the_trial(opened):
    for seed in (5, 6):
        async with opened(f"seed={seed}") as (ask, fakes):
            await ask()
        (body,) = asked(fakes)
        assert body["sampling_params"]["sampling_seed"] == make_sample_seed(seed, 0, 2, 0)


async def test_a_prompt_has_as_many_samples_as_are_configured(opened):
    async with opened("gconfig.n_samples=3", "eval_gconfig.n_samples=2") as (ask, fakes):
        for fake in fakes:
            fake.reply = lambda body: [answer_of([1, 2], "0.1") for _ in body["input_ids"]]
        outcome = await ask()
        assert len(decode(outcome["group"]).trajectories) == 3
        assert (await ask(evaluate=True))["num_tokens"] == 4
    assert [len(body["input_ids"]) for body in asked(fakes)] == [3, 2]


@pytest.mark.parametrize("logged", [True, False])
async def test_tracing_logs_requests(opened, logged, caplog):
    caplog.set_level(logging.INFO)
    async with opened(f"rollout.enable_rollout_tracing={logged}".lower()) as (ask, _):
        await ask()
    assert ("2 tokens in, at most" in caplog.text) == logged


@pytest.mark.parametrize("checked", [True, False])
async def test_the_format_of_trajectories_is_checked_on_demand(opened, checked):
    async with opened(f"rollout.check_trajectory_format={checked}".lower()) as (ask, fakes):
        for fake in fakes:
            fake.reply = lambda body: answer_of([1, 2], "0.1", logprob=0.5)
        assert (await ask()).get("reason") == ("bad_group" if checked else None)


async def test_servers_take_turns_on_demand(opened):
    async with opened("rollout.schedule_policy=round_robin", announced=2) as (ask, fakes):
        for number in range(12):  # by chance once in 4096
            await ask()
            await ask()
            assert [len(fake.bodies) for fake in fakes] == [number + 1] * 2


async def test_a_request_is_sent_again_as_often_as_is_configured(opened):
    async with opened("rollout.request_retries=0") as (ask, fakes):
        for fake in fakes:
            fake.reply = lambda body: 500
        outcome = await ask()
    # not `failed`, after which the prompt would be issued again
    assert (outcome["op"], outcome["reason"], len(asked(fakes))) == ("rejected", "exception", 1)
    assert "request_retries are used up" in outcome["error"]


async def test_a_request_ends_at_its_time_limit(opened):
    async with opened("rollout.request_timeout=0.1", "rollout.request_retries=0") as (ask, fakes):
        for fake in fakes:
            fake.gate.clear()
        assert "did not finish a generation within 0 s" in (await ask())["error"]
        for fake in fakes:
            fake.gate.set()


async def test_a_server_is_awaited_for_the_setup_time(opened, caplog):
    async with opened("rollout.setup_timeout=0.1", announced=0) as (ask, _):
        waiting = asyncio.create_task(ask())
        while "had no server for 0 s" not in caplog.text:
            assert not waiting.done(), "it waits longer than setup_timeout"
            await asyncio.sleep(0.05)
        waiting.cancel()


def sequencer(*overrides):
    made = Sequencer(make_rules(configured(*overrides)))
    made.observe(0, 0)
    return made


@pytest.mark.parametrize(
    ("overrides", "num_issued"),
    [
        (["async_training=false"], 4),
        (["rollout.max_head_offpolicyness=0"], 4),
        (["rollout.max_head_offpolicyness=1"], 8),
        (["rollout.max_head_offpolicyness=9"], 8),  # twice the batch size
        (["rollout.max_head_offpolicyness=9", "rollout.max_concurrent_rollouts=13"], 13),
        (["rollout.max_head_offpolicyness=2", "rollout.max_concurrent_rollouts=99"], 12),
        (["rollout.max_head_offpolicyness=9", "rollout.queue_size=5"], 5),
    ],
)
def test_rules_come_from_the_configuration(overrides, num_issued):
    core = sequencer(*overrides)
    assert len(core.issue()) == num_issued and core.issue() == []


def test_the_queue_bounds_what_runs_and_what_waits():
    core = sequencer("rollout.queue_size=6", "rollout.max_head_offpolicyness=9")
    issued = core.issue()
    assert len(issued) == 6
    for issue in issued[:2]:
        place = RecordPlace(0, issue.index)
        core.finish(issue.ticket, GroupRecord(issue.index, 0, 0, 0, 1, 1, 0.0), place)
    assert core.issue() == []  # two are ready, four run


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def group(**changes) -> TrajectoryGroup:
    whole = {
        "ids": integers(5, 6, 7),
        "loss_mask": np.array([False, True, True]),
        "logprobs": floats(0, -1, -2),
    }
    whole |= {
        "lineages": integers(-1, 0, 0),
        "steps": integers(-1, 3, 3),
        "reward": 1.0,
        "finish_reason": "stop",
    }
    return TrajectoryGroup(3, [Trajectory(**{**whole, **changes})])


NO_INT32 = "ids must be a one-dimensional array of int32"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([1, 2], "prompt 3: the workflow returned list"),
        (TrajectoryGroup(3, [{}]), "trajectory 0 is dict"),
        (group(ids=[5, 6, 7]), NO_INT32),
        (group(ids=np.array([5, 6, 7])), NO_INT32),
        (group(logprobs=floats(0, -1)), "logprobs has 2 entries, but needs 3"),
        (group(logprobs=floats(0, np.nan, -2)), "logprobs must be finite"),
        (group(logprobs=floats(0, -np.inf, -2)), "logprobs must be finite"),
        (group(logprobs=np.array([0, -1, -2])), "logprobs must be a one-dimensional array of float32"),
        (group(ids=integers(5, 10, 7)), "trajectory 0 has token id 10; the model has 0 to 9"),
        (group(ids=integers(5, -1, 7)), "trajectory 0 has token id -1; the model has 0 to 9"),
        (group(advantages=floats(0, np.nan, 1)), "advantages must be finite"),
        (group(advantages=floats(0, 1)), "advantages has 2 entries, but needs 3"),
        (group(ref_logprobs=[0.0, 0.0, 0.0]), "ref_logprobs must be a one-dimensional array of float32"),
        (group(steps=integers(-1, -1, 3)), "must be at least 0 where loss_mask is true"),
    ],
)
def test_a_group_that_can_not_be_trained_on_is_always_refused(made, words):
    with pytest.raises(Rejection, match=words):
        check_group(made, 3, 10)
    check_group(group(), 3, 10)


def test_a_group_of_another_size_is_refused_where_the_workflow_is_built_in():
    with pytest.raises(
        Rejection, match=r"prompt 3: the workflow returned 1 trajectories; gconfig.n_samples is 4"
    ):
        check_group(group(), 3, 10, num_trajectories=4)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (group(loss_mask=np.zeros(3, bool)), "marks no token"),
        (group(logprobs=floats(0, 1, -2)), "logprobs must be at most 0"),
    ],
)
def test_what_the_strict_check_adds(made, words):
    check_group(made, 3, 10)
    with pytest.raises(Rejection, match=words):
        check_group(made, 3, 10, strict=True)
