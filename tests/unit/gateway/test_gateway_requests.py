"""Requests in the four schemas: what becomes of each key, and what is refused with the name of its field."""

import logging

import pytest

from hpc_rl.gateway.requests import Bounds, FieldRefused, RequestReader, Wire, is_probe

CHAT = {"messages": [{"role": "user", "content": "1+2"}]}
PROMPT = [4, 13, 5]
BOUNDS = Bounds(max_new_tokens=20, context=64, vocab_size=16, max_n=8)


@pytest.fixture
def reader(tokenizer):
    return RequestReader(tokenizer, BOUNDS)


def test_the_four_schemas_ask_for_the_same(reader, tokenizer):
    ids = tokenizer.encode("1+2=")
    said = {"n": 2, "temperature": 0.7, "stop": [";"], "seed": 5, "max_tokens": 9}
    native = {"n": 2, "temperature": 0.7, "stop": ";", "sampling_seed": 5, "max_new_tokens": 9}
    orders = [
        reader.parse(Wire.CHAT, {**CHAT, **said, "stream": True, "logprobs": True}),
        reader.parse(Wire.COMPLETION, {"prompt": ids, **said, "logprobs": 0}),
        reader.parse(Wire.SGLANG, {"input_ids": ids, "sampling_params": native, "return_logprob": True}),
        reader.parse(Wire.VLLM, {"prompt": {"prompt_token_ids": ids}, **said, "logprobs": 0}),
    ]
    for order in orders:
        (prompt,) = order.prompts
        assert prompt.input_ids == ids and prompt.n == 2 and prompt.stops == [";"]
        wanted = {"temperature": 0.7, "sampling_seed": 5, "max_new_tokens": 9, "stop_token_ids": [1]}
        assert prompt.sampling == wanted
        assert order.with_logprobs
    assert orders[0].stream and not orders[1].stream


@pytest.mark.parametrize(
    ("wire", "body", "tokens"),
    [
        (Wire.CHAT, CHAT, 20),
        (Wire.COMPLETION, {"prompt": PROMPT}, 16),
        (Wire.SGLANG, {"input_ids": [4] * 10}, 54),
        (Wire.CHAT, {**CHAT, "max_completion_tokens": 1000}, 60),
        (Wire.SGLANG, {"input_ids": PROMPT, "sampling_params": {"max_completion_tokens": 7}}, 7),
    ],
)
def test_length_is_the_schemas_default_and_fits_the_context(reader, wire, body, tokens):
    assert reader.parse(wire, body).prompts[0].sampling["max_new_tokens"] == tokens


def test_several_prompts_with_parameters_of_their_own(reader):
    body = {
        "input_ids": [PROMPT, [5]],
        "sampling_params": [{"max_new_tokens": 3}, {"n": 2}],
        "rid": ["a", "b"],
    }
    order = reader.parse(Wire.SGLANG, body)
    assert [p.sampling["max_new_tokens"] for p in order.prompts] == [3, 63]
    assert [p.n for p in order.prompts] == [1, 2] and order.batched
    assert [p.rid for p in order.prompts] == ["a", "b"]
    texts = reader.parse(Wire.COMPLETION, {"prompt": ["1+2=", "3"]})
    assert [len(p.input_ids) for p in texts.prompts] == [4, 1]


