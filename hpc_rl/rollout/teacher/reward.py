"""The reward of a teaching: a sum of parts, each of which sees the lesson and the sum of those before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpc_rl.core.errors import ConfigError
from hpc_rl.rollout.rewards import checked, import_object

HALF_LENGTH = 100  # tokens of a teaching that has half of `efficiency`


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One teaching, and how the student answered without and with it."""

    baseline: float  # mean score of the student's answers without a teaching
    taught: float  # and with it
    teaching: str
    num_tokens: int  # of the teaching
    leaks: bool  # it has the answer, which neither the question nor the student's approach has
    has_answer: bool  # without, nothing is scored: both means are 0
    efficiency_weight: float = 1.0
    degradation_penalty_multiplier: float = 2.0


# the lesson, and the sum of the parts before -> what is added
RewardPart = Callable[[Lesson, float], float]


def gain(lesson: Lesson, so_far: float) -> float:
    """How much better the student answers; a loss counts `degradation_penalty_multiplier` times."""
    difference = lesson.taught - lesson.baseline
    return difference if difference >= 0 else lesson.degradation_penalty_multiplier * difference


def solved(lesson: Lesson, so_far: float) -> float:
    """Half of the score where the teaching changes nothing."""
    return 0.5 * lesson.taught if lesson.taught == lesson.baseline else 0.0


def efficiency(lesson: Lesson, so_far: float) -> float:
    """What a positive sum is worth in addition, the more the shorter the teaching is."""
    share = HALF_LENGTH / (HALF_LENGTH + lesson.num_tokens)
    return max(so_far, 0.0) * lesson.efficiency_weight * share


def leak(lesson: Lesson, so_far: float) -> float:
    """Takes a positive sum back where the teaching has the answer."""
    return min(0.0, -so_far) if lesson.leaks else 0.0


PARTS: dict[str, RewardPart] = {"gain": gain, "solved": solved, "efficiency": efficiency, "leak": leak}


def load_parts(paths: Sequence[str]) -> dict[str, RewardPart]:
    """Return the parts by their names in metrics, in order. Raises ConfigError."""
    parts: dict[str, RewardPart] = {}
    for path in paths:
        part = PARTS.get(path) or import_object("teacher.reward_parts", path)
        name = path.rpartition(":")[2]
        if not callable(part):
            raise ConfigError(f"teacher.reward_parts: {path!r} must be a function (lesson, so_far) -> float.")
        if name in parts:
            raise ConfigError(f"teacher.reward_parts: {name!r} is there twice; each is reported by its name.")
        parts[name] = part
    return parts


def values_of(parts: Mapping[str, RewardPart], lesson: Lesson) -> dict[str, float]:
    """Return the value of each part; the reward is their sum. Raises Rejection where one gives no number."""
    values: dict[str, float] = {}
    for name, part in parts.items():
        value = part(lesson, sum(values.values()))
        values[name] = checked(value, f"part {name!r} of teacher.reward_parts")
    return values
