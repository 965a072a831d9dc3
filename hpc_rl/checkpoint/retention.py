"""Retention: which generations are kept. Applied after each commit, by the owner of the trial only.

`keep` is the rule, pure. `retain` applies it to the disk, but never removes a generation that a process
holds: a hold is a file in `recover/` with a count that its process raises every few seconds. The trainer
judges by its own clock: a hold whose count has not changed for a minute belongs to a dead process and is
removed.

Before a surplus generation is removed, those that are kept in its favour are read, also the new one, each
once by a process: their files of up to LIGHT_BYTES. A damaged one does not count, so an intact one is kept
instead. Larger files are checked by size here, and by content when they are loaded.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_rl.checkpoint.generation import LIGHT_BYTES, Found, scan, verify
from hpc_rl.core.errors import NothingToResume
from hpc_rl.core.trial import Trial, fsync_dir, read_json, write_json

logger = logging.getLogger(__name__)
BEAT_S = 5.0  # between two counts of a hold
STALE_S = 60.0  # without a new count: its process is dead
APPEAR_S = 5.0  # a generation that retention is about to remove, and puts back, is absent for a moment
_NAME = re.compile(r"\.hold-(\d{8,})\.[0-9a-f]+\.json")


@dataclass(frozen=True)
class RetentionPolicy:
    """What is kept: a generation is removed when none of the three rules wants it."""

    newest: int = 2  # so many newest ones; at least one is always kept
    every_steps: int | None = None  # additionally those whose step is a multiple of this
    best: int = 0  # additionally so many with the best `metric`; those without this number don't count
    metric: str = "eval_reward"  # a number of the evaluation of that state
    higher_is_better: bool = True


def keep(generations: Iterable[Found], policy: RetentionPolicy) -> set[int]:
    """Return the steps that are kept, of generations in any order."""
    newest_first = sorted(generations, key=lambda one: one.step, reverse=True)
    staying = {one.step for one in newest_first[: max(1, policy.newest)]}
    if policy.every_steps:
        staying |= {one.step for one in newest_first if one.step % policy.every_steps == 0}
    return staying | set(best(newest_first, policy.metric, policy.higher_is_better)[: policy.best])


def best(generations: Iterable[Found], metric: str, higher_is_better: bool = True) -> list[int]:
    """Return the steps that have the metric, best first; of equal ones the newer first."""
    measured = [one for one in generations if isinstance(one.metrics.get(metric), int | float)]
    sign = -1.0 if higher_is_better else 1.0
    return [one.step for one in sorted(measured, key=lambda one: (sign * one.metrics[metric], -one.step))]


def surplus(found: Sequence[Found], policy: RetentionPolicy, held: Iterable[int] = ()) -> list[Found]:
    """Return what to delete: sound generations that the policy does not want and no process holds.

    A damaged one is neither counted nor deleted: it is evidence.
    """
    sound = [one for one in found if not one.problem]
    staying = keep(sound, policy) | set(held)
    return [one for one in sound if one.step not in staying]


def proven(found: Sequence[Found], policy: RetentionPolicy, known: dict[str, str]) -> list[Found]:
    """Return the same generations, with the problems that light reading finds in those that count.

    `known` is what this process has found so far: version -> '' or the problem.
    """
    counting = replace(policy, every_steps=None)  # what is kept by its step alone takes no place
    while True:
        found = [replace(one, problem=one.problem or known.get(one.version, "")) for one in found]
        staying = keep([one for one in found if not one.problem], counting)
        unread = [one for one in found if one.step in staying and one.version not in known]
        if not unread:
            return found
        for one in unread:
            known[one.version] = problem = verify(one, LIGHT_BYTES).problem
            if problem:
                logger.warning("checkpoint %d is damaged and does not count: %s", one.step, problem)


def retain(
    trial: Trial, policy: RetentionPolicy, holds: Holds | None = None, known: dict[str, str] | None = None
) -> int:
    """Delete the surplus, except what a process holds; `known` is kept between calls, see `proven`.

    Returns the step of the oldest sound generation that is kept, 0 if there is none. Raises OSError.
    """
    holds = holds or Holds(trial)
    found = scan(trial)
    held = holds.steps()
    if surplus(found, policy, held):
        found = proven(found, policy, {} if known is None else known)
    staying = {one.step for one in found if not one.problem}
    for one in surplus(found, policy, held):
        gone = one.path.with_name(f".{one.path.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(one.path, gone)  # first hidden: half a generation would be reported as damaged
        fsync_dir(one.path.parent)  # a power failure must not bring the name back to a half
        if one.step in holds.steps():  # held since the check
            os.rename(gone, one.path)
            continue
        shutil.rmtree(gone, ignore_errors=True)
        staying.discard(one.step)
        logger.info("checkpoint %d removed", one.step)
    return min(staying, default=0)


@contextmanager
def hold(trial: Trial, step: int, why: str) -> Iterator[Path]:
    """Keep retention from removing a generation; yield its folder. Raises NothingToResume if it is gone."""
    path = trial.recover / f".hold-{step:08d}.{uuid.uuid4().hex[:12]}.json"
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, why, ended), daemon=True, name="hold")
    try:
        write_json(path, {"count": 0, "why": why, "pid": os.getpid()})
        beat.start()
    except OSError as error:  # a read-only place
        logger.warning(
            "checkpoint %d can't be marked as in use (%s): retention may remove it meanwhile", step, error
        )
    try:
        deadline = time.monotonic() + APPEAR_S
        while not trial.generation(step).is_dir():
            if time.monotonic() > deadline:
                raise NothingToResume(f"checkpoint {step} of {trial} is gone")
            time.sleep(0.1)
        yield trial.generation(step)
    finally:
        ended.set()
        if beat.ident is not None:
            beat.join()
        path.unlink(missing_ok=True)


def _beat(path: Path, why: str, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(BEAT_S):
        count += 1
        try:
            write_json(path, {"count": count, "why": why, "pid": os.getpid()})
        except OSError as error:
            logger.warning("the hold %s could not be renewed: %s", path.name, error)


class Holds:
    """The holds on a trial as its owner sees them over time."""

    def __init__(self, trial: Trial, clock: Callable[[], float] = time.monotonic) -> None:
        self.trial, self._clock = trial, clock
        self._seen: dict[str, tuple[object, float]] = {}  # name -> (count, since when it is that)

    def steps(self) -> set[int]:
        """Return the generations that live processes hold; remove the holds of dead ones. Raises OSError."""
        now, held = self._clock(), set()
        names = [entry.name for entry in os.scandir(self.trial.recover) if _NAME.fullmatch(entry.name)]
        self._seen = {name: self._seen[name] for name in names if name in self._seen}
        for name in names:
            count = (read_json(self.trial.recover / name) or {}).get("count")
            if name not in self._seen or self._seen[name][0] != count:
                self._seen[name] = (count, now)
            if now - self._seen[name][1] > STALE_S:
                logger.warning(
                    "the hold %s was not renewed for %.0f s and is removed", name, now - self._seen[name][1]
                )
                (self.trial.recover / name).unlink(missing_ok=True)
            elif match := _NAME.fullmatch(name):
                held.add(int(match[1]))
        return held
