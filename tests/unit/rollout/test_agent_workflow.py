"""Episodes of agents: processes with their own key, their calls as tokens, and failures of one alone."""

import asyncio
import contextlib
import json
import os
import sys

import aiohttp
import numpy as np
import pytest
from agents import CLIENT, Texts, make_sampler
from patience import extend

from hpc_rl.core.errors import ConfigError
from hpc_rl.gateway.gateway_log import GatewayLog
from hpc_rl.rollout.agent.episode import Episode, EpisodeFailed
from hpc_rl.rollout.agent.workflow import AgentWorkflow
from hpc_rl.rollout.rewards import Rejection

pytestmark = pytest.mark.waits

ROW = {"prompt": "q", "messages": [{"role": "user", "content": "q"}], "answer": "7", "input_ids": [1]}
TOOL = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture
async def play(user_code, tmp_path):
    """`play(source, sampler, **arguments)` runs the agent function `solve` of a module, or a command."""
    async with contextlib.AsyncExitStack() as stack:

        async def run(source, sampler, command=False, **arguments):
            name = f"agent_{abs(hash(source))}"
            user_code(name, CLIENT + source)
            program = {"command": [sys.executable, f"{tmp_path}/{name}.py"]} if command else {}
            workflow = AgentWorkflow(**(program or {"function": f"{name}:solve"}), **arguments)
            stack.push_async_callback(workflow.close)
            async with asyncio.timeout(extend(60)):
                return await workflow.run(ROW, sampler)

        yield run


async def test_a_function_with_three_turns_and_tools_is_one_sequence(play, chat_tokenizer):
    replies = {
        "q": '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>',
        "5": "more",
        "go on": "8",
    }

    def reply(text):
        return replies[text.rpartition("<|im_end|>\n<|im_start|>assistant")[0].rpartition("\n")[2]]

    source = f"""
def solve(row):
    messages = list(row["messages"])
    first = ask(messages, tools={TOOL!r})
    assert first["content"] is None and first["tool_calls"][0]["function"]["name"] == "add"
    messages += [first, {{"role": "tool", "content": "5", "tool_call_id": first["tool_calls"][0]["id"]}}]
    messages += [ask(messages, tools={TOOL!r}), {{"role": "user", "content": "go on"}}]
    print("so far", len(messages))
    return ask(messages, tools={TOOL!r})["content"] == "8"
"""
    servers = Texts(chat_tokenizer, reply)
    group = await play(source, make_sampler(servers, 2))
    assert group.index == 5 and len(group.trajectories) == 2
    last = servers.requests[-1].input_ids
    for one in group.trajectories:
        assert one.reward == 1.0 and one.output == "so far 5\n"
        assert (one.stats["calls"], one.stats["sequences"], one.stats["rewritten_chats"]) == (3, 1, 0)
        assert one.ids[: len(last)].tolist() == last, "the tokens that the model saw"
        text = chat_tokenizer.decode(one.ids[one.loss_mask].tolist(), False)
        assert text == "<|im_end|>".join([*replies.values(), ""])
        made = one.logprobs[one.loss_mask]
        assert made.tolist()[-2:] == [-1 / 64, -2 / 64] and (one.steps[one.loss_mask] == 3).all()
    seeds = [request.sampling["sampling_seed"] for request in servers.requests]
    assert len({*seeds}) == 6 and {request.min_version for request in servers.requests} == {"0.3"}


async def test_a_command_gets_its_row_and_the_reward_function_scores_its_last_completion(
    play, chat_tokenizer
):
    source = """
import sys
row = json.load(sys.stdin)
assert "input_ids" not in row and sys.argv[1:] == []
print(ask([{"role": "user", "content": row["answer"]}], temperature=0.5)["content"])
"""
    servers = Texts(chat_tokenizer, lambda text: "four")
    (one,) = (await play(source, make_sampler(servers), command=True)).trajectories
    assert one.reward == 4.0 and one.output == "four\n"
    assert set(one.temperatures[one.loss_mask].tolist()) == {0.5}
    assert servers.requests[0].sampling["temperature"] == 0.5


async def test_columns_of_the_row_are_arguments_and_a_missing_one_rejects_the_prompt(chat_tokenizer):
    sampler = make_sampler(Texts(chat_tokenizer, str))
    workflow = AgentWorkflow(command="echo {answer} {none}")
    with pytest.raises(Rejection, match=r"lacks the column \{none\}"):
        await workflow.run(ROW, sampler)
    await workflow.close()


