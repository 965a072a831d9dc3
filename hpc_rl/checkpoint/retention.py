"""Retention: removes old generations after each commit. For the owner of the trial only.

A pure rule selects the generations to keep. `retain` applies it to the disk, but never removes a generation
that a process holds (core/holds.py).

Before retention removes a generation, it reads the kept ones once per process (files up to LIGHT_BYTES). A
damaged generation does not count, so an intact one is kept instead. Larger files are checked by size here,
and by content during loading.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_rl.checkpoint.generation import LIGHT_BYTES, Found, scan, verify
from hpc_rl.core.errors import NothingToResume
from hpc_rl.core.holds import APPEAR_S, FolderHolds, hold_entry
from hpc_rl.core.trial import Trial, fsync_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetentionPolicy:
    """The rules for keeping generations. A generation is removed if no rule keeps it."""

    newest: int = 2  # keep this many newest ones; at least one is always kept
    every_steps: int | None = None  # keep steps that are a multiple of this
    best: int = 0  # keep this many with the best `metric`
    metric: str = "eval_reward"  # a metric of the state's evaluation
    higher_is_better: bool = True


def keep(generations: Iterable[Found], policy: RetentionPolicy) -> set[int]:
    """Return the steps that the policy keeps; generations may be in any order."""
    newest_first = sorted(generations, key=lambda one: one.step, reverse=True)
    staying = {one.step for one in newest_first[: max(1, policy.newest)]}
    if policy.every_steps:
        staying |= {one.step for one in newest_first if one.step % policy.every_steps == 0}
    return staying | set(rank_best(newest_first, policy.metric, policy.higher_is_better)[: policy.best])


def rank_best(generations: Iterable[Found], metric: str, higher_is_better: bool = True) -> list[int]:
    """Return the steps with the metric, best first; among equal ones, the newer first."""
    measured = [one for one in generations if isinstance(one.metrics.get(metric), int | float)]
    sign = -1.0 if higher_is_better else 1.0
    return [one.step for one in sorted(measured, key=lambda one: (sign * one.metrics[metric], -one.step))]


def find_surplus(found: Sequence[Found], policy: RetentionPolicy, held: Iterable[int] = ()) -> list[Found]:
    """Return the generations to delete: sound ones that the policy does not keep and no process holds.

    Damaged generations are neither counted nor deleted, because they are evidence.
    """
    sound = [one for one in found if not one.problem]
    staying = keep(sound, policy) | set(held)
    return [one for one in sound if one.step not in staying]


def check_kept(found: Sequence[Found], policy: RetentionPolicy, known: dict[str, str]) -> list[Found]:
    """Check the small files of the generations that count; return all generations with the problems found.

    `known` has this process's results so far: version -> '' or the problem.
    """
    counting = replace(policy, every_steps=None)  # generations kept by `every_steps` replace no others
    while True:
        found = [replace(one, problem=one.problem or known.get(one.version, "")) for one in found]
        staying = keep([one for one in found if not one.problem], counting)
        unread = [one for one in found if one.step in staying and one.version not in known]
        if not unread:
            return found
        for one in unread:
            known[one.version] = problem = verify(one, LIGHT_BYTES).problem
            if problem:
                logger.warning(
                    "checkpoint %d is damaged, so recover.keep does not count it: %s", one.step, problem
                )


def retain(
    trial: Trial,
    policy: RetentionPolicy,
    holds: Holds | None = None,
    known: dict[str, str] | None = None,
    waits_for: Collection[int] = (),
) -> int:
    """Delete the surplus generations that no process holds. Keep `known` between calls.

    With `policy.best`, generations of the steps in `waits_for` stay, because they are being evaluated.
    Returns the step of the oldest kept sound generation, or 0. Raises OSError.
    """
    holds = holds or Holds(trial)
    found = scan(trial)
    held = holds.steps() | ({*waits_for} if policy.best else set())
    if find_surplus(found, policy, held):
        found = check_kept(found, policy, {} if known is None else known)
    staying = {one.step for one in found if not one.problem}
    for one in find_surplus(found, policy, held):
        gone = one.path.with_name(f".{one.path.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(one.path, gone)  # hide it first: a partly deleted generation would be reported as damaged
        fsync_dir(one.path.parent)  # otherwise a power failure could restore the name of a partly deleted one
        if one.step in holds.steps():  # held since the check
            os.rename(gone, one.path)
            continue
        shutil.rmtree(gone, ignore_errors=True)
        staying.discard(one.step)
        logger.info("checkpoint %d is removed, because newer ones exist", one.step)
    return min(staying, default=0)


@contextmanager
def hold(trial: Trial, step: int, why: str) -> Iterator[Path]:
    """Keep retention from removing a generation; yield its folder. Raises NothingToResume if it is gone."""
    with hold_entry(trial.recover, f"{step:08d}", why):
        deadline = time.monotonic() + APPEAR_S
        while not trial.generation(step).is_dir():
            if time.monotonic() > deadline:
                raise NothingToResume(f"checkpoint {step} of {trial} does not exist any more")
            time.sleep(0.1)
        yield trial.generation(step)


class Holds:
    """The holds on the generations of a trial, as its owner observes them over time."""

    def __init__(self, trial: Trial, clock: Callable[[], float] = time.monotonic) -> None:
        self._holds = FolderHolds(trial.recover, clock)

    def steps(self) -> set[int]:
        """Return the steps that live processes hold; remove the holds of dead processes. Raises OSError."""
        return {int(name) for name in self._holds.list_names() if name.isdecimal()}
