"""Requests to the gateway, parsed from each of its four schemas.

These are OpenAI chat and completions, and on /generate SGLang's and vLLM's. Keys unknown to all of them are
ignored, and logged once. Known keys are served, or refused if the gateway does not support them.
"""

import enum
import json
import logging
from dataclasses import dataclass
from typing import Any

from hpc_rl.core.errors import ConfigError, RequestRefused
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.servers import wire
from hpc_rl.servers.chat import SAMPLING

logger = logging.getLogger(__name__)

MAX_SAMPLES = 4096  # of one request
MAX_STOPS = 64
MAX_IGNORED = 1000  # logged keys that are remembered
_MANY = 1 << 62

_NATIVE = {**SAMPLING, "min_tokens": "min_new_tokens", "max_new_tokens": "max_new_tokens"}
_NATIVE |= {"sampling_seed": "sampling_seed", "repetition_penalty": "repetition_penalty"}
_NUMBERS = ("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
# passed on unchanged; a completion with one of these is made in one call, as the server holds its state
_PASSED: dict[str, type] = {
    "json_schema": str, "regex": str, "ebnf": str, "structural_tag": str, "logit_bias": dict,
}  # fmt: skip
_WITH_STATE = {*_NUMBERS[1:], *_PASSED} - {"logit_bias"}
# not supported by the gateway, except for these values
_REFUSED: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "suffix": ("",), "best_of": (1,), "prompt_logprobs": (0, False), "stop_regex": ("", []),
    "logprob_start_len": (-1,), "use_beam_search": (False,), "image_data": ([],), "input_embeds": (),
    "top_logprobs": (0,), "top_logprobs_num": (0,),  # log-probabilities of tokens other than the sampled one
}  # fmt: skip
# served elsewhere in this module, or without effect on the generated tokens
_SERVED = {
    "model", "messages", "prompt", "n", "stop", "stream", "stream_options", "logprobs",
    "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt", "response_format",
    "skip_special_tokens", "no_stop_trim", "include_stop_str_in_output", "return_token_ids", "user",
    "metadata", "store", "text", "input_ids", "sampling_params", "return_logprob",
    "return_text_in_logprobs", "rid", "spaces_between_special_tokens",
    "parallel_tool_calls",
}  # fmt: skip


class Wire(enum.StrEnum):
    """The schema of a request and of its answer."""

    CHAT = "chat.completion"
    COMPLETION = "text_completion"
    SGLANG = "sglang"
    VLLM = "vllm"


DEFAULT_TOKENS = {Wire.SGLANG: 128, Wire.COMPLETION: 16, Wire.VLLM: 16}  # named as in their schemas


class FieldRefused(ValueError):
    """A malformed request: the field, the value, and the allowed values; `code` is OpenAI's, if any."""

    def __init__(self, name: str, rule: str, value: Any = None, code: str | None = None) -> None:
        super().__init__(f"{name} {rule}" + ("" if value is None else f", got {value!r:.80}"))
        self.field, self.code = name, code


@dataclass(frozen=True)
class Bounds:
    """Limits of the served model.

    Args:
        max_new_tokens: Length of a chat's answer, if the request sets none.
        context: Largest number of tokens of prompt and answer together; None if unknown.
        vocab_size: Number of token ids; None if unknown.
        max_n: Largest number of answers to one prompt.
    """

    max_new_tokens: int
    context: int | None = None
    vocab_size: int | None = None
    max_n: int = 1024


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages of a chat and the other variables of the chat template."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]


@dataclass(slots=True)
class PromptOrder:
    """The completions to make for one prompt; `sampling` has SGLang's names, without n and stop.

    `rid` is the client's request id, or "". `chat` are the messages of a chat, as the template gets them, and
    the other variables of the template.
    """

    input_ids: list[int]
    sampling: dict[str, Any]
    n: int
    stops: list[str]
    trims_stop: bool
    skips_special: bool
    rid: str = ""
    chat: "Chat | None" = None

    @property
    def sliced(self) -> bool:
        """Whether a completion may be made in several calls, each continuing the tokens of the last."""
        return not self.sampling.keys() & _WITH_STATE


@dataclass(frozen=True, slots=True)
class Order:
    """One request: if `batched`, the answer is a list, even of one completion."""

    wire: Wire
    prompts: list[PromptOrder]
    model: str
    batched: bool
    stream: bool
    with_usage: bool
    with_logprobs: bool
    with_token_ids: bool
    with_token_text: bool
    with_tools: bool


def is_probe(body: dict[str, Any]) -> bool:
    """Whether this is the check that atroposlib's clients send each second: one token after `hi`."""
    others = {key: value for key, value in body.items() if key != "model"}
    hi = {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}
    return others in [{**said, "max_tokens": 1} for said in hi]


