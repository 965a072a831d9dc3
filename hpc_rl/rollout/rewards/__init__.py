"""Rewards: `reward(prompt, completion, **columns)`, sync or async; built-in, or by import path.

`prompt` is the row's text (or its messages), `completion` the decoded text, `columns` the row's other
columns, except one named `completion`. A reward returns a number, or a dict with the number as `reward` and
its parts, which are logged. With a true attribute `batched`, it is called once per prompt with the list of
completions, and returns a list. Built-ins run in the executor worker; math_verify, code_tests and the user's
code run in a separate process with a time limit (reward_process.py).
"""

import asyncio
import importlib
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.text_templates import fill_template
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.rewards.answers import final_answer
from hpc_rl.rollout.rewards.tasks import countdown, no_reward, thinks_then_answers
from hpc_rl.rollout.user_errors import find_user_frame

_PART = re.compile(r"[\w.@/-]{1,100}")


class Score(float):
    """A reward with its parts, which are logged as `reward/<part>`.

    Sums, differences and multiples keep the parts: a workflow adds the rewards of its turns.
    """

    parts: Mapping[str, float] = {}

    @classmethod
    def of(cls, value: float, parts: Mapping[str, float]) -> "Score":
        score = cls(value)
        score.parts = dict(parts)
        return score

    def __add__(self, other: float) -> "Score":
        parts = defaultdict(float, self.parts)
        for name, value in get_parts(other).items():
            parts[name] += value
        return Score.of(float(self) + float(other), parts)

    __radd__ = __add__

    def __neg__(self) -> "Score":
        return self * -1.0

    def __sub__(self, other: float) -> "Score":
        return self + -other

    def __rsub__(self, other: float) -> "Score":
        return -self + other

    def __mul__(self, factor: float) -> "Score":
        factor = float(factor)
        return Score.of(float(self) * factor, {name: factor * value for name, value in self.parts.items()})

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "Score":
        divisor = float(divisor)
        return Score.of(float(self) / divisor, {name: value / divisor for name, value in self.parts.items()})


def get_parts(reward: float) -> Mapping[str, float]:
    """Return the parts of a reward; {} for a number."""
    return reward.parts if isinstance(reward, Score) else {}


# prompt, completion and columns
Reward = Callable[[Any, str, dict[str, Any]], Awaitable[float]]
# prompt, its completions and columns
BatchReward = Callable[[Any, list[str], dict[str, Any]], Awaitable[list[float]]]


class Rejection(Exception):
    """A prompt that gives no group, now or later; `reason` goes into the ledger.

    `place` and `trace` belong to the user code's exception behind it, if any, as in Raised.
    """

    def __init__(self, reason: RejectReason, message: str, place: str = "", trace: str = "") -> None:
        super().__init__(f"{reason}: {message}")
        self.reason, self.message, self.place, self.trace = reason, message, place, trace