@pytest.mark.parametrize(
    ("end", "reward"),
    [
        ("post('/reward', {'reward': 0.25, 'part': 2}); return 9.0", 0.25),
        ("return {'reward': 3, 'part': 2.0}", 3.0),
        ("return 'four'", 4.0),
        ("return None", 2.0),
    ],
    ids=["posted", "dict", "text", "none"],
)
async def test_rewards_of_functions(play, chat_tokenizer, end, reward):
    source = f"""
async def solve(row, api_key):
    assert api_key == os.environ["OPENAI_API_KEY"]
    ask(row["messages"])
    {end}
"""
    servers = Texts(chat_tokenizer, lambda text: "ok")
    (one,) = (await play(source, make_sampler(servers))).trajectories
    assert one.reward == reward and one.stats.get("reward/part") == (2.0 if "part" in end else None)


async def test_branches_share_the_reward_and_the_evaluation_gets_one_result_of_each_episode(
    play, chat_tokenizer
):
    source = """
def solve(row):
    first = [*row["messages"], ask(row["messages"])]
    for word in ("a", "b"):
        ask([*first, {"role": "user", "content": word}])
    return 0.5
"""
    servers = Texts(chat_tokenizer, lambda text: "ok")
    made = (await play(source, make_sampler(servers))).trajectories
    assert [one.reward for one in made] == [0.5, 0.5] and made[0].stats["sequences"] == 2
    assert [int(one.loss_mask.sum()) for one in made] == [6, 3]
    assert len((await play(source, make_sampler(servers, evaluate=True))).trajectories) == 1


async def test_without_the_tokens_of_replies_a_changed_rendering_begins_a_new_sequence(play, chat_tokenizer):
    source = """
def solve(row):
    messages = [*row["messages"], ask(row["messages"], stop="p")]
    ask([*messages, {"role": "user", "content": "a"}])
    return 1.0
"""
    servers = Texts(chat_tokenizer, lambda text: "stop")  # the client sees `sto`
    kept = (await play(source, make_sampler(servers))).trajectories
    assert len(kept) == 1 and kept[0].stats["rewritten_chats"] == 0
    text = chat_tokenizer.decode(kept[0].ids.tolist(), False)
    assert "stop<|im_end|>\n<|im_start|>user\na" in text
    rendered = (await play(source, make_sampler(servers), keep_tokens=False)).trajectories
    assert len(rendered) == 2 and rendered[0].stats["rewritten_chats"] == 1


async def test_a_stream_gives_the_same_tokens(play, chat_tokenizer):
    source = """
def solve(row):
    body = {"model": "any", "messages": row["messages"], "stream": True}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        lines = [line[6:] for line in answer.read().decode().split("\\n") if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines]
    assert "".join(deltas) == "text", deltas
    return 1.0
"""
    (one,) = (await play(source, make_sampler(Texts(chat_tokenizer, lambda text: "text")))).trajectories
    assert chat_tokenizer.decode(one.ids[one.loss_mask].tolist(), False) == "text<|im_end|>"


BAD = {
    "hangs": ("import time; time.sleep(600)", "took more than"),
    "crashes": ("os.kill(os.getpid(), 9)", "killed by signal 9"),
    "raises": ("raise KeyError('colour')", "raised KeyError: 'colour'"),
    "exits": ("sys.exit(3)", "raised SystemExit: 3"),
    "floods its output": ("while True: print('x' * 65536)", "MiB of output"),
    "floods the model": ("while True: ask(row['messages'])", "more than 20 completions"),
    "returns nonsense": ("return [1, 2]", "the reward is"),
    "returns no number": ("return {'reward': float('nan')}", "the reward is nan"),
    "returns an object": ("return object()", "the agent returned"),
    "posts nonsense": ("post('/reward', {'reward': 'high'})", "400"),
    "says nothing": ("return 1.0", None),
}


@pytest.mark.parametrize("kind", BAD)
async def test_an_agent_that_fails_loses_only_its_own_episode(play, chat_tokenizer, kind):
    act, problem = BAD[kind]
    source = f"""
def solve(row):
    if os.path.exists(__file__ + ".taken"):
        ask(row["messages"])
        return 1.0
    open(__file__ + ".taken", "x")
    {"ask(row['messages'])" if problem else "pass"}
    print("the bad one")
    {act}
"""
    servers = Texts(chat_tokenizer, lambda text: "ok")
    # the others must not be late on a slow machine
    timeout_s = extend(2 if kind == "hangs" else 8)
    limits = {"retries": 0, "max_calls": 20, "timeout_s": timeout_s, "max_episodes": 1}
    group = await play(source, make_sampler(servers, 3), **limits)
    assert [one.reward for one in group.trajectories] == [1.0, 1.0]
    assert {one.stats["lost_episodes"] for one in group.trajectories} == {1.0}


