"""Rewards: `reward(prompt, completion, **columns) -> float`, sync or async; built-in, or by import path.

`prompt` is the row's text (or its messages), `completion` the decoded text, `columns` the row's other
columns, but for one that is itself named `completion`. Built-ins run in the executor worker; math_verify and
the user's code run in a process of their own with a time limit (reward_process.py).
"""

import asyncio
import importlib
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.config.text_templates import filled
from hpc_rl.errors import ConfigError
from hpc_rl.log import redact
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.rewards.answers import final_answer

logger = logging.getLogger(__name__)
MAX_ERROR_CHARS = 400


# prompt, completion and columns
Reward = Callable[[Any, str, dict[str, Any]], Awaitable[float]]


class Rejection(Exception):
    """A prompt that gives no group, now or later; `reason` goes into the ledger."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


def from_row(option: str, template: str, columns: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return the text of a template: `known` values, else columns of the row.

    `option` has the template, for the message. Raises Rejection for a column that the row lacks.
    """
    try:
        return filled(template, {**columns, **known})
    except KeyError as error:
        there = ", ".join(sorted(columns)) or "none"
        problem = f"{option} has {{{error.args[0]}}}, and the row has no such column; it has {there}"
        raise Rejection(RejectReason.EXCEPTION, problem) from None


class ErrorLog:
    """Names the exceptions of user code, and logs the traceback of each distinct one once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, error: BaseException) -> str:
        """Return the exception in one line, with the place that raised it; log a new one's traceback."""
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1] if frames else None
        where = f" ({Path(last.filename).name}:{last.lineno} in {last.name})" if last else ""
        kind = type(error).__name__
        if (kind, where) not in self._logged:
            self._logged.add((kind, where))
            logger.warning("first %s%s:\n%s", kind, where, "".join(traceback.format_exception(error)))
        shown = redact(str(error))[:MAX_ERROR_CHARS]
        text = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in shown)
        return f"{kind}: {text}{where}"


def checked(value: Any, what: str = "the reward") -> float:
    """Return a reward, or `what`, as a number. Raises Rejection for what is none: a text, None, nan, inf."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    message = f"{what} is {value!r:.60} ({type(value).__name__}); allowed: a finite number"
    raise Rejection(RejectReason.REWARD_EXCEPTION, message)


def exact_match(prompt: Any, completion: str, answer: Any, **_columns: Any) -> float:
    """1 if the completion, stripped, is the row's `answer`."""
    return float(completion.strip() == str(answer))


def contains(prompt: Any, completion: str, answer: Any, **_columns: Any) -> float:
    """1 if the row's `answer` stands in the completion."""
    return float(str(answer) in completion)


BUILTINS: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "contains": contains,
    "final_answer": final_answer,
}
# built-ins that run as the user's code does
LIMITED = {"math_verify": "hpc_rl.rollout.rewards.algebra:math_verify"}


def import_object(key: str, path: str) -> Any:
    """What `package.module:name` names.

    `key` is the configuration key, for the message. Raises ConfigError.
    """
    module, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"{key}: {path!r} is neither built in nor of the form package.module:name.")
    try:
        return getattr(importlib.import_module(module), name)
    except OSError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        remedy = "The module must be on the PYTHONPATH of the job." if isinstance(error, ImportError) else ""
        raise ConfigError(f"{key}: {path!r} can't be imported: {kind}{error}. {remedy}".rstrip()) from error


def built_in(name: str) -> Reward:
    """Return a built-in reward, run where it is called."""
    function = BUILTINS[name]

    async def reward(prompt: Any, completion: str, columns: dict[str, Any]) -> float:
        try:
            return function(prompt, completion, **columns)
        except TypeError as error:
            message = f"{error}; the row has the columns {sorted(columns)}"
            raise Rejection(RejectReason.REWARD_EXCEPTION, message) from error

    return reward


def weighted(rewards: Sequence[Reward], weights: Sequence[float]) -> Reward:
    """Return the sum of rewards, each multiplied by its weight."""

    async def reward(prompt: Any, completion: str, columns: dict[str, Any]) -> float:
        values = await asyncio.gather(*(one(prompt, completion, columns) for one in rewards))
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    return reward
