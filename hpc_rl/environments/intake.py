"""From a group in the form of Atropos to a group that can be trained on, or the reason why it can't.

Environments send token ids, masks and scores; the log-probabilities and weight versions of the tokens, which
they rarely send, are those that the gateway logged. What neither has stays absent: the trainer computes such
log-probabilities itself, and the tokens count as made by the weights of the moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_rl.environments.groups import NO_LOSS
from hpc_rl.types import Trajectory, TrajectoryGroup

LARGEST_NUMBER = 1e6  # of scores, advantages and log-probabilities: their squares fit into float32

# ids [L], mask [L] -> (logprobs, has_logprob, lineages, steps), each [L] and new; where mask is false or
# nothing is known, logprobs are 0, lineages and steps -1
Lookup = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class SequenceLimits:
    """What the model can take: token ids below `vocab_size`, `max_tokens` of them in a sequence."""

    vocab_size: int
    max_tokens: int


class MalformedRequest(ValueError):
    """The JSON is not of the protocol: fields are missing or of a wrong type. `place` names the field."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"{place}: {message}")
        self.place, self.message = place, message


class GroupRejected(ValueError):
    """A group of the protocol that no trainer could use."""


def check_shape(body: Any) -> dict[str, Any]:
    """Return a scored group with its absent fields left out. Raises MalformedRequest."""
    if not isinstance(body, dict):
        raise MalformedRequest("body", f"a group is an object, got {type(body).__name__}")
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
    if not all(isinstance(one, dict) for one in body.get("overrides") or ()):
        raise MalformedRequest("overrides", "must be a list of objects")
    _check_messages(body.get("messages") or ())
    env_id = body.get("env_id")
    if env_id is not None and not _is_int(env_id):
        raise MalformedRequest("env_id", "must be an integer")
    # an empty list or object says the same as null
    return {name: value for name, value in body.items() if value not in (None, [], {})} | {
        name: body[name] for name in ("tokens", "masks", "scores")
    }


def to_group(
    body: dict[str, Any], lookup: Lookup, moment: tuple[int, int], limits: SequenceLimits
) -> TrajectoryGroup:
    """Return the group of a checked body.

    Args:
        body: What check_shape returned.
        lookup: What the gateway knows of the tokens of a sequence.
        moment: Lineage and step of the trainer; unknown tokens count as made by its weights.
        limits: Of the model.

    Raises:
        GroupRejected: Lengths differ, the model can't take a sequence, numbers are not finite or too large,
            there is no token to learn from.
    """
    num = len(body["tokens"])
    if not num:
        raise GroupRejected("the group has no sequence")
    for name in ("masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "overrides"):
        if name in body and len(body[name]) != num:
            raise GroupRejected(f"{name} has {len(body[name])} entries, tokens has {num}")
    return TrajectoryGroup(-1, [_trajectory(body, i, lookup, moment, limits) for i in range(num)])


def _trajectory(
    body: dict[str, Any], i: int, lookup: Lookup, moment: tuple[int, int], limits: SequenceLimits
) -> Trajectory:
    ids = _array(body["tokens"][i], f"tokens[{i}]", np.int32)
    if not len(ids):
        raise GroupRejected(f"tokens[{i}] is empty")
    if len(ids) > limits.max_tokens:
        raise GroupRejected(f"tokens[{i}] has {len(ids)} tokens; at most {limits.max_tokens} are allowed")
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise GroupRejected(
            f"tokens[{i}] has token id {wrong}; the model has 0 to {limits.vocab_size - 1}: "
            "does the environment use the model's tokenizer?"
        )
    mask = _array(body["masks"][i], f"masks[{i}]", np.int64, len(ids)) != NO_LOSS
    if not mask.any():
        raise GroupRejected(f"masks[{i}] marks no token, so there is nothing to learn from")
    if not abs(body["scores"][i]) <= LARGEST_NUMBER:
        shown = repr(body["scores"][i]) if isinstance(body["scores"][i], float) else "a huge integer"
        raise GroupRejected(f"scores[{i}] is {shown}; allowed: -{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}")
    logprobs, has_logprob, lineages, steps = lookup(ids, mask)
    # what the servers said stands before what the environment says of it
    if "inference_logprobs" in body and not has_logprob[mask].all():
        given = _array(body["inference_logprobs"][i], f"inference_logprobs[{i}]", np.float32, len(ids))
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
        finish_reason="stop",
        stats={"unknown_version_tokens": float(unknown.sum())},
        has_logprobs=bool(has_logprob[mask].all()),
        advantages=_optional(body, "advantages", i, len(ids)),
        ref_logprobs=_optional(body, "ref_logprobs", i, len(ids)),
        zero_advantage=bool(override.get("set_advantage_to_zero")),
    )


def _optional(body: dict[str, Any], name: str, i: int, length: int) -> np.ndarray | None:
    return _array(body[name][i], f"{name}[{i}]", np.float32, length) if name in body else None


def _array(values: Sequence[Any], place: str, dtype: Any, length: int | None = None) -> np.ndarray:
    if length is not None and len(values) != length:
        raise GroupRejected(f"{place} has {len(values)} entries for {length} tokens")
    try:
        with np.errstate(over="ignore"):  # what overflows becomes infinite, and is found below
            made = np.asarray(values, dtype)
    except (OverflowError, ValueError):
        raise GroupRejected(f"{place} has a number that is out of range") from None
    if dtype == np.float32 and not (np.abs(made) <= LARGEST_NUMBER).all():
        raise GroupRejected(f"{place} has a number that is not finite, or above {LARGEST_NUMBER:g}")
    return made


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