class RequestReader:
    """Makes orders from requests.

    Args:
        tokenizer: For text and chats.
        bounds: Limits of the model.
        ignored: Parameters already logged as ignored, which readers may share.
    """

    def __init__(self, tokenizer: Tokenizer, bounds: Bounds, ignored: set[str] | None = None) -> None:
        self.tokenizer, self.bounds = tokenizer, bounds
        self._ignored = set[str]() if ignored is None else ignored

    def parse(self, wire: Wire, body: dict[str, Any]) -> Order:
        """Return the order in a request's body. Raises FieldRefused."""
        self._check_keys(body)
        chat = _parse_chat(body) if wire is Wire.CHAT else None
        name, prompts, batched = self._parse_prompts(wire, body, chat)
        given: Any = body
        if wire is Wire.SGLANG:
            given = body.get("sampling_params") or {}
        per_prompt = given if isinstance(given, list) else [given] * len(prompts)
        if len(per_prompt) != len(prompts):
            raise FieldRefused(
                "sampling_params",
                f"must have one entry per prompt: {len(per_prompt)} entries, {len(prompts)} prompts",
            )
        orders = [
            self._make_prompt_order(wire, name, ids, one)
            for ids, one in zip(prompts, per_prompt, strict=True)
        ]
        total = sum(order.n for order in orders)
        if total > MAX_SAMPLES:
            raise FieldRefused(
                "n", f"times the number of prompts must be at most {MAX_SAMPLES} in one request", total
            )
        orders[0].chat = chat
        rid = body.get("rid") or []
        for prompt, given_rid in zip(orders, rid if isinstance(rid, list) else [rid], strict=False):
            prompt.rid = str(given_rid)
        options = body.get("stream_options")
        # chat sends true or false; completions send a number, and 0 asks for the sampled tokens'
        # log-probabilities
        asked = body.get("logprobs") is not None and body["logprobs"] is not False
        if asked and wire is not Wire.SGLANG and body["logprobs"] not in (0, 1):
            rule = "must be true, 0 or 1: log-probabilities are of the sampled tokens alone"
            raise FieldRefused("logprobs", rule, body["logprobs"])
        return Order(
            wire,
            orders,
            model=str(body.get("model") or "default"),
            batched=batched,
            stream=_parse_flag(body, "stream") and wire is not Wire.VLLM,
            with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            with_logprobs=_parse_flag(body, "return_logprob") if wire is Wire.SGLANG else asked,
            with_token_ids=_parse_flag(body, "return_token_ids"),
            with_token_text=_parse_flag(body, "return_text_in_logprobs"),
            with_tools=bool(_parse_tools(body)) and wire is Wire.CHAT,
        )

    def _check_keys(self, body: dict[str, Any]) -> None:
        for key, value in body.items():
            if key in _REFUSED and value is not None and value not in _REFUSED[key]:
                raise FieldRefused(key, "is not supported by the gateway; leave it out", value)
            known = key in _SERVED or key in _NATIVE or key in _PASSED or key in _REFUSED
            if not known and key not in self._ignored and len(self._ignored) < MAX_IGNORED:
                self._ignored.add(key)
                logger.warning("the gateway ignores the parameter %.80r of requests (logged only once)", key)

    def _parse_prompts(
        self, wire: Wire, body: dict[str, Any], chat: Chat | None
    ) -> tuple[str, list[list[int]], bool]:
        """Return the name of the field, the token ids of each prompt, and whether the field held a list."""
        if chat is not None:
            return "messages", [self._encode_chat(chat)], False
        name, given = "prompt", body.get("prompt")
        if wire is Wire.SGLANG:
            names = [one for one in ("input_ids", "text") if body.get(one) is not None]
            if len(names) != 1:
                raise FieldRefused("input_ids", "or text must be given, not both")
            name, given = names[0], body[names[0]]
        if isinstance(given, dict):
            given = given.get("prompt_token_ids", given.get("prompt"))
        if not isinstance(given, str | list) or not given:
            raise FieldRefused(name, "must be text or token ids, or a list of these, not empty", given)
        batched = isinstance(given, list) and not isinstance(given[0], int)
        several = given if batched else [given]
        if len(several) > MAX_SAMPLES:
            raise FieldRefused(name, f"must have at most {MAX_SAMPLES} prompts", len(several))
        return name, [self._parse_ids(name, one) for one in several], batched

    def _parse_ids(self, name: str, given: Any) -> list[int]:
        if isinstance(given, str):
            given = self.tokenizer.encode(given)
        if not isinstance(given, list) or set(map(type, given)) != {int}:
            raise FieldRefused(name, "must be text or a list of integers, not empty", given)
        limit = self.bounds.vocab_size or 1 << 31
        if min(given) < 0 or max(given) >= limit:
            raise FieldRefused(name, f"must have token ids from 0 to {limit - 1}")
        return given

    def _encode_chat(self, chat: Chat) -> list[int]:
        """Return the tokens of a chat. Raises FieldRefused."""
        try:
            text = self.tokenizer.chat(chat.messages, **chat.variables)
        except (ConfigError, TypeError) as error:
            raise FieldRefused("messages", f"can't be rendered: {error}") from error
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise FieldRefused("messages", "give an empty prompt with the chat template of the model")
        return ids

    def _make_prompt_order(self, wire: Wire, name: str, ids: list[int], given: Any) -> PromptOrder:
        if not isinstance(given, dict):
            raise FieldRefused("sampling_params", "must be an object", given)
        if wire is Wire.SGLANG:
            self._check_keys(given)
        sampling_parameters = _parse_sampling(given)
        n = sampling_parameters.pop("n", 1)
        if n > self.bounds.max_n:
            raise FieldRefused("n", f"must be at most {self.bounds.max_n}", n)
        wanted = sampling_parameters.get(
            "max_new_tokens", DEFAULT_TOKENS.get(wire, self.bounds.max_new_tokens)
        )
        if self.bounds.context is not None:
            room = self.bounds.context - len(ids)
            if room <= 0:
                rule = f"must have fewer tokens than the context of the model, {self.bounds.context}"
                raise FieldRefused(name, rule, len(ids), code="context_length_exceeded")
            wanted = min(wanted, room)
        sampling_parameters["max_new_tokens"] = wanted
        if "min_new_tokens" in sampling_parameters:
            sampling_parameters["min_new_tokens"] = min(sampling_parameters["min_new_tokens"], wanted)
        if not sampling_parameters.get("ignore_eos"):
            own = sampling_parameters.get("stop_token_ids", ())
            sampling_parameters["stop_token_ids"] = list(dict.fromkeys([*own, *self.tokenizer.eos_token_ids]))
        keeps_stop = _parse_flag(given, "no_stop_trim") or _parse_flag(given, "include_stop_str_in_output")
        skips = given.get("skip_special_tokens") is not False
        return PromptOrder(ids, sampling_parameters, n, _parse_stops(given), not keeps_stop, skips)


