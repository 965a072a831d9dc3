"""Rewards of several parts, several rewards with weights, batched ones, and those of tasks."""

import time

import pytest
from small_configs import WORDS

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.types import Turn
from hpc_rl.rollout.rewards import (
    LIMITED,
    Rejection,
    make_built_in,
    parse_score,
    score_each,
    tasks,
    weight_rewards,
)
from hpc_rl.rollout.rewards.reward_process import RewardProcess
from hpc_rl.rollout.rewards.tasks import code_tests, countdown, length, make_code_tests, thinks_then_answers
from hpc_rl.rollout.workflow import trajectory
from hpc_rl.sandbox import Mechanism, Protection, Sandbox

GRPO = [*WORDS, "train_dataset.batch_size=8", "gconfig.n_samples=4"]


def test_a_reward_may_have_parts_and_they_go_into_the_stats_of_its_trajectory():
    found = parse_score({"reward": 0.5, "format": True, "correct": 0})
    assert (found, found.parts) == (0.5, {"format": 1.0, "correct": 0.0})
    made = trajectory([([1], Turn([2], [-0.1], [("0.3", 0, 1)], "stop"))], found)
    assert (made.reward, made.stats) == (0.5, {"reward/format": 1.0, "reward/correct": 0.0})


def test_a_reward_that_a_workflow_computes_with_keeps_its_parts():
    first = parse_score({"reward": 0.5, "format": 1.0})
    second = parse_score({"reward": 1.0, "format": 0.0, "correct": 1.0})
    total = sum([first, second])
    assert (total, total.parts) == (1.5, {"format": 1.0, "correct": 1.0})
    mean = total / 2
    assert (mean, mean.parts) == (0.75, {"format": 0.5, "correct": 0.5})
    later = 0.5 * second - 0.25
    assert (later, later.parts) == (0.25, {"format": 0.0, "correct": 0.5})
    assert (1 - first, (1 - first).parts) == (0.5, {"format": -1.0})
    made = trajectory([([1], Turn([2], [-0.1], [("0.3", 0, 1)], "stop"))], first + 0.9 * second)
    assert made.stats == {"reward/format": 1.0, "reward/correct": 0.9}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"format": 1.0}, "a dict with format; it needs the entry 'reward'"),
        ({"reward": 1.0, "format": "yes"}, "part 'format' of the reward is 'yes' "),
        ({"reward": None}, "the reward is None "),
        ({"reward": 1.0, "a b\n": 1.0}, "a part 'a b\\n'; allowed: names of letters"),
    ],
)
def test_a_dict_that_is_no_reward_is_refused_by_name(value, words):
    with pytest.raises(Rejection) as caught:
        parse_score(value)
    assert words in caught.value.message


async def test_several_rewards_are_weighed_and_each_is_a_part():
    exact, right_format = score_each(make_built_in("exact_match")), score_each(make_built_in("format"))
    rewards = weight_rewards({"exact_match": (exact, 1.0), "format": (right_format, 0.5)})
    answered = "<think>a</think><answer>b</answer>"
    found = await rewards("q", [answered, "1299"], {"answer": "1299"})
    assert found == [0.5, 1.0]
    parts = [{"exact_match": 0.0, "format": 1.0}, {"exact_match": 1.0, "format": 0.0}]
    assert [one.parts for one in found] == parts


@pytest.fixture
async def started():
    """`await started(path, …)`: a process of its own that runs a reward."""
    processes = []

    async def start(*what, **more) -> RewardProcess:
        processes.append(RewardProcess(*what, **more))
        await processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        await process.close()


async def test_a_batched_reward_gets_all_completions_of_a_prompt_at_once(user_code, started):
    user_code(
        "ranks",
        "def rank(prompt, completions, least, **columns):\n"
        "    if least is None:\n"
        "        return [1.0]\n"
        "    order = sorted(completions)\n"
        "    return [{'reward': order.index(one), 'length': len(one)} for one in completions]\n"
        "rank.batched = True\n",
    )
    process = await started("ranks:rank", 5.0)
    found = await process.rewards("q", ["b", "ccc", "a"], {"least": 1})
    assert found == [1.0, 2.0, 0.0] and [one.parts["length"] for one in found] == [1.0, 3.0, 1.0]
    with pytest.raises(
        Rejection, match=r"the batched reward returned \[1.0\] .* for 2 .*a list of 2 rewards"
    ):
        await process.rewards("q", ["a", "b"], {"least": None})