def test_unknown_keys_are_ignored_and_logged_once(reader, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            body = {**CHAT, "reasoning": {"effort": "low"}, "verbosity": "low", "user": "me"}
            assert reader.parse(Wire.CHAT, body).prompts
        reader.parse(Wire.SGLANG, {"input_ids": PROMPT, "sampling_params": {"verbosity": 1, "thinking": 2}})
    assert [record.args[0] for record in caplog.records] == ["reasoning", "verbosity", "thinking"]


@pytest.mark.parametrize(
    ("wire", "body", "field"),
    [
        (Wire.CHAT, {}, "messages"),
        (Wire.CHAT, {"messages": ["hi"]}, "messages[0]"),
        (Wire.CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (Wire.CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (Wire.CHAT, {**CHAT, "temperature": "warm"}, "temperature"),
        (Wire.CHAT, {**CHAT, "max_tokens": -1}, "max_tokens"),
        (Wire.CHAT, {**CHAT, "n": 0}, "n"),
        (Wire.CHAT, {**CHAT, "n": 9}, "n"),
        (Wire.CHAT, {**CHAT, "min_p": float("nan")}, "min_p"),
        (Wire.CHAT, {**CHAT, "stop": 5}, "stop"),
        (Wire.CHAT, {**CHAT, "stream": "yes"}, "stream"),
        (Wire.CHAT, {**CHAT, "response_format": {"type": "xml"}}, "response_format"),
        (Wire.CHAT, {"messages": [{"role": "user", "content": "1" * 80}]}, "messages"),
        (Wire.CHAT, {**CHAT, "logprobs": True, "top_logprobs": 5}, "top_logprobs"),
        (Wire.COMPLETION, {"prompt": PROMPT, "logprobs": 5}, "logprobs"),
        (Wire.SGLANG, {"input_ids": PROMPT, "top_logprobs_num": 2}, "top_logprobs_num"),
        (Wire.VLLM, {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 3}, "logprobs"),
        (Wire.COMPLETION, {"prompt": []}, "prompt"),
        (Wire.COMPLETION, {"prompt": PROMPT, "echo": True}, "echo"),
        (Wire.COMPLETION, {"prompt": [4, 16]}, "prompt"),
        (Wire.COMPLETION, {"prompt": [4, 1.5]}, "prompt"),
        (Wire.SGLANG, {}, "input_ids"),
        (Wire.SGLANG, {"input_ids": PROMPT, "text": "1"}, "input_ids"),
        (Wire.SGLANG, {"input_ids": PROMPT, "logprob_start_len": 0}, "logprob_start_len"),
        (Wire.SGLANG, {"input_ids": PROMPT, "sampling_params": 3}, "sampling_params"),
        (Wire.SGLANG, {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": "9"}}, "max_new_tokens"),
        (Wire.SGLANG, {"input_ids": [PROMPT] * 700, "sampling_params": {"n": 8}}, "n"),
        (Wire.VLLM, {"prompt": {"prompt_token_ids": PROMPT}, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_a_malformed_request_is_refused_by_its_field(reader, wire, body, field):
    with pytest.raises(FieldRefused, match=field.partition("[")[0]) as caught:
        reader.parse(wire, body)
    assert caught.value.field == field


def test_log_probabilities_of_the_sampled_tokens_are_served(reader):
    for wire, body in (
        (Wire.CHAT, {**CHAT, "logprobs": True, "top_logprobs": 0}),
        (Wire.COMPLETION, {"prompt": PROMPT, "logprobs": 0}),
        (Wire.COMPLETION, {"prompt": PROMPT, "logprobs": 1}),
        (Wire.SGLANG, {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 0}),
    ):
        assert reader.parse(wire, body).with_logprobs


def test_chat_parts_tools_and_template_variables(reader, tokenizer):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2"}]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "chat_template_kwargs": {"add_generation_prompt": False},
    }
    assert reader.parse(Wire.CHAT, body).prompts[0].input_ids == tokenizer.encode("1+2")
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert reader.parse(Wire.CHAT, {**CHAT, "tools": tools}).with_tools
    assert not reader.parse(Wire.CHAT, {**CHAT, "tools": tools, "tool_choice": "none"}).with_tools


def test_json_schemas_go_to_the_server_and_make_one_slice(reader):
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    (prompt,) = reader.parse(Wire.CHAT, {**CHAT, "response_format": form}).prompts
    assert prompt.sampling["json_schema"] == '{"type": "array"}' and not prompt.sliced


def test_health_probes_of_atroposlib():
    assert is_probe({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    assert is_probe({"model": "m", "prompt": "hi", "max_tokens": 1})
    assert not is_probe({"model": "m", "prompt": "hi", "max_tokens": 2})
    assert not is_probe({"model": "m", "prompt": "hi", "max_tokens": 1, "logprobs": 0})
