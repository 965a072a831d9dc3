"""Retention: which generations stay. Called after each commit, by the owner of the trial only.

`keep` is the rule, pure. `retain` applies it to what lies on disk, and never to what somebody holds
(holds.py).

Before one that is surplus goes, those in favour of which it goes are read, the new one too, each once by a
process: their files of up to LIGHT_BYTES. One that is damaged is not counted, so an intact one stays in its
place. Larger files are known by their size alone here: they are checked while they are loaded.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hpc_rl.checkpoint.generation import LIGHT_BYTES, Found, scan, verify
from hpc_rl.errors import NothingToResume
from hpc_rl.trial import Trial, fsync_dir, read_json, write_json

logger = logging.getLogger(__name__)
BEAT_S = 5.0
STALE_S = 60.0
APPEAR_S = 5.0  # a generation that retention took up just now, and puts back, is away for a moment
_NAME = re.compile(r"\.hold-(\d{8,})\.[0-9a-f]+\.json")


@dataclass(frozen=True)
class RetentionPolicy:
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


def keep(generations: Iterable[Generation], policy: RetentionPolicy) -> set[int]:
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


def surplus(found: Sequence[Found], policy: RetentionPolicy, held: Iterable[int] = ()) -> list[Found]:
    """Those to delete: sound ones that the policy does not want and nobody holds.

    One that is not sound is neither counted nor deleted: it is evidence.
    """
    sound = [one for one in found if not one.problem]
    staying = keep(sound, policy) | set(held)
    return [one for one in sound if one.step not in staying]


def proven(found: Sequence[Found], policy: RetentionPolicy, known: dict[str, str]) -> list[Found]:
    """The same, with what is wrong with those that count against others, as far as light reading shows.

    `known` is what this process has found so far, by version: '' or the problem.
    """
    found = [
        replace(one, problem=one.problem or (known.get(one.manifest.version, "") if one.manifest else ""))
        for one in found
    ]
    counting = replace(policy, every_steps=None)  # what stays by its step alone takes nobody's place
    while True:
        staying = keep([one for one in found if not one.problem], counting)
        unread = [
            one for one in found if one.step in staying and one.manifest and one.manifest.version not in known
        ]
        if not unread:
            return found
        read = {one.step: verify(one, LIGHT_BYTES) for one in unread}
        for one in read.values():
            known[one.manifest.version if one.manifest else ""] = one.problem
            if one.problem:
                logger.warning("generation %d is damaged and does not count: %s", one.step, one.problem)
        found = [read.get(one.step, one) for one in found]


def retain(
    trial: Trial, policy: RetentionPolicy, holds: Holds | None = None, known: dict[str, str] | None = None
) -> int:
    """Delete what is surplus, but nothing that somebody holds.

    `known` is remembered between calls, see `proven`.

    Returns the step of the oldest sound generation that stays, 0 where there is none. Raises OSError.
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
        os.rename(one.path, gone)  # first out of sight: half a generation would be reported as damaged
        fsync_dir(one.path.parent)  # a power failure must not bring the name back to a half
        if one.step in holds.steps():  # taken up between the look and the rename
            os.rename(gone, one.path)
            continue
        shutil.rmtree(gone, ignore_errors=True)
        staying.discard(one.step)
        logger.info("generation %d removed", one.step)
    return min(staying, default=0)


@contextmanager
def hold(trial: Trial, step: int, why: str) -> Iterator[Path]:
    """Keep retention from removing a generation; gives its folder. Raises NothingToResume where it is gone."""
    path = trial.recover / f".hold-{step:08d}.{uuid.uuid4().hex[:12]}.json"
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, why, ended), daemon=True, name="hold")
    try:
        write_json(path, {"count": 0, "why": why, "pid": os.getpid()})
        beat.start()
    except OSError as error:  # a place that can only be read
        logger.warning(
            "generation %d can't be marked as in use (%s): retention may remove it meanwhile", step, error
        )
    try:
        deadline = time.monotonic() + APPEAR_S
        while not trial.generation(step).is_dir():
            if time.monotonic() > deadline:
                raise NothingToResume(f"generation {step} of {trial} is gone")
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
    """The holds on a trial as its owner sees them, look after look."""

    def __init__(self, trial: Trial, clock: Callable[[], float] = time.monotonic) -> None:
        self.trial, self._clock = trial, clock
        self._seen: dict[str, tuple[object, float]] = {}  # name -> (count, since when it is that)

    def steps(self) -> set[int]:
        """Generations that somebody alive holds; removes the holds of the dead. Raises OSError."""
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
