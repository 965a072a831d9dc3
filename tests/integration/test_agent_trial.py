"""An agent with the openai client and tools trains the toy: nothing in it knows that it is trained."""

import json

import numpy as np
import pytest
from command_line import Shell
from toy_trials import groups_in_ledger

from hpc_rl.core.trial import Trial
from hpc_rl.examples.toy import make_model

# one token of the toy, so that a random model calls the tool now and then
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
AGENT = """
import json

from openai import OpenAI

NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]


def solve(row):
    client = OpenAI()
    messages = [{"role": "user", "content": row["prompt"]}]
    right = 0
    for turn in range(3):
        made = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, logprobs=True, extra_body={"return_token_ids": True}
        )
        message = made.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            result = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "?"})
        right += bool(message.tool_calls) == (turn < 2)
        choice = made.choices[0]
        logprobs = [one.logprob for one in choice.logprobs.content]
        record = [choice.prompt_token_ids, choice.token_ids, logprobs]
        with open("calls.jsonl", "a") as file:
            file.write(json.dumps(record) + "\\n")
    print("right turns:", right)
    return right / 3
"""
CONFIG = """
experiment_name: tools
trial_name: small
total_train_steps: 8
cluster: {fileroot: runs, n_gpus_per_node: 0}
actor:
  path: model
  ppo_n_minibatches: 1
  gradient_checkpointing: false
  optimizer: {lr: 1e-2, weight_decay: 0, warmup_steps_proportion: 0}
  reward_norm: {mean_level: group, std_level: group}
gconfig: {n_samples: 8, max_new_tokens: 1}
rollout:
  workflow: agent
  workflow_args: {function: "agent:solve", timeout_s: 120}
  reward_fn: none
train_dataset: {path: rows.jsonl, batch_size: 2}
launcher: {type: local}
"""


@pytest.fixture
def shell(tmp_path) -> Shell:
    made = Shell(tmp_path)
    make_model(made.here / "model", seed=4, alphabet=(*"0123456789+=?", CALL))
    (made.here / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1="}) + "\n" for a in range(8)))
    (made.here / "agent.py").write_text(AGENT)
    (made.here / "small.yaml").write_text(CONFIG)
    return made


@pytest.mark.timeout(400)
def test_an_agent_with_tools_over_three_turns_is_trained(shell):
    checked = shell.run("check", "small.yaml", "--episode", "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    episode = json.loads(checked.stdout)["episode"]["trajectories"]
    assert [one["turns"] for one in episode] == [3] * 8
    (shell.here / "calls.jsonl").unlink()
    done = shell.run("submit", "small.yaml", "--follow", timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = shell.here.glob("runs/*/tools/small")
    trial = Trial(folder)
    seen = {}
    for line in (shell.here / "calls.jsonl").read_text().splitlines():
        prompt, made, logprobs = json.loads(line)
        seen.setdefault((*prompt, *made), set()).add(np.float32(logprobs[0]))
    trained = [one for group in groups_in_ledger(trial) for one in group.trajectories]
    assert len(trained) >= 8 * 16
    for one in trained:
        (places,) = np.nonzero(one.loss_mask)
        assert len(places) == 3 and one.stats["rewritten_chats"] == 0
        for place in places:
            assert one.logprobs[place] in seen[tuple(one.ids[: place + 1].tolist())]
    (metrics,) = folder.rglob("metrics.0.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2
    assert {row["agent/calls"] for row in rows if "agent/calls" in row} == {3.0}
    (first,) = shell.run("samples", "small", "--jsonl", "-n", "1").stdout.splitlines()
    assert json.loads(first)["output"] in [f"right turns: {number}\n" for number in range(4)]
