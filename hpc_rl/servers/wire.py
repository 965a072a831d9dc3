"""Requests of SGLang's native API: their schema, their validation, and their answers. No torch.

The trial's own clients get an answer in parts (`Part`), so that its tokens survive the server (channel.py).

Backends other than SGLang parse requests here. A sampling parameter that SGLang has and the embedded engine
lacks is accepted at its neutral value only; any other key is unknown.
"""

import difflib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.core.errors import RequestRefused

_KEYS = {"input_ids", "text", "sampling_params", "return_logprob", "rid"}
_KEYS |= {"stream", "logprob_start_len", "top_logprobs_num"}
LOGPROBS = "/logprobs"  # our own path: log-probabilities of given tokens
PAUSE_MODES = ("abort", "retract", "in_place")
PART_S = 0.5  # between two parts of an answer
Span = tuple[str, int, int]  # version, first token, end


@dataclass(slots=True)
class Part:
    """New tokens of one sample.

    `logprobs` has an entry for each of `ids`, or none. `spans` count from the first of `ids`. `num_made`
    counts all tokens of the sample in this request, also those not sent yet.
    """

    index: int  # of the sample in the request
    ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish: dict[str, Any] | None  # SGLang's finish_reason; None while the sample runs
    num_made: int


SendParts = Callable[[list[Part]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """One input of a request to /generate; `rid` may be empty."""

    ids: list[int]
    rid: str
    sampling: dict[str, Any] | None


def split(
    body: dict[str, Any], server: str, encode: Callable[[str], list[int]]
) -> tuple[list[NativeRequest], bool]:
    """Return the inputs of a request to /generate, and whether it had a list. Raises RequestRefused."""
    unknown = body.keys() - _KEYS
    if unknown:
        raise RequestRefused(
            f"unknown key {min(unknown)!r} in a request; known are {', '.join(sorted(_KEYS))}"
        )
    whole_prompt = body.get("logprob_start_len") not in (None, -1)
    if body.get("stream") or body.get("top_logprobs_num") or whole_prompt:
        unserved = "stream, top_logprobs_num and logprob_start_len"
        raise RequestRefused(f"{server} can't serve {unserved}: remove them")
    inputs, batched = _parse_inputs(body, encode)
    rid, count = body.get("rid"), len(inputs)
    rids = rid if isinstance(rid, list) else [rid or ""] if not batched else [""] * count
    if len(rids) != count or not all(isinstance(one, str) for one in rids):
        raise RequestRefused(f"rid must be a string, or a list of {count} strings")
    given = body.get("sampling_params")
    sampling = given if isinstance(given, list) else [given] * count
    if len(sampling) != count:
        raise RequestRefused(
            f"sampling_params has {len(sampling)} entries for {count} inputs: give one for each"
        )
    for one in sampling:
        if one is not None and not isinstance(one, dict):
            raise RequestRefused(
                f"sampling_params must be an object for each input, got {type(one).__name__}"
            )
    return [NativeRequest(*each) for each in zip(inputs, rids, sampling, strict=True)], batched


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """One input of a request to LOGPROBS: the log-probabilities of `ids[start:]` are wanted.

    `start` is at least 1: the first token follows nothing.
    """

    ids: list[int]
    start: int


def parse_given(body: dict[str, Any]) -> tuple[list[GivenTokens], int]:
    """Return the inputs of a request to LOGPROBS, and the number of likely tokens to report at each position.

    Raises RequestRefused.
    """
    inputs, starts, top_k = body.get("input_ids"), body.get("starts"), body.get("top_k", 0)
    if not isinstance(inputs, list) or not isinstance(starts, list) or len(inputs) != len(starts):
        raise RequestRefused(
            "input_ids must be a list with the token ids of each input, and `starts` a list of as many "
            "integers: the position in each input where its log-probabilities begin"
        )
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
        raise RequestRefused(f"top_k must be an integer of at least 0, got {top_k!r:.80}")
    for ids, start in zip(inputs, starts, strict=True):
        if not isinstance(ids, list) or set(map(type, ids)) != {int} or min(ids) < 0:
            raise RequestRefused("input_ids must be a list of non-empty lists of integers of at least 0")
        if type(start) is not int or not 1 <= start < len(ids):
            raise RequestRefused(
                f"each of `starts` must be at least 1 and below the length of its input, got {start!r:.80}"
            )
    return [GivenTokens(ids, start) for ids, start in zip(inputs, starts, strict=True)], top_k


def make_given_answer(
    logprobs: list[float], top_ids: list[list[int]], top_logprobs: list[list[float]]
) -> dict[str, Any]:
    """Return the answer for one input of LOGPROBS; the lists of likely tokens are empty without `top_k`."""
    return {"logprobs": logprobs, "top_ids": top_ids, "top_logprobs": top_logprobs}


def _parse_inputs(body: dict[str, Any], encode: Callable[[str], list[int]]) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise RequestRefused("give either input_ids or text")
    if text is not None:
        batched = isinstance(text, list)
        texts = text if batched else [text]
        if not texts or not all(isinstance(one, str) for one in texts):
            raise RequestRefused("text must be a string, or a list of strings, not empty")
        return [encode(one) for one in texts], batched
    if not isinstance(ids, list) or not ids:
        raise RequestRefused("input_ids must be a list of integers, or a list of such lists, not empty")
    batched = isinstance(ids[0], list)
    return (ids if batched else [ids]), batched


def cut_spans(spans: Iterable[Span], start: int) -> list[Span]:
    """Return the spans of the tokens from `start` on, counted from there."""
    return [(label, max(0, first - start), end - start) for label, first, end in spans if end > start]


async def split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a stream, of any length; a last line without its end is left out."""
    pieces: list[bytes] = []
    async for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield b"".join((*pieces, line))
            pieces.clear()
        pieces.append(rest)


def make_answer(
    rid: str,
    made: list[int],
    logprobs: Sequence[float] | None,
    finish: dict[str, Any] | None,
    spans: list[Span],
    **meta: Any,
) -> dict[str, Any]:
    """Return the answer for one sample, or a part of it. `finish` is None while the sample is running."""
    meta |= {"id": rid, "finish_reason": finish, "completion_tokens": len(made)}
    meta["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in spans]
    if spans:
        meta["weight_version"] = spans[-1][0]
    if logprobs is not None:
        pairs = zip(logprobs, made, strict=True)
        meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
        meta["output_token_logprobs_length"] = len(made)
    return {"output_ids": made, "meta_info": meta}


def parse_spans(meta: dict[str, Any], num_tokens: int) -> list[Span]:
    """Return the versions of the tokens of a native answer, by its meta_info."""
    if found := meta.get("weight_versions"):
        return [(str(one["version"]), one["start"], one["end"]) for one in found]
    return [(str(meta.get("weight_version", "")), 0, num_tokens)]


def convert_to_parts(answer: Any) -> list[Part]:
    """Return the parts that a native answer, for one sample or several, consists of."""
    parts = []
    for index, one in enumerate(answer if isinstance(answer, list) else [answer]):
        meta, ids = one["meta_info"], one["output_ids"]
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        spans = parse_spans(meta, len(ids))
        parts.append(Part(index, ids, logprobs, spans, meta["finish_reason"], len(ids)))
    return parts


def parse_pause_mode(body: dict[str, Any]) -> str:
    """Return the mode of a pause request. Raises RequestRefused."""
    mode = body.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise RequestRefused(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    return str(mode)


def make_unknown_key_error(key: str, known: Iterable[str], also: Iterable[str] = ()) -> RequestRefused:
    """Return the error for an unknown sampling key. It suggests the nearest of `known` and `also`."""
    near = difflib.get_close_matches(key, [*known, *also], 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
    return RequestRefused(f"unknown sampling key {key!r}{hint}")


def make_refusal(message: str) -> dict[str, Any]:
    """Return the body of an error answer."""
    return {"error": {"message": message}}


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "stop": ([], ""),
    "stop_regex": ([], ""),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "logit_bias": ({},),
    "custom_params": ({},),
}
# these change `text`, which the engine does not return
_TEXT_ONLY = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request.

    `top_k` -1 means all tokens. If `sampling_seed` is None, the server chooses the seed.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: int = 1


def get_sampling_temperature(gconfig: GenerationHyperparameters) -> float:
    """Return the temperature of requests: 0 if greedy."""
    return 0.0 if gconfig.greedy else gconfig.temperature


def get_logprob_temperature(temperature: float) -> float:
    """Return the temperature of log-probabilities for tokens sampled at `temperature`.

    It is the same, except 1 for greedy sampling (0), which has no distribution: servers report
    log-probabilities at 1, and the trainer recomputes them at 1.
    """
    return temperature or 1.0


MAX_NUMBER = 1e6
KNOWN = tuple(f.name for f in fields(SamplingParams))


def parse_sampling(given: dict[str, Any] | None) -> SamplingParams:
    """Parse the sampling parameters of a request.

    Raises RequestRefused with the key, its value and the allowed values.
    """
    if given is not None and not isinstance(given, dict):
        raise RequestRefused(f"sampling_params must be an object, got {type(given).__name__}")
    values: dict[str, Any] = {}
    for key, value in (given or {}).items():
        if key in KNOWN:
            if value is not None:
                values[key] = value
        elif key in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[key]:
                problem = f"the embedded engine can't serve sampling key {key!r} {value!r}"
                raise RequestRefused(f"{problem}; remove it, or use sglang servers")
        elif key not in _TEXT_ONLY:
            raise make_unknown_key_error(key, KNOWN, _NEUTRAL)
    return _check_values(values)


def parse_several(given: list[dict[str, Any] | None]) -> list[SamplingParams]:
    """Parse the sampling parameters of each sample; neighbours that differ by their seed only, once."""
    parsed: list[SamplingParams] = []
    last: dict[str, Any] | None = None
    for one in given:
        rest = {name: value for name, value in (one or {}).items() if name != "sampling_seed"}
        seed = (one or {}).get("sampling_seed")
        if rest == last and seed is not None:
            parsed.append(replace(parsed[-1], sampling_seed=_check_integer("sampling_seed", seed)))
        else:
            parsed.append(parse_sampling(one))
        last = rest
    return parsed


def _check_values(values: dict[str, Any]) -> SamplingParams:
    for key in ("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed"):
        if key in values:
            values[key] = _check_integer(key, values[key])
    for key in ("temperature", "top_p"):
        if key in values:
            value = values[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
                raise RequestRefused(f"sampling key {key!r} must be a finite number, got {value!r}")
    stop = values.get("stop_token_ids", ())
    if not isinstance(stop, list | tuple):
        raise RequestRefused(f"sampling key 'stop_token_ids' must be a list of integers, got {stop!r}")
    values["stop_token_ids"] = tuple(sorted({_check_integer("stop_token_ids", token) for token in stop}))
    params = SamplingParams(**values)
    rules = (
        (params.max_new_tokens >= 0, "max_new_tokens", "at least 0"),
        (0 <= params.min_new_tokens <= params.max_new_tokens, "min_new_tokens", "from 0 to max_new_tokens"),
        (params.temperature >= 0, "temperature", "at least 0"),
        (0 < params.top_p <= 1, "top_p", "above 0 and at most 1"),
        (params.top_k == -1 or params.top_k >= 1, "top_k", "-1 for all, or at least 1"),
        (params.n >= 1, "n", "at least 1"),
        (isinstance(params.ignore_eos, bool), "ignore_eos", "true or false"),
    )
    for holds, key, allowed in rules:
        if not holds:
            raise RequestRefused(f"sampling key {key!r} must be {allowed}, got {getattr(params, key)!r}")
    return params


def _check_integer(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not abs(value) < 1 << 63:
        raise RequestRefused(
            f"sampling key {key!r} must be an integer from -2^63 to 2^63 - 1, got {value!r:.80}"
        )
    return value
