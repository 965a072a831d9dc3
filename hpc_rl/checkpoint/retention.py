"""Retention: which generations stay. Called after a commit was read back, by the owner of the trial only.

`keep` is the rule, pure. `retain` applies it to what lies on disk, and never to what somebody holds (holds.py).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpc_rl.checkpoint.generation import Found, scan
from hpc_rl.checkpoint.holds import Holds
from hpc_rl.trial import Trial, fsync_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """What stays: a generation goes when none of the three wants it.

    Args:
        newest: So many of the newest; at least one always stays.
        every_steps: Besides, those whose step is a multiple of this; None means none.
        best: Besides, so many with the best `metric`; those that have no such number don't count.
        metric: Name of a number of the evaluation of that state, as `eval_reward`.
        higher_is_better: Whether a larger number is better.
    """

    newest: int = 2
    every_steps: int | None = None
    best: int = 0
    metric: str = "eval_reward"
    higher_is_better: bool = True


class Generation(Protocol):
    """What the rule looks at; `metrics` are the numbers of its evaluation."""

    @property
    def step(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


def keep(generations: Iterable[Generation], policy: Policy) -> set[int]:
    """Steps of those that stay, of any order."""
    newest_first = sorted(generations, key=lambda one: one.step, reverse=True)
    staying = {one.step for one in newest_first[: max(1, policy.newest)]}
    if policy.every_steps:
        staying |= {one.step for one in newest_first if one.step % policy.every_steps == 0}
    return staying | set(best(newest_first, policy.metric, policy.higher_is_better)[: policy.best])


def best(generations: Iterable[Generation], metric: str, higher_is_better: bool = True) -> list[int]:
    """Steps of those that have the metric, best first; of equal ones the newer."""
    measured = [one for one in generations if isinstance(one.metrics.get(metric), int | float)]
    sign = -1.0 if higher_is_better else 1.0
    return [one.step for one in sorted(measured, key=lambda one: (sign * one.metrics[metric], -one.step))]


def surplus(found: Sequence[Found], policy: Policy, held: Iterable[int] = ()) -> list[Found]:
    """Those to delete: sound ones that the policy does not want and nobody holds.

    One that is not sound is neither counted nor deleted: it is evidence.
    """
    sound = [one for one in found if not one.problem]
    staying = keep(sound, policy) | set(held)
    return [one for one in sound if one.step not in staying]


def retain(trial: Trial, policy: Policy, holds: Holds | None = None) -> int:
    """Delete what is surplus, but nothing that somebody holds.

    Returns the step of the oldest sound generation that stays, 0 where there is none. Raises OSError.
    """
    holds = holds or Holds(trial)
    found = scan(trial)
    staying = {one.step for one in found if not one.problem}
    for one in surplus(found, policy, holds.steps()):
        gone = one.path.with_name(f".{one.path.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(one.path, gone)  # first out of sight: half a generation would be reported as damaged
        fsync_dir(one.path.parent)  # a power failure must not bring the name back to a half
        if one.step in holds.steps():  # taken up between the look and the rename
            os.rename(gone, one.path)
            continue
        shutil.rmtree(gone, ignore_errors=True)
        staying.discard(one.step)
        logger.info("generation %d removed", one.step)
    return min(staying, default=0)
