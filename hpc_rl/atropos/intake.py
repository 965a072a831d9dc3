"""Convert a group in the form of Atropos to a group for training, or tell why this is impossible.

Environments send token ids, masks and scores. They rarely send log-probabilities and weight versions: these
come from the gateway's log. Values in neither source stay absent. The trainer then computes such
log-probabilities itself, and the tokens count as made by the current weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_rl.atropos.groups import NO_LOSS
from hpc_rl.core.types import Trajectory, TrajectoryGroup
from hpc_rl.gateway.gateway_log import Behavior
from hpc_rl.rollout.workflow import LARGEST_NUMBER, find_bad_token

# ids [L], mask [L] -> what the gateway knows about the tokens, in new arrays
Lookup = Callable[[np.ndarray, np.ndarray], Behavior]


@dataclass(frozen=True)
class SequenceLimits:
    """Limits of the model: token ids below `vocab_size`, at most `max_tokens` in a sequence."""

    vocab_size: int
    max_tokens: int


# in the protocol, but neither used nor stored
UNSUPPORTED = ("distill_token_ids", "distill_logprobs", "images")
_USED = {
    "": {"tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "messages"}
    | {"generation_params", "overrides", "group_overrides", "env_id"},
    "overrides": {"set_advantage_to_zero", "temperature"},
    "group_overrides": {"group_size", "temperature"},
}


class MalformedRequest(ValueError):
    """The JSON breaks the protocol: fields are missing or have a wrong type. `place` names the field."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"{place}: {message}")
        self.place, self.message = place, message


class GroupRejected(ValueError):
    """A valid group of the protocol that no trainer can use."""


def check_shape(body: Any) -> dict[str, Any]:
    """Return a scored group without its absent fields. Raises MalformedRequest."""
    if not isinstance(body, dict):
        raise MalformedRequest("body", f"a group must be an object, got {type(body).__name__}")
    for name in ("tokens", "masks", "scores"):
        if name not in body:
            raise MalformedRequest(name, "field required")
    _check_lists(body, "tokens", int)
    _check_lists(body, "masks", int)
    _check_numbers(body["scores"], "scores")
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        if body.get(name):
            _check_lists(body, name, float)
    for name in ("generation_params", "group_overrides"):
        if body.get(name) is not None and not isinstance(body[name], dict):
            raise MalformedRequest(name, "must be an object")
    for name in ("overrides", "messages"):
        if body.get(name) is not None and not isinstance(body[name], list):
            raise MalformedRequest(name, "must be a list")
    if not all(isinstance(override, dict) for override in body.get("overrides") or ()):
        raise MalformedRequest("overrides", "must be a list of objects")
    _check_messages(body.get("messages") or ())
    env_id = body.get("env_id")
    if env_id is not None and not _is_int(env_id):
        raise MalformedRequest("env_id", "must be an integer")
    # an empty list or object means the same as null
    return {name: value for name, value in body.items() if value not in (None, [], {})} | {
        name: body[name] for name in ("tokens", "masks", "scores")
    }


def list_unused_fields(body: dict[str, Any]) -> list[str]:
    """Return the names of the fields of a checked group that the trial does not use."""
    parts = [("", body), ("group_overrides", body.get("group_overrides", {}))]
    parts += [("overrides", override) for override in body.get("overrides", ())]
    names = {f"{where}.{key}".lstrip(".") for where, part in parts for key in part.keys() - _USED[where]}
    return sorted(names)


