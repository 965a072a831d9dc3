"""Retention: removes old generations after each commit. For the owner of the trial only.

A pure rule selects the generations to keep. `retain` applies it to the disk, but never removes a generation
that a process holds. A hold is a file in `recover/` with a count that its process raises every few seconds.
If the count does not change for a minute by the trainer's clock, the process is dead and the hold is removed.

Before retention removes a generation, it reads the kept ones once per process (files up to LIGHT_BYTES). A
damaged generation does not count, so an intact one is kept instead. Larger files are checked by size here,
and by content during loading.
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
from hpc_rl.core.trial import Trial, fsync_dir, load_json, write_json

logger = logging.getLogger(__name__)
BEAT_S = 5.0  # between counts of a hold
STALE_S = 60.0  # without a new count; then the process is dead
APPEAR_S = 5.0  # retention may rename a generation and put it back; it is absent for a moment
_NAME = re.compile(r"\.hold-(\d{8,})\.[0-9a-f]+\.json")


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
                logger.warning("checkpoint %d is damaged and does not count: %s", one.step, problem)


def retain(
    trial: Trial, policy: RetentionPolicy, holds: Holds | None = None, known: dict[str, str] | None = None
) -> int:
    """Delete the surplus generations that no process holds. Keep `known` between calls.

    Returns the step of the oldest kept sound generation, or 0. Raises OSError.
    """
    holds = holds or Holds(trial)
    found = scan(trial)
    held = holds.steps()
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
    """The holds on a trial, as its owner observes them over time."""

    def __init__(self, trial: Trial, clock: Callable[[], float] = time.monotonic) -> None:
        self.trial, self._clock = trial, clock
        self._seen: dict[str, tuple[object, float]] = {}  # name -> (count, time of its last change)

    def steps(self) -> set[int]:
        """Return the steps that live processes hold; remove the holds of dead processes. Raises OSError."""
        now, held = self._clock(), set()
        names = [entry.name for entry in os.scandir(self.trial.recover) if _NAME.fullmatch(entry.name)]
        self._seen = {name: self._seen[name] for name in names if name in self._seen}
        for name in names:
            count = (load_json(self.trial.recover / name) or {}).get("count")
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
