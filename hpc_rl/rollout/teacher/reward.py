"""The reward of a teaching: a sum of parts; each part gets the lesson and the sum of the earlier parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.rollout.rewards import check_number, import_object

HALF_LENGTH = 100  # tokens of a teaching that has half of `efficiency`


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One teaching, and how the student answered without and with it."""

    baseline: float  # mean score of the student's answers without a teaching
    taught: float  # the same, with the teaching
    teaching: str
    num_tokens: int  # of the teaching
    leaks: bool  # the teaching has the answer, but neither the question nor the student's approach has it
    has_answer: bool  # if false, nothing is scored: both means are 0
    efficiency_weight: float = 1.0
    degradation_penalty_multiplier: float = 2.0


# the lesson, and the sum of the earlier parts -> the value to add
RewardPart = Callable[[Lesson, float], float]


def gain(lesson: Lesson, so_far: float) -> float:
    """The improvement of the student's score; a loss counts `degradation_penalty_multiplier` times."""
    difference = lesson.taught - lesson.baseline
    return difference if difference >= 0 else lesson.degradation_penalty_multiplier * difference


def reward_solution(lesson: Lesson, so_far: float) -> float:
    """Half of the score if the teaching changes nothing."""
    return 0.5 * lesson.taught if lesson.taught == lesson.baseline else 0.0


def efficiency(lesson: Lesson, so_far: float) -> float:
    """A bonus on a positive sum, larger for a shorter teaching."""
    share = HALF_LENGTH / (HALF_LENGTH + lesson.num_tokens)
    return max(so_far, 0.0) * lesson.efficiency_weight * share


def leak(lesson: Lesson, so_far: float) -> float:
    """Cancels a positive sum if the teaching has the answer."""
    return min(0.0, -so_far) if lesson.leaks else 0.0


PARTS: dict[str, RewardPart] = {
    "gain": gain,
    "solved": reward_solution,
    "efficiency": efficiency,
    "leak": leak,
}


def load_parts(paths: Sequence[str]) -> dict[str, RewardPart]:
    """Return the parts by their names in metrics, in order. Raises ConfigError."""
    option, parts = "teacher.reward_parts", dict[str, RewardPart]()
    for path in paths:
        part = PARTS.get(path) or import_object(option, path)
        name = path.rpartition(":")[2]
        if not callable(part):
            why = f": {path!r} must be a function (lesson, so_far) -> float"
            raise ConfigError(Refusal(option=option, kind=Kind.FILE, why=why))
        if name in parts:
            why = f"has {name!r} twice, but metrics name each part, so the names must differ"
            raise ConfigError(Refusal(option=option, kind=Kind.VALUE, why=why))
        parts[name] = part
    return parts


def compute_values(parts: Mapping[str, RewardPart], lesson: Lesson) -> dict[str, float]:
    """Return the value of each part; the reward is their sum. Raises Rejection if one gives no number."""
    values: dict[str, float] = {}
    for name, part in parts.items():
        value = part(lesson, sum(values.values()))
        values[name] = check_number(value, f"part {name!r} of teacher.reward_parts")
    return values