def test_the_format_is_one_thought_and_one_answer():
    good = ["<think>x</think>\n<answer>1</answer>", "x</think><answer>1</answer>\n"]
    bad = ["<answer>1</answer>", "<think>x</think>1", f"{good[0]} more", good[0] * 2, "", "</think>"]
    assert [thinks_then_answers("q", one) for one in (*good, *bad)] == [1.0] * 2 + [0.0] * 6


async def test_the_length_falls_from_1_to_0():
    reward = length(lambda text, add_special_tokens: list(text), 4)
    assert [await reward("q", "a" * n, {}) for n in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>(1 + 2) * 3</answer>", 1.0),
        ("so\n3 × (2 + 1) = 9", 1.0),
        ("<answer>9</answer>", 0.0),
        ("<answer>3 * 3</answer>", 0.0),
        ("<answer>(1 + 2) * 3 * 1</answer>", 0.0),
        ("<answer>1 / 0 + 2 + 3</answer>", 0.0),
        ("<answer>9**9**9</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("(" * 400, 0.0),
        ("", 0.0),
    ],
)
def test_countdown_uses_each_number_once(completion, expected):
    assert countdown("q", completion, nums=[1, 2, 3], target=9) == expected


ADD = "```python\ndef add(a, b):\n    return a + b\n```"


def test_code_is_run_with_limits_and_scored_by_its_tests():
    code = f"I think:\n{ADD}"
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]
    assert code_tests("q", code, tests=tests) == 0.5
    assert code_tests("q", code, tests=tests[0]) == 1.0
    hungry = "```python\nx = bytearray(4 << 30)\n```"
    assert code_tests("q", hungry, tests="pass") == 0.0
    assert code_tests("q", "not code", tests="pass") == 0.0
    curious = "```python\nimport os\nassert 'HPC_RL_SECRET' not in os.environ\nassert os.listdir() == []\n```"
    assert code_tests("q", curious, tests="pass") == 1.0


@pytest.mark.parametrize(
    "code",
    ["import sys\nsys.exit(0)", "import os\nos._exit(0)", "raise SystemExit", "\0", "'\ud800'", "x = ("],
)
def test_code_that_ends_before_its_test_does_not_pass(code):
    assert code_tests("q", code, tests="assert 1 + 1 == 3") == 0.0


def test_code_with_much_text_is_run():
    assert code_tests("q", f"y = '{'z' * 300_000}'", tests="assert len(y) == 300_000") == 1.0


def test_the_tests_of_a_completion_share_the_time_limit():
    reward = make_code_tests(timeout_s=1.25, sandbox="available")
    began = time.monotonic()
    assert reward("q", "import time\ntime.sleep(60)", tests=["pass"] * 5) == 0.0
    assert time.monotonic() - began < 50  # and not a minute each
    assert make_code_tests(60.0, "available")("q", "x = 1", tests=["assert x == 1", "assert x == 2"]) == 0.5


def test_a_sandbox_that_is_required_and_not_complete_is_a_bad_configuration(monkeypatch):
    weak = Sandbox(Mechanism.LIMITS, frozenset({Protection.MEMORY}))
    monkeypatch.setattr(tasks, "find_sandbox", lambda: weak)
    make_code_tests(15.0, "available")
    with pytest.raises(ConfigError, match=r"rollout\.sandbox required: .*other processes of this account"):
        make_code_tests(15.0, "required")


async def test_code_is_run_by_the_reward_process(started):
    options = {"timeout_s": 60.0, "sandbox": "required"}
    process = await started(LIMITED["code_tests"], 60.0, options=options)
    assert await process.reward("q", ADD, {"tests": ["assert add(1, 2) == 3", "assert False"]}) == 0.5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["rollout.reward_fn=format,exact_macht"], "'exact_macht' is not known; allowed: exact_match, "),
        (["rollout.reward_fn=format,format"], "names a function twice"),
        (["rollout.reward_fn=format,length", "rollout.reward_weights=[0,0]"], "not all 0"),
        (["rollout.sandbox=required"], "rollout.sandbox required has no effect: it is for code_tests"),
        (["rollout.reward_fn=format,judge"], "needs the section rollout.judge"),
    ],
)
def test_rewards_that_make_no_sense_are_refused(more, words):
    with pytest.raises(ConfigError) as caught:
        check(load([], [*GRPO, *more]), files=False)
    assert words in str(caught.value)
