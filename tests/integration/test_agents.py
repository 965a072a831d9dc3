"""The examples of agents with the real openai client and a real MCP server; 256 episodes at once."""

import asyncio
import contextlib
import re
import sys
from pathlib import Path

import pytest
from agents import CLIENT, Texts, make_sampler
from chat_tokenizers import chat_tokenizer
from patience import extend

from hpc_rl.rollout.agent.workflow import AgentWorkflow

__all__ = ["chat_tokenizer"]


@contextlib.asynccontextmanager
async def open_agent(**arguments):
    workflow = AgentWorkflow(**arguments)
    try:
        async with asyncio.timeout(extend(100)):
            yield workflow
    finally:
        await workflow.close()


def make_call(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


async def play_example(tokenizer, call, result, row, **arguments):
    """Play an example: the model calls the tool, and repeats its result. Return the trajectory."""
    servers = Texts(tokenizer, lambda text: f"It is {result}" if f"tool\n{result}" in text else call)
    async with open_agent(**arguments) as workflow:
        group = await workflow.run({"messages": [], "input_ids": [1], **row}, make_sampler(servers))
    (one,) = group.trajectories
    assert len(servers.requests) == 2 and one.stats["rewritten_chats"] == 0
    made = tokenizer.decode(one.ids[one.loss_mask].tolist(), False)
    assert made == f"{call}<|im_end|>It is {result}<|im_end|>"
    return one


async def test_the_calculator_as_a_function(chat_tokenizer):
    call, row = make_call("calculate", '{"expression": "6*7"}'), {"prompt": "6 times 7?", "answer": "42"}
    one = await play_example(
        chat_tokenizer, call, "42", row, function="hpc_rl.examples.agents.calculator:solve"
    )
    assert one.reward == 1.0


async def test_the_calculator_as_a_command(chat_tokenizer):
    call, row = make_call("calculate", '{"expression": "6*7"}'), {"prompt": "6 times 7?", "answer": "42"}
    command = [sys.executable, "-m", "hpc_rl.examples.agents.calculator"]
    one = await play_example(chat_tokenizer, call, "42", row, command=command)
    assert one.reward == len("It is 42") and one.output == "It is 42\n"


async def test_the_agent_of_the_page(chat_tokenizer, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    found = re.search(r"<!-- file: my_agent.py -->\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_agent.py").write_text(found[1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    call, row = make_call("multiply", '{"a": 6, "b": 7}'), {"prompt": "6 times 7?", "answer": "42"}
    one = await play_example(chat_tokenizer, call, "42", row, function="my_agent:solve")
    assert one.reward == 1.0


async def test_tools_of_an_mcp_server(chat_tokenizer):
    call = make_call("count_letters", '{"word": "strawberry", "letter": "r"}')
    row = {"prompt": "How many r are in strawberry?", "answer": 3}
    one = await play_example(
        chat_tokenizer, call, "3", row, function="hpc_rl.examples.agents.mcp_tools:solve"
    )
    assert one.reward == 1.0


async def test_a_stream_of_the_openai_client(chat_tokenizer, tmp_path, monkeypatch):
    source = """
from openai import OpenAI
def solve(row):
    made = OpenAI().chat.completions.create(model="any", messages=row["messages"], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in made)
    return float(text == "streamed")
"""
    (tmp_path / "streams.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    row = {"messages": [{"role": "user", "content": "q"}], "input_ids": [1]}
    async with open_agent(function="streams:solve") as workflow:
        group = await workflow.run(row, make_sampler(Texts(chat_tokenizer, lambda text: "streamed")))
    assert [one.reward for one in group.trajectories] == [1.0]


@pytest.mark.timeout(200)
async def test_256_episodes_run_at_once(chat_tokenizer, tmp_path, monkeypatch):
    num, waiting = 256, asyncio.Event()
    servers = Texts(chat_tokenizer, lambda text: "ok")
    generate = servers.generate_many

    async def wait_for_all(requests):
        made = await generate(requests)
        if len(servers.requests) == num:
            waiting.set()
        await waiting.wait()
        return made

    servers.generate_many = wait_for_all
    (tmp_path / "asks.py").write_text(
        f"{CLIENT}\ndef solve(row):\n    ask(row['messages'])\n    return 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    row = {"messages": [{"role": "user", "content": "q"}], "input_ids": [1]}
    async with open_agent(function="asks:solve", retries=0, timeout_s=extend(90)) as workflow:
        group = await workflow.run(row, make_sampler(servers, num))
    assert len(group.trajectories) == num and waiting.is_set()
    assert {one.stats["lost_episodes"] for one in group.trajectories} == {0.0}
