"""Answers of the gateway in the schema of the request: whole, or as the events of a stream."""

import itertools
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from hpc_rl.core.types import Turn
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.gateway.completions import Completion
from hpc_rl.gateway.requests import Order, Wire

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class AnswerWriter:
    """Writes the answer to one order.

    Args:
        order: The client's request.
        tokenizer: For the text of single tokens.
    """

    def __init__(self, order: Order, tokenizer: Tokenizer) -> None:
        self.order = order
        self._tokenizer = tokenizer
        self._id = f"{'chatcmpl' if order.wire is Wire.CHAT else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        # of each completion: characters, tokens, whether it is complete
        self._sent: dict[int, tuple[int, int, bool]] = {}

    def make_whole(self, completions: Sequence[Completion]) -> Any:
        """Return the answer once all completions are done."""
        order = self.order
        if order.wire is Wire.SGLANG:
            answers = [self._make_native(completion, completion.text) for completion in completions]
            return answers if order.batched or len(answers) > 1 else answers[0]
        if order.wire is Wire.VLLM:
            return _vllm(
                [completion.turn for completion in completions],
                [completion.text for completion in completions],
            )
        choices = [self._make_choice(completion, completion.text, 0) for completion in completions]
        versions = [_list_spans(completion) for completion in completions]
        newest = [spans[-1]["version"] for spans in versions if spans]
        metadata = {"weight_version": newest[-1] if newest else "", "weight_versions": versions[-1]}
        return {
            **self._make_head(),
            "choices": choices,
            "usage": _count_usage(completions),
            "metadata": metadata,
        }

    def begin(self, completions: Sequence[Completion]) -> Iterator[Any]:
        """Yield the events that open a stream."""
        if self.order.wire is Wire.CHAT:
            for completion in completions:
                opening = {"index": completion.index, "delta": {"role": "assistant", "content": ""}}
                yield self._make_chunk([{**opening, "logprobs": None, "finish_reason": None}])

    def make_next(self, one: Completion) -> Iterator[Any]:
        """Yield the event for the new tokens of a completion."""
        text = one.find_stable_text()
        before = self._sent.get(one.index, (0, 0, False))
        now = (len(text), len(one.turn.output_ids), one.done)
        # a tool call is recognized only when it is complete
        if now == before or (self.order.with_tools and not one.done):
            return
        self._sent[one.index], (chars, tokens, _) = now, before
        if self.order.wire is Wire.SGLANG:
            yield {**self._make_native(one, text), "index": one.index}
        else:
            yield self._make_chunk([self._make_choice(one, text[chars:], tokens)])

    def end(self, completions: Sequence[Completion]) -> Iterator[Any]:
        """Yield the events that close a stream, except `[DONE]`."""
        if self.order.with_usage:
            yield {**self._make_chunk([]), "usage": _count_usage(completions)}

    def _make_head(self) -> dict[str, Any]:
        kind, model = str(self.order.wire), self.order.model
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def _make_chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._make_head(), "choices": choices}
        return {**chunk, "object": f"{self.order.wire}.chunk"} if self.order.wire is Wire.CHAT else chunk

    def _make_choice(self, one: Completion, text: str, start: int) -> dict[str, Any]:
        """Return the choice, or only its tokens from `start` on."""
        order, finish, end = self.order, one.turn.finish_reason or None, len(one.turn.output_ids)
        choice: dict[str, Any] = {"index": one.index, "text": text}
        if order.wire is Wire.CHAT:
            calls, content = find_tool_calls(text) if order.with_tools else ([], text)
            finish = "tool_calls" if calls and finish == "stop" else finish
            message: dict[str, Any] = {"role": "assistant", "content": content}
            message |= {"tool_calls": calls} if calls else {}
            choice = {"index": one.index, "delta" if order.stream else "message": message}
        choice["logprobs"] = self._make_logprobs(one, start, end) if order.with_logprobs else None
        choice |= {"finish_reason": finish, "matched_stop": one.matched}
        if order.with_token_ids:
            choice |= {
                "token_ids": one.turn.output_ids[start:],
                "prompt_token_ids": [] if start else one.order.input_ids,
            }
        return choice

    def _make_logprobs(self, one: Completion, start: int, end: int) -> dict[str, Any]:
        ids, values = one.turn.output_ids[start:end], one.turn.output_logprobs[start:end]
        texts = [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        if self.order.wire is Wire.CHAT:
            entries = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ]
            return {"content": entries, "refusal": None}
        offsets = list(itertools.accumulate(map(len, texts[:-1]), initial=0))[: len(texts)]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}

    def _make_native(self, one: Completion, text: str) -> dict[str, Any]:
        """Return SGLang's answer, which is cumulative within a stream."""
        turn, order = one.turn, self.order
        length = len(turn.output_ids)
        ends: dict[str, dict[str, Any]] = {"stop": {"matched": one.matched}, "length": {"length": length}}
        kind = turn.finish_reason
        finish = {"type": kind, **ends[kind]} if kind else None
        spans = _list_spans(one)
        meta: dict[str, Any] = {
            "id": one.order.rid if one.order.rid and one.order.n == 1 else one.rid,
            "finish_reason": finish,
            "prompt_tokens": len(one.order.input_ids),
            "completion_tokens": len(turn.output_ids),
            "cached_tokens": 0,
            "weight_version": spans[-1]["version"] if spans else "",
            "weight_versions": spans,
        }
        if order.with_logprobs:
            texts: Sequence[str | None] = [None] * len(turn.output_ids)
            if order.with_token_text:
                texts = [self._tokenizer.decode([token], False) for token in turn.output_ids]
            entries = zip(turn.output_logprobs, turn.output_ids, texts, strict=True)
            meta |= {
                "input_token_logprobs": [],
                "output_token_logprobs": list(entries),
                "output_token_logprobs_length": len(turn.output_ids),
            }
        return {"text": text, "output_ids": turn.output_ids, "meta_info": meta}


