"""Holds: a process keeps the owner of a folder from removing an entry of it, on any host.

A hold is a file `.hold-<name>.<random>.json` in the folder, with a count that its process raises every few
seconds. If the count does not change for a minute by the owner's clock, the process is dead and the hold is
removed.
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

from hpc_rl.core.trial import list_entries, load_object, write_json

logger = logging.getLogger(__name__)
BEAT_S = 5.0  # between counts of a hold
STALE_S = 60.0  # without a new count; then the process is dead
APPEAR_S = 5.0  # the owner may rename an entry and put it back; it is absent for a moment
_NAME = re.compile(r"\.hold-(.+)\.[0-9a-f]+\.json")


@contextmanager
def hold_entry(folder: Path, name: str, why: str) -> Iterator[None]:
    """Keep the owner of a folder from removing the entry that `name` stands for."""
    path = folder / f".hold-{name}.{uuid.uuid4().hex[:12]}.json"
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, why, ended), daemon=True, name="hold")
    try:
        write_json(path, {"count": 0, "why": why, "pid": os.getpid()})
        beat.start()
    except OSError as error:  # a read-only place
        logger.warning(
            "%s in %s can't be marked as in use (%s), so the trial may remove it while it is read",
            name,
            folder,
            error,
        )
    try:
        yield
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
            logger.warning(
                "%s, which marks data as in use, could not be renewed; it is tried again in %g s: %s",
                path,
                BEAT_S,
                error,
            )


class FolderHolds:
    """The holds in a folder, as its owner observes them over time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self._seen: dict[str, tuple[object, float]] = {}  # file -> (count, time of its last change)

    def list_names(self) -> set[str]:
        """Return the names that live processes hold; remove the holds of dead processes. Raises OSError."""
        now, held = self._clock(), set()
        files = {entry.name: match[1] for entry in list_entries(self.folder)
                 if (match := _NAME.fullmatch(entry.name))}  # fmt: skip
        self._seen = {file: self._seen[file] for file in files if file in self._seen}
        for file, name in files.items():
            count = load_object(self.folder / file).get("count")
            if file not in self._seen or self._seen[file][0] != count:
                self._seen[file] = (count, now)
            silent_s = now - self._seen[file][1]
            if silent_s > STALE_S:
                form = "%s marked data as in use, but was not renewed for %.0f s, so this mark is removed"
                logger.warning(form, self.folder / file, silent_s)
                (self.folder / file).unlink(missing_ok=True)
            else:
                held.add(name)
        return held
