"""The models, trials and metric of each `hpc-rl quickstart --method NAME`: one row each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_rl.examples import hints, toy


class WarmUp(NamedTuple):
    """An SFT trial before the main training."""

    model: str  # folder for its model
    config: str  # in configs/quickstart
    says: str


@dataclass(frozen=True)
class Method:
    """A toy, its trials, and the metric that shows the learning.

    Paths in the configurations begin with `quickstart/`, which stands for the directory of the quickstart.
    """

    folder: str  # for task and models, below that directory
    make: Callable[[Path, int], None]  # writes task/ and base/ into a folder, from a seed
    toy: str  # description of the toy
    warm_ups: tuple[WarmUp, ...]
    config: str  # of the training, in configs/quickstart
    says: str
    documented: str  # the same training with comments on every line, in configs
    measure: str  # a metric of each step; with the prefix `eval_`, of each evaluation


METHODS = {
    "grpo": Method(
        folder="",
        make=toy.make,
        toy="1,000 sums of three digits (200 held out) and a Qwen3 of 100k parameters",
        warm_ups=(WarmUp("warm", "sft", "warming the model up: an SFT trial"),),
        config="grpo",
        says="asynchronous GRPO: generation servers, a rollout service and a trainer",
        documented="grpo",
        measure="reward",
    ),
    "teacher": Method(
        folder="hints",
        make=hints.make,
        toy="72 questions that need a hint (18 held out) and a Qwen3 of 132k parameters",
        warm_ups=(
            WarmUp("student", "student-sft", "the student learns to use a hint, and no answer: an SFT trial"),
            WarmUp("teacher", "teacher-sft", "the teacher learns to write a hint, any digit: an SFT trial"),
        ),
        config="teacher",
        says="the teacher learns which hint helps: GRPO with a server for each of the two models",
        documented="quickstart/teacher",
        measure="accuracy_delta",
    ),
}
