"""Sampling parameters of the embedded engine, with SGLang's names. No torch.

Keys of SGLang that this engine does not support are accepted only with their neutral value. Other keys are
unknown.
"""

from dataclasses import dataclass, fields
from typing import Any

from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.core.errors import RequestRefused
from hpc_rl.servers.native_api import make_unknown_key_error

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
                problem = f"the embedded engine does not serve it, got {value!r}; use sglang"
                raise RequestRefused(f"sampling key {key!r}: {problem}")
        elif key not in _TEXT_ONLY:
            raise make_unknown_key_error(key, KNOWN, _NEUTRAL)
    return _check_values(values)


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
        raise RequestRefused(f"sampling key {key!r} must be an integer of 64 bits, got {value!r:.80}")
    return value
