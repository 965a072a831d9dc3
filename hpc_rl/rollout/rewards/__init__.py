"""Rewards: `reward(prompt, completion, **columns) -> float`, sync or async; built-in, or by import path.

`prompt` is the row's text (or its messages), `completion` the decoded text, `columns` the row's other
columns. Built-ins run in the executor worker; the user's code runs in a process of its own with a time limit
(reward_process.py).
"""

import importlib
import logging
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hpc_rl.errors import ConfigError
from hpc_rl.rollout.batch_log.ledger import RejectReason

logger = logging.getLogger(__name__)
MAX_ERROR_CHARS = 400


class RewardFailed(Exception):
    """A call without a reward; `reason` is REWARD_TIMEOUT or REWARD_EXCEPTION. Its prompt is rejected."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message = reason, message


class ErrorLog:
    """Names the exceptions of user code, and logs the traceback of each distinct one once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, error: BaseException) -> str:
        """Return the exception in one line, with the place that raised it; log a new one's traceback."""
        frames = traceback.extract_tb(error.__traceback__)
        where = (
            f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
        )
        kind = type(error).__name__
        if (kind, where) not in self._logged:
            self._logged.add((kind, where))
            logger.warning("first %s%s:\n%s", kind, where, "".join(traceback.format_exception(error)))
        text = "".join(
            sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(error)[:MAX_ERROR_CHARS]
        )
        return f"{kind}: {text}{where}"


def checked(value: Any) -> float:
    """A reward as a number. Raises RewardFailed for what is none: a text, None, nan, inf."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    said = repr(value)
    said = said if len(said) <= 60 else said[:60] + "…"
    raise RewardFailed(
        RejectReason.REWARD_EXCEPTION,
        f"the reward is {said} ({type(value).__name__}); allowed: a finite number",
    )


class Rewarder(Protocol):
    """Where the executor gets its rewards."""

    async def reward(self, prompt: Any, completion: str, columns: dict[str, Any]) -> float:
        """Raises RewardFailed."""

    async def close(self) -> None: ...


def exact_match(prompt: Any, completion: str, answer: Any, **_columns: Any) -> float:
    """1 if the completion, stripped, is the row's `answer`."""
    return float(completion.strip() == str(answer))


def contains(prompt: Any, completion: str, answer: Any, **_columns: Any) -> float:
    """1 if the row's `answer` stands in the completion."""
    return float(str(answer) in completion)


BUILTINS: dict[str, Callable[..., float]] = {"exact_match": exact_match, "contains": contains}


def import_object(key: str, path: str) -> Any:
    """What `package.module:name` names.

    `key` is the configuration key, for the message. Raises ConfigError.
    """
    module, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"{key}: {path!r} is neither built in nor of the form package.module:name.")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        remedy = "The module must be on the PYTHONPATH of the job"
        raise ConfigError(f"{key}: {path!r} can't be imported: {error}. {remedy}.") from error
    except AttributeError as error:
        raise ConfigError(f"{key}: {path!r} can't be imported: {error}.") from error
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {path!r} can't be imported: {type(error).__name__}: {error}.") from error


class Inline:
    """A built-in reward, run where it is called."""

    def __init__(self, function: Callable[..., float]) -> None:
        self._function = function

    async def reward(self, prompt: Any, completion: str, columns: dict[str, Any]) -> float:
        try:
            return self._function(prompt, completion, **columns)
        except TypeError as error:
            raise RewardFailed(
                RejectReason.REWARD_EXCEPTION, f"{error}; the row has the columns {sorted(columns)}"
            ) from error

    async def close(self) -> None:
        pass
