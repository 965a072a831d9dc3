"""SGLang's native API for other backends: parses requests and builds answers. No torch."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpc_rl.core.errors import RequestRefused

_KEYS = {"input_ids", "text", "sampling_params", "return_logprob", "rid"}
_KEYS |= {"stream", "logprob_start_len", "top_logprobs_num"}
PAUSE_MODES = ("abort", "retract", "in_place")


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
        raise RequestRefused(f"unknown key {min(unknown)!r}; known are {', '.join(sorted(_KEYS))}")
    whole_prompt = body.get("logprob_start_len") not in (None, -1)
    if body.get("stream") or body.get("top_logprobs_num") or whole_prompt:
        unserved = "stream, top_logprobs_num and logprob_start_len"
        raise RequestRefused(f"{unserved} are not served by {server}")
    inputs, batched = _parse_inputs(body, encode)
    rid, count = body.get("rid"), len(inputs)
    rids = rid if isinstance(rid, list) else [rid or ""] if not batched else [""] * count
    if len(rids) != count or not all(isinstance(one, str) for one in rids):
        raise RequestRefused(f"rid must be a string, or a list of {count} strings")
    given = body.get("sampling_params")
    sampling = given if isinstance(given, list) else [given] * count
    if len(sampling) != count:
        raise RequestRefused(f"{len(sampling)} sampling_params for {count} inputs")
    for one in sampling:
        if one is not None and not isinstance(one, dict):
            raise RequestRefused(f"sampling_params must be an object, got {type(one).__name__}")
    return [NativeRequest(*each) for each in zip(inputs, rids, sampling, strict=True)], batched


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


def make_answer(
    rid: str,
    made: list[int],
    logprobs: list[float] | None,
    finish: dict[str, Any],
    spans: list[tuple[str, int, int]],
    **meta: Any,
) -> dict[str, Any]:
    """Return the answer for one sample. `spans` are (version, start, end) of its tokens."""
    meta |= {"id": rid, "finish_reason": finish, "completion_tokens": len(made)}
    meta["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in spans]
    if spans:
        meta["weight_version"] = spans[-1][0]
    if logprobs is not None:
        pairs = zip(logprobs, made, strict=True)
        meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
        meta["output_token_logprobs_length"] = len(made)
    return {"output_ids": made, "meta_info": meta}


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
