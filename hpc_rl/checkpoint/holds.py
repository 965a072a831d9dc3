"""Holds: the mark of whoever reads a generation that is not its own, so that retention leaves it where it is.

A hold is a file in `recover/` with a count that its owner raises every few seconds. Whether it is alive the trainer judges by
its own clock: one whose count has not changed for a minute is of a reader that died, and is removed.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_rl.errors import NothingToResume
from hpc_rl.trial import Trial, read_json, write_json

logger = logging.getLogger(__name__)
BEAT_S = 5.0
STALE_S = 60.0
APPEAR_S = 5.0  # a generation that retention took up just now, and puts back, is away for a moment
_NAME = re.compile(r"\.hold-(\d{8,})\.[0-9a-f]+\.json")


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