def fill_from_row(option: str, template: str, columns: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return a filled template: `known` values, else columns of the row.

    `option` contains the template, for the message. Raises Rejection for a column that the row lacks.
    """
    try:
        return fill_template(template, {**columns, **known})
    except KeyError as error:
        there = ", ".join(sorted(columns)) or "none"
        problem = f"{option}: the row lacks the column {{{error.args[0]}}}; it has {there}"
        raise Rejection(RejectReason.EXCEPTION, problem) from None


def check_number(value: Any, what: str = "the reward") -> float:
    """Return a reward, or the value named `what`, as a finite number. Raises Rejection for other values."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    message = f"{what} is {value!r:.60} ({type(value).__name__}); allowed: a finite number"
    raise Rejection(RejectReason.REWARD_EXCEPTION, message)


def parse_score(value: Any) -> Score:
    """Return the result of a reward function: a number, or a dict of `reward` and numbers by name.

    Raises Rejection for anything else.
    """
    if not isinstance(value, Mapping):
        return Score(check_number(value))
    if "reward" not in value:
        there = ", ".join(map(str, value)) or "nothing"
        message = f"the reward is a dict with {there}; it needs the entry 'reward', a number"
        raise Rejection(RejectReason.REWARD_EXCEPTION, message)
    if odd := [name for name in value if not _PART.fullmatch(str(name))]:
        message = f"the reward has a part {odd[0]!r:.40}; allowed: names of letters, digits and _ . @ / -"
        raise Rejection(RejectReason.REWARD_EXCEPTION, message)
    parts = {
        str(name): check_number(part, f"part {name!r} of the reward")
        for name, part in value.items()
        if name != "reward"
    }
    return Score.of(check_number(value["reward"]), parts)


def score_each(reward: Reward) -> BatchReward:
    """Return a batch reward that scores the completions of a prompt one by one, concurrently."""

    async def rewards(prompt: Any, completions: list[str], columns: dict[str, Any]) -> list[float]:
        return list(
            await asyncio.gather(*(reward(prompt, completion, columns) for completion in completions))
        )

    return rewards


def weight_rewards(rewards: Mapping[str, tuple[BatchReward, float]]) -> BatchReward:
    """Return the weighted sum of rewards by name; each reward is a part of the sum under its name."""

    async def total(prompt: Any, completions: list[str], columns: dict[str, Any]) -> list[float]:
        calls = (reward(prompt, completions, columns) for reward, _ in rewards.values())
        scores = dict(zip(rewards, await asyncio.gather(*calls), strict=True))
        return [_sum({name: values[i] for name, values in scores.items()}) for i in range(len(completions))]

    def _sum(values: Mapping[str, float]) -> Score:
        parts = {name: float(value) for name, value in values.items()}
        for name, value in values.items():
            parts |= {f"{name}/{part}": one for part, one in get_parts(value).items()}
        return Score.of(sum(rewards[name][1] * value for name, value in values.items()), parts)

    return total


def exact_match(prompt: Any, completion: str, answer: Any, **_columns: Any) -> float:
    """1 if the completion, stripped, is the row's `answer`."""
    return float(completion.strip() == str(answer))


def contains(prompt: Any, completion: str, answer: Any, **_columns: Any) -> float:
    """1 if the completion contains the row's `answer`."""
    return float(str(answer) in completion)


BUILTINS: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "contains": contains,
    "final_answer": final_answer,
    "format": thinks_then_answers,
    "countdown": countdown,
    "none": no_reward,
}
# built-ins that run like the user's code
LIMITED = {
    "math_verify": "hpc_rl.rollout.rewards.algebra:math_verify",
    "code_tests": "hpc_rl.rollout.rewards.tasks:make_code_tests",
}


def import_object(key: str, path: str) -> Any:
    """Return the object `package.module:name`.

    `key` is the configuration key, for the message. Raises ConfigError.
    """
    module, _, name = path.partition(":")
    if not name:
        why = "is neither built in nor of the form package.module:name"
        raise ConfigError(Refusal(option=key, value=repr(path), kind=Kind.VALUE, why=why))
    try:
        return getattr(importlib.import_module(module), name)
    except OSError:
        raise
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        where = f" ({place})" if (place := find_user_frame(error)) else ""
        remedy = _describe_search(module) if isinstance(error, ImportError) else ""
        if module in sys.modules:  # the module was imported, and lacks the name
            remedy = suggest_name(name, vars(sys.modules[module]))
        why = f"can't be imported: {kind}{error}{where}. {remedy}".rstrip(". ")
        raise ConfigError(Refusal(option=key, value=repr(path), kind=Kind.FILE, why=why)) from error


def _describe_search(module: str) -> str:
    """Return the folders searched for a module, with the name that it may misspell."""
    first = module.partition(".")[0]
    own = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    folders = [path for path in dict.fromkeys(own) if path and os.path.isdir(path)]
    names = [
        name.removesuffix(".py")
        for folder in folders
        for name in os.listdir(folder)
        if name.endswith(".py") or os.path.isdir(os.path.join(folder, name))
    ]
    hint = "" if first in names else suggest_name(first, names)
    searched = f"Modules of yours are searched for in {', '.join(folders)}; PYTHONPATH adds others."
    return f"{hint} {searched}".strip()


def make_built_in(name: str) -> Reward:
    """Return a built-in reward, which runs in the calling process."""
    function = BUILTINS[name]

    async def reward(prompt: Any, completion: str, columns: dict[str, Any]) -> float:
        try:
            return function(prompt, completion, **columns)
        except TypeError as error:
            message = f"{error}; the row has the columns {sorted(columns)}"
            raise Rejection(RejectReason.REWARD_EXCEPTION, message) from error

    return reward