def _parse_chat(body: dict[str, Any]) -> Chat:
    """Return the chat in a request's body. Raises FieldRefused."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldRefused("messages", "must be a list of objects, at least one", messages)
    plain = [_flatten(f"messages[{number}]", message) for number, message in enumerate(messages)]
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise FieldRefused("chat_template_kwargs", "must be an object", variables)
    prompted = body.get("add_generation_prompt") is not False
    return Chat(plain, {"add_generation_prompt": prompted, "tools": _parse_tools(body), **variables})


def _parse_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters for a server, in SGLang's names, and n."""
    parameters: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        native = _NATIVE.get(key, key)
        if native == "top_k" and value == 0:  # vLLM's value for all tokens
            value = -1
        if native in _NUMBERS:
            finite = type(value) in (int, float) and abs(value) < wire.MAX_NUMBER
            if not finite:
                raise FieldRefused(key, "must be a finite number", value)
        elif native in wire.KNOWN:
            try:
                wire.parse_sampling({"max_new_tokens": _MANY, native: value})
            except RequestRefused as error:
                raise FieldRefused(key, f"is refused: {error}") from error
        elif native in _PASSED:
            if not isinstance(value, _PASSED[native]):
                raise FieldRefused(key, f"must be of type {_PASSED[native].__name__}", value)
        else:
            continue
        parameters[native] = value
    return {**parameters, **_find_schema(given.get("response_format"))}


def _find_schema(response_format: Any) -> dict[str, str]:
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind in (None, "text"):
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    try:
        if kind == "json_schema":
            return {"json_schema": json.dumps(response_format["json_schema"]["schema"])}
    except (KeyError, TypeError):
        pass
    raise FieldRefused("response_format", "must be of type text, json_object or json_schema")


def _parse_tools(body: dict[str, Any]) -> Any:
    return body.get("tools") if body.get("tool_choice") != "none" else None


def _parse_stops(given: dict[str, Any]) -> list[str]:
    stop = given.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    valid = isinstance(stops, list) and all(isinstance(one, str) for one in stops)
    if not valid or len(stops) > MAX_STOPS:
        raise FieldRefused("stop", f"must be a string or a list of at most {MAX_STOPS} strings", stop)
    return [one for one in stops if one]


def _flatten(name: str, message: Any) -> dict[str, Any]:
    """Return a message with its content as text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise FieldRefused(name, "must be an object with role and content", message)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise FieldRefused(f"{name}.content", "must have parts of type text only")
        content = "".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise FieldRefused(f"{name}.content", "must be text", content)
    plain = {**message, "content": "" if content is None else content}
    if isinstance(calls := message.get("tool_calls"), list):
        plain["tool_calls"] = [_parse_arguments(call) for call in calls]
    return plain


def _parse_arguments(call: Any) -> Any:
    """Return a tool call with its arguments as an object, as chat templates expect it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:  # the model's mistake; the template shows the text
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    if value not in (None, True, False):
        raise FieldRefused(name, "must be true or false", value)
    return bool(value)
