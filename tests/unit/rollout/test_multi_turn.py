"""Turns, discounts and tools of the workflow multi_turn."""

import asyncio

import psutil
import pytest

from hpc_rl.core.types import Turn
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.multi_turn import MultiTurn
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.rollout.tool_call import ToolFailed, call_tool


class Letters:
    """A tokenizer: one token per character."""

    eos_token_ids = (0,)

    def encode(self, text, add_special_tokens=True):
        return [ord(sign) for sign in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids if i)


class Generate:
    """A sampler whose replies are given; the reward of `yes` is 1, of `half` 0.5."""

    index, n_samples, tokenizer = 3, 1, Letters()

    def __init__(self, *replies, reason="stop"):
        self.replies, self.reason, self.asked = list(replies), reason, []

    async def __call__(self, input_ids, sample=0, max_tokens=None):
        self.asked.append(self.tokenizer.decode(input_ids))
        reply = self.replies.pop(0)
        if reply is None or (max_tokens is not None and len(input_ids) >= max_tokens):
            raise Rejection(RejectReason.TOO_LONG, "no room")
        ids = [*self.tokenizer.encode(reply), 0]
        return Turn(ids, [-1.0] * len(ids), [("0.2", 0, len(ids))], self.reason)

    async def reward(self, prompt, completion):
        return {"yes": 1.0, "half": 0.5}.get(completion, 0.0)


PROMPT = {"prompt": "q", "input_ids": [ord("q")]}


async def only(workflow, generate):
    group = await workflow.run(PROMPT, generate)
    assert group.index == 3
    (made,) = group.trajectories
    return made


async def test_a_trajectory_ends_at_its_most_tokens():
    # prompt 1, each reply 2 and 1 for its end, feedback 1: the third turn would begin with 9 tokens
    workflow = MultiTurn(max_turns=9, max_tokens_per_trajectory=9, feedback="!")
    made = await only(workflow, Generate(*["no"] * 9))
    assert made.stats["turns"] == 2 and len(made.ids) == 8
    with pytest.raises(Rejection):
        await only(MultiTurn(max_tokens_per_trajectory=1), Generate("no"))


async def test_it_stops_at_the_first_reward():
    generate = Generate("yes")
    made = await only(MultiTurn(max_turns=3), generate)
    assert (made.reward, made.stats["turns"], generate.asked) == (1.0, 1, ["q"])


async def test_the_discount_counts_once_for_each_turn_before_and_the_model_sees_the_feedback():
    generate = Generate("no", "no", "yes")
    made = await only(MultiTurn(max_turns=4, turn_discount=0.5, feedback=" again "), generate)
    assert made.reward == pytest.approx(0.25)
    assert made.loss_mask.sum() == 3 + 3 + 4  # the model's tokens, with the end of each reply
    assert generate.asked[1] == "qno again "


async def test_the_reward_of_a_turn_is_at_its_end_if_asked(tool):
    tool("def double(x):\n    return 2 * x\n")
    options = {"max_turns": 3, "turn_discount": 0.5, "tools": ["mytools:double"]}
    made = await only(MultiTurn(**options, credit_by_turn=True), Generate(call_of(21), "no", "yes"))
    assert made.reward == 0.5 and made.turn_rewards.nonzero()[0].tolist() == [len(made.ids) - 1]
    assert made.turn_rewards.sum() == 0.5
    assert (await only(MultiTurn(**options), Generate("no", "yes"))).turn_rewards is None


async def test_it_ends_after_max_turns_when_cut_off_or_without_room():
    assert (await only(MultiTurn(max_turns=2), Generate("no", "no", "yes"))).reward == 0
    assert (await only(MultiTurn(max_turns=3), Generate("no", "yes", reason="length"))).stats["turns"] == 1
    assert (await only(MultiTurn(max_turns=3), Generate("no", None))).stats["turns"] == 1
    with pytest.raises(Rejection):
        await only(MultiTurn(), Generate(None))


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """`tool(source)` is a module `mytools` that holds this."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return (tmp_path / "mytools.py").write_text


def call_of(x: int) -> str:
    return f'<tool_call>{{"name": "double", "arguments": {{"x": {x}}}}}</tool_call>'


async def test_a_turn_that_calls_a_tool_is_no_answer(tool):
    tool("def double(x):\n    print('noise')\n    return 2 * x\n")
    generate = Generate(call_of(21), "yes")
    made = await only(MultiTurn(max_turns=2, turn_discount=0.5, tools=["mytools:double"]), generate)
    assert generate.asked[1] == f"q{call_of(21)}42"
    assert made.reward == 1.0 and made.stats == {"turns": 2.0, "answers": 1.0}


async def test_what_a_tool_raises_is_for_the_model_and_once_with_its_lines_in_the_log(tool, caplog):
    tool("def double(x):\n    return {}[str(x)]\n")
    generate = Generate(call_of(1), call_of(2), "yes")
    await only(MultiTurn(max_turns=3, tools=["mytools:double"]), generate)
    assert generate.asked[1].endswith("error: KeyError: '1'") and "error: KeyError: '2'" in generate.asked[2]
    assert caplog.text.count("(logged once): KeyError: '1'") == 1 and "KeyError: '2'" not in caplog.text
    assert "line 2, in double" in caplog.text


async def test_a_wrong_call_is_answered_with_the_names_of_the_tools():
    generate = Generate('<tool_call>{"name": "other"}</tool_call>', "yes")
    await only(MultiTurn(tools=["mytools:double"]), generate)
    assert generate.asked[1].endswith("the tools are double")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(): raise ValueError('no')", "ValueError: no"),
        ("import sys\ndef f(): sys.exit(3)", "SystemExit: 3"),
        ("import os\ndef f(): os._exit(3)", "without a result"),
        ("def f(): return bytearray(8 << 30)", "MemoryError"),
        ("import time\ndef f(): time.sleep(60)", "more than 2 s"),
        ("def g(): pass", "AttributeError"),
    ],
)
async def test_a_tool_that_fails_is_kept_apart(tool, code, said):
    tool(code)
    with pytest.raises(ToolFailed, match=said):
        await call_tool("mytools:f", {}, 2.0)


async def test_a_tool_sees_no_secrets_and_leaves_no_process(tool, monkeypatch):
    tool(
        "import os, subprocess, sys\n"
        "def variables(): return sorted(os.environ)\n"
        "def child():\n"
        "    return subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid\n"
    )
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert "WANDB_API_KEY" not in await call_tool("mytools:variables", {}, 10.0)
    pid = int(await call_tool("mytools:child", {}, 10.0))
    await asyncio.sleep(0.2)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
