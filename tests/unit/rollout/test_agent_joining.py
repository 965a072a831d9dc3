"""Calls of an episode as sequences: turns, branches, shared beginnings, and the tokens of earlier replies."""

import numpy as np
import pytest

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.types import Turn
from hpc_rl.datasets.continuation import encode_continuation
from hpc_rl.gateway.requests import Chat
from hpc_rl.rollout.agent.history import ChatHistory
from hpc_rl.rollout.agent.joining import Call, join_calls, make_trajectory


def call(input_ids: list[int], output_ids: list[int], temperature: float = 1.0, version: str = "0.1") -> Call:
    spans = [(version, 0, len(output_ids))]
    turn = Turn(output_ids, [-token / 100 for token in output_ids], spans, "stop")
    return Call(input_ids, turn, temperature)


def test_turns_become_one_sequence_with_the_tokens_of_each_reply_as_trained():
    calls = [call([1, 2], [3, 9]), call([1, 2, 3, 9, 4], [5, 9], version="0.2")]
    (sequence,) = join_calls(calls)
    made = make_trajectory(sequence, 0.5, 1.0)
    assert made.ids.tolist() == [1, 2, 3, 9, 4, 5, 9]
    assert made.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert made.logprobs.tolist() == pytest.approx([0, 0, -0.03, -0.09, 0, -0.05, -0.09])
    assert made.steps.tolist() == [-1, -1, 1, 1, -1, 2, 2]
    assert made.reward == 0.5 and made.temperatures is None


def test_branches_become_sequences_and_their_beginning_is_trained_on_once():
    first = call([1], [2])
    calls = [first, call([1, 2, 3], [4]), call([1, 2, 5], [6]), call([1, 2, 3, 4, 7], [8])]
    sequences = join_calls(calls)
    made = [make_trajectory(one, 1.0, 1.0) for one in sequences]
    assert [one.ids.tolist() for one in made] == [[1, 2, 5, 6], [1, 2, 3, 4, 7, 8]]
    trained = [one.ids[one.loss_mask].tolist() for one in made]
    assert trained == [[2, 6], [4, 8]]
    assert made[1].logprobs[1] == 0 and made[1].steps[1] == -1, "context like a prompt"
    assert sum(len(one) for one in trained) == len(calls)


def test_samples_of_one_prompt_and_unrelated_calls_are_sequences_of_their_own():
    calls = [call([1], [2]), call([1], [3]), call([7], [8]), call([1], [])]
    assert [[one.ids for one in sequence.calls] for sequence in join_calls(calls)] == [
        [[1, 2]],
        [[1, 3]],
        [[7, 8]],
    ]
    assert join_calls([]) == []


def test_of_equal_calls_the_latest_is_continued():
    first, second, third = call([1], [2]), call([1], [2]), call([1, 2, 3], [4])
    alone, long = join_calls([first, second, third])
    assert alone.calls == [first] and long.calls == [second, third]


def test_tokens_keep_the_temperature_of_their_call():
    (sequence,) = join_calls([call([1], [2]), call([1, 2], [3], temperature=0.5)])
    assert make_trajectory(sequence, 0.0, 1.0).temperatures.tolist() == [1.0, 1.0, 0.5]


def chat(*messages: dict, **variables) -> Chat:
    return Chat([{"content": "", **one} for one in messages], variables)


USER = {"role": "user", "content": "q"}
TOOL = {"role": "tool", "content": "7", "tool_call_id": "a"}


def of_tool(arguments, **more) -> dict:
    calls = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls, **more}


def test_a_chat_is_found_by_the_longest_beginning_whatever_a_client_did_to_the_reply():
    history, one, two = ChatHistory(), call([1], [2]), call([3], [4])
    history.add(chat(USER, tools=[1]), of_tool('{"a": 1, "b": 2}', content=None), one)
    sent_back = of_tool('{"b":2,"a":1}', refusal=None, content="")
    assert history.find(chat(USER, sent_back, TOOL, tools=[1])) == (one, 2)
    history.add(chat(USER, sent_back, TOOL, tools=[1]), {"role": "assistant", "content": " 7 "}, two)
    whole = chat(USER, sent_back, TOOL, {"role": "assistant", "content": "7"}, USER, tools=[1])
    assert history.find(whole) == (two, 4)


@pytest.mark.parametrize(
    "changed",
    [
        chat(USER, of_tool('{"a": 2}'), TOOL, tools=[1]),
        chat(USER | {"content": "p"}, of_tool('{"a": 1}'), TOOL, tools=[1]),
        chat(USER, of_tool('{"a": 1}'), TOOL, tools=[2]),
        chat(USER, TOOL, tools=[1]),
    ],
    ids=["arguments", "question", "tools", "no reply"],
)
def test_a_changed_chat_is_not_found(changed):
    history = ChatHistory()
    history.add(chat(USER, tools=[1]), of_tool('{"a": 1}'), call([1], [2]))
    assert history.find(changed) is None


def test_the_continuation_adds_the_end_of_a_reply_that_lacks_it(chat_tokenizer):
    new = [{"role": "user", "content": "b"}]
    end = chat_tokenizer.encode("<|im_end|>", add_special_tokens=False)
    added = encode_continuation(chat_tokenizer, [USER], new, [50])
    assert (
        chat_tokenizer.decode(added, False)
        == "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encode_continuation(chat_tokenizer, [USER], new, [50, *end]) == added[1:]


def test_a_template_that_hides_a_reply_gives_no_continuation(chat_tokenizer):
    with pytest.raises(ConfigError, match="shows a reply of the assistant 2 times"):
        encode_continuation(chat_tokenizer, [], [{"role": "user", "content": "hpc-rl-reply"}], [1])


def test_many_calls_are_joined_in_order_of_their_beginnings():
    made, calls = [], []
    for turn in range(200):
        calls.append(call([*made, turn], [1000 + turn]))
        made = calls[-1].ids
    (sequence,) = join_calls(reversed(calls))
    assert sequence.calls == calls and all(sequence.trained)
    assert np.array_equal(make_trajectory(sequence, 0.0, 1.0).ids, made)