def _vllm(turns: Sequence[Turn], texts: Sequence[str]) -> dict[str, Any]:
    """Return the answer in the form of atroposlib's server for vLLM."""
    pairs = [zip(turn.output_ids, turn.output_logprobs, strict=True) for turn in turns]
    return {
        "text": texts,
        "token_ids": [turn.output_ids for turn in turns],
        "logprobs": [[[{str(token): value}] for token, value in made] for made in pairs],
        "finish_reasons": [turn.finish_reason for turn in turns],
    }


def make_probe_answer(wire: Wire, model: str) -> dict[str, Any]:
    """Return the answer to a health probe; no server takes part in it."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": ""}} if wire is Wire.CHAT else {"text": ""}
    usage = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
    head = {"id": f"probe-{uuid.uuid4().hex}", "object": str(wire), "created": int(time.time())}
    return {**head, "model": model, "choices": [choice], "usage": usage}


def make_error(message: str, kind: str, name: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": name, "code": code}}


def format_event(content: Any) -> bytes:
    """Return one event of a stream."""
    text = content if isinstance(content, str) else json.dumps(content)
    return f"data: {text}\n\n".encode()


def _list_spans(one: Completion) -> list[dict[str, Any]]:
    return [{"version": label, "start": start, "end": end} for label, start, end in one.turn.versions]


def _count_usage(completions: Sequence[Completion]) -> dict[str, int]:
    prompts = {id(completion.order): len(completion.order.input_ids) for completion in completions}
    prompt, made = sum(prompts.values()), sum(len(completion.turn.output_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def find_tool_calls(text: str) -> tuple[list[dict[str, Any]], str | None]:
    """Return the calls in a text in the format of Hermes and Qwen, and the text before them."""
    calls: list[dict[str, Any]] = []
    for match in _TOOL_CALL.finditer(text):
        try:
            call = json.loads(match[1])
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError):
            return [], text
        calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
        calls[-1]["index"] = len(calls) - 1  # of the call in a stream
    return calls, text[: text.index("<tool_call>")].strip() or None if calls else text