async def test_a_failed_episode_is_started_again_or_gets_the_reward_of_failures(play, chat_tokenizer):
    source = """
def solve(row):
    ask(row["messages"])
    if not os.path.exists(__file__ + ".taken"):
        open(__file__ + ".taken", "x")
        raise ValueError("once")
    return 1.0
"""
    servers = Texts(chat_tokenizer, lambda text: "ok")
    (one,) = (await play(source, make_sampler(servers))).trajectories
    assert (one.reward, one.stats["retries"], one.stats["lost_episodes"]) == (1.0, 1.0, 0.0)
    seeds = [request.sampling["sampling_seed"] for request in servers.requests]
    assert len({*seeds}) == 2, "another try has other samples"
    always = "def solve(row):\n    ask(row['messages']); print('here'); raise ValueError('always')\n"
    with pytest.raises(EpisodeFailed, match="ValueError: always") as raised:
        await play(always, make_sampler(servers))
    assert "here" in raised.value.__notes__[0] and "in solve" in raised.value.__notes__[0]
    (one,) = (await play(always, make_sampler(servers), failure_reward=-1.0)).trajectories
    assert one.reward == -1.0 and one.stats["retries"] == 1.0 and "here" in one.output


async def test_a_failure_in_an_evaluation_fails_the_prompt_unless_it_has_a_reward(play, chat_tokenizer):
    source = "def solve(row): return 1.0\n"
    servers = Texts(chat_tokenizer, lambda text: "ok")
    with pytest.raises(EpisodeFailed, match="got no completion"):
        await play(source, make_sampler(servers, evaluate=True))
    (one,) = (await play(source, make_sampler(servers, evaluate=True), failure_reward=0.0)).trajectories
    assert one.reward == 0.0 and not one.loss_mask.any()


async def test_no_process_of_an_ended_agent_is_left(play, chat_tokenizer, tmp_path):
    source = f"""
import subprocess
def solve(row):
    ask(row["messages"])
    code = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
    return 1.0
"""
    await play(source, make_sampler(Texts(chat_tokenizer, lambda text: "ok")))
    pid = (tmp_path / "child").read_text()
    with pytest.raises(FileNotFoundError):
        open(f"/proc/{pid}/stat")  # noqa: SIM115


async def test_a_key_opens_its_own_episode_alone(play, chat_tokenizer, tmp_path):
    source = f"""
def solve(row):
    ask(row["messages"])
    open({str(tmp_path / "known")!r}, "w").write(json.dumps(dict(os.environ)))
    return 1.0
"""
    await play(source, make_sampler(Texts(chat_tokenizer, lambda text: "ok")))
    seen = json.loads((tmp_path / "known").read_text())
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:") and "127.0.0.1" in seen["NO_PROXY"]
    key = {"Authorization": f"Bearer {seen['OPENAI_API_KEY']}"}
    body = {"messages": ROW["messages"]}
    async with aiohttp.ClientSession() as session:
        for headers in ({}, key):
            url = seen["OPENAI_BASE_URL"] + "/chat/completions"
            async with session.post(url, json=body, headers=headers) as answer:
                assert answer.status == 401, "its episode has ended"


async def test_a_module_that_makes_its_client_at_its_import_is_imported_in_each_episode(play, chat_tokenizer):
    source = """
KEY, URL = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]
def solve(row):
    assert (KEY, URL) == (os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]), KEY
    ask(row["messages"])
    return 1.0
"""
    before = os.environ.get("OPENAI_API_KEY")
    group = await play(source, make_sampler(Texts(chat_tokenizer, lambda text: "ok"), 2))
    assert [one.reward for one in group.trajectories] == [1.0, 1.0]
    assert os.environ.get("OPENAI_API_KEY") == before, "placeholders of the import are gone"


def test_a_function_that_can_not_be_imported_is_refused():
    with pytest.raises(ConfigError, match="no_such_module"):
        AgentWorkflow(function="no_such_module:solve")


async def test_tokens_masks_and_logprobs_equal_the_gateways_log(play, chat_tokenizer, tmp_path, monkeypatch):
    log = GatewayLog(tmp_path / "log")

    def make_episode(*arguments):
        episode = Episode(*arguments)
        episode.log = log
        return episode

    monkeypatch.setattr("hpc_rl.rollout.agent.workflow.Episode", make_episode)
    source = """
def solve(row):
    first = [*row["messages"], ask(row["messages"], temperature=0.5)]
    for word in ("a", "b"):
        ask([*first, {"role": "user", "content": word}])
    return 0.5
"""
    servers = Texts(chat_tokenizer, lambda text: f"{len(text)}")
    made = (await play(source, make_sampler(servers, 2))).trajectories
    assert len(made) == 4 and log.get_status()["records"] == 6
    for one in made:
        found = log.match(one.ids, one.loss_mask)
        assert found.has_logprob[one.loss_mask].all() and found.finish_reason == one.finish_reason
        assert np.array_equal(found.logprobs, one.logprobs)
        assert np.array_equal(found.steps, one.steps) and np.array_equal(found.lineages, one.lineages)
    first, second = made[:2]
    assert first.temperatures is not None and second.temperatures is None
    log.close()