def make_group(
    body: dict[str, Any],
    lookup: Lookup,
    moment: tuple[int, int],
    limits: SequenceLimits,
    temperature: float = 1.0,
) -> TrajectoryGroup:
    """Return the group of a checked body.

    Args:
        body: Result of check_shape.
        lookup: Finds what the gateway knows about the tokens of a sequence.
        moment: Lineage and step of the trainer; unknown tokens count as made by its weights.
        limits: Limits of the model.
        temperature: The trial's; a sequence sampled at another one carries its own.

    Raises:
        GroupRejected: Lengths differ, a sequence breaks the model's limits, a mask holds values other than
            the token and NO_LOSS, numbers are not finite or too large, or no token can be learned from.
    """
    num = len(body["tokens"])
    if not num:
        raise GroupRejected("the group has no sequence")
    for name in ("masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "overrides"):
        if name in body and len(body[name]) != num:
            raise GroupRejected(f"{name} has {len(body[name])} entries, but tokens has {num}")
    return TrajectoryGroup(
        -1, [_make_trajectory(body, i, lookup, moment, limits, temperature) for i in range(num)]
    )


def _make_trajectory(
    body: dict[str, Any],
    i: int,
    lookup: Lookup,
    moment: tuple[int, int],
    limits: SequenceLimits,
    temperature: float,
) -> Trajectory:
    ids = _make_array(body["tokens"][i], f"tokens[{i}]", np.int32)
    if not len(ids):
        raise GroupRejected(f"tokens[{i}] is empty")
    if len(ids) > limits.max_tokens:
        raise GroupRejected(f"tokens[{i}] has {len(ids)} tokens; at most {limits.max_tokens} are allowed")
    if problem := find_bad_token(ids, limits.vocab_size):
        raise GroupRejected(f"tokens[{i}] has {problem}: does the environment use the model's tokenizer?")
    mask = _make_loss_mask(body["masks"][i], i, ids)
    if not mask.any():
        raise GroupRejected(f"masks[{i}] marks no token, so there is nothing to learn from")
    if not abs(body["scores"][i]) <= LARGEST_NUMBER:
        shown = repr(body["scores"][i]) if isinstance(body["scores"][i], float) else "a huge integer"
        raise GroupRejected(f"scores[{i}] is {shown}; allowed: -{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}")
    known = lookup(ids, mask)
    logprobs, has_logprob, lineages, steps = known.logprobs, known.has_logprob, known.lineages, known.steps
    # the servers' finish reason has priority over the environment's
    if "inference_logprobs" in body and not has_logprob[mask].all():
        given = _make_array(body["inference_logprobs"][i], f"inference_logprobs[{i}]", np.float32, len(ids))
        use = mask & ~has_logprob & (given <= 0)
        logprobs, has_logprob = np.where(use, given, logprobs), has_logprob | use
    unknown = mask & (steps < 0)
    lineages[unknown], steps[unknown] = moment
    override = body["overrides"][i] if "overrides" in body else {}
    return Trajectory(
        ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        lineages=lineages,
        steps=steps,
        reward=float(body["scores"][i]),
        finish_reason=known.finish_reason or "stop",
        stats={"unknown_version_tokens": float(unknown.sum())},
        has_logprobs=bool(has_logprob[mask].all()),
        advantages=_get_optional(body, "advantages", i, len(ids)),
        ref_logprobs=_get_optional(body, "ref_logprobs", i, len(ids)),
        zero_advantage=bool(override.get("set_advantage_to_zero")),
        temperatures=_find_temperatures(body, i, mask, known.temperatures, temperature),
    )


def _make_loss_mask(given: Sequence[int], i: int, ids: np.ndarray) -> np.ndarray:
    """Return which tokens are trained on. Raises GroupRejected for entries of another meaning."""
    masks = _make_array(given, f"masks[{i}]", np.int64, len(ids))
    mask = masks != NO_LOSS
    wrong = np.flatnonzero(mask & (masks != ids))
    if len(wrong):
        at = int(wrong[0])
        raise GroupRejected(
            f"masks[{i}] has {masks[at]} at position {at}, where the token is {ids[at]}: an entry must be "
            f"the token id, to train on the token, or {NO_LOSS}; masks of 0 and 1 are not supported"
        )
    return mask


def _find_temperatures(
    body: dict[str, Any], i: int, mask: np.ndarray, known: np.ndarray, default: float
) -> np.ndarray | None:
    """Return the sampling temperature of each token; None if all have the trial's.

    The gateway's knowledge has priority. Then follow the environment's values for the sequence and for the
    group.
    """
    override = body["overrides"][i] if "overrides" in body else {}
    sources = (override, body.get("generation_params", {}), body.get("group_overrides", {}))
    temperature = next(
        (source["temperature"] for source in sources if source.get("temperature") is not None), default
    )
    if not isinstance(temperature, int | float) or not 0 <= temperature <= LARGEST_NUMBER:
        raise GroupRejected(
            f"the temperature of sequence {i} must be a number of at least 0, got {temperature!r:.80}"
        )
    temperatures = np.where(np.isnan(known), np.float32(temperature), known)
    temperatures[~mask] = np.float32(default)
    return None if (temperatures == np.float32(default)).all() else temperatures


def _get_optional(body: dict[str, Any], name: str, i: int, length: int) -> np.ndarray | None:
    return _make_array(body[name][i], f"{name}[{i}]", np.float32, length) if name in body else None


def _make_array(values: Sequence[Any], place: str, dtype: Any, length: int | None = None) -> np.ndarray:
    if length is not None and len(values) != length:
        raise GroupRejected(f"{place} has {len(values)} entries for {length} tokens")
    try:
        with np.errstate(over="ignore"):  # overflowing values become infinite, and are refused below
            array = np.asarray(values, dtype)
    except (OverflowError, ValueError):
        kind = f"numbers of type {np.dtype(dtype).name}"
        raise GroupRejected(
            f"{place} must have only {kind}, but one value is not a number or is too large"
        ) from None
    if dtype == np.float32 and not (np.abs(array) <= LARGEST_NUMBER).all():
        raise GroupRejected(
            f"{place} has a number outside of -{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}, or NaN"
        )
    return array


def _check_lists(body: dict[str, Any], name: str, kind: type) -> None:
    values = body[name]
    if not isinstance(values, list) or not all(isinstance(row, list) for row in values):
        raise MalformedRequest(name, "must be a list of lists")
    for number, row in enumerate(values):
        if kind is float:
            _check_numbers(row, f"{name}[{number}]")
        elif not set(map(type, row)) <= {int}:
            raise MalformedRequest(f"{name}[{number}]", "must be a list of integers")


def _check_numbers(values: Any, place: str) -> None:
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        raise MalformedRequest(place, "must be a list of numbers")


def _check_messages(messages: Sequence[Any]) -> None:
    for number, conversation in enumerate(messages):
        if not isinstance(conversation, list):
            raise MalformedRequest(f"messages[{number}]", "must be a list of messages")
        for at, message in enumerate(conversation):
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise MalformedRequest(f"messages[{number}][{at}]", "must have role and content")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
