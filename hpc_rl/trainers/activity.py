"""The current activity of the trainer's rank 0, in a small file. The supervisor uses it to detect a hang."""

import json
import logging
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpc_rl.core.files import is_full
from hpc_rl.core.trial import overwrite, write_json

logger = logging.getLogger(__name__)
PERIOD_S = 2.0


class Activity:
    """A thread that writes the file at once, then after each change, at most every PERIOD_S."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._now: tuple[str, int, int] = ("start", 0, 0)  # activity, step, number of changes
        path.parent.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._show, daemon=True, name="activity").start()

    def does(self, what: str, step: int) -> None:
        with self._lock:
            self._now = (what, step, self._now[2] + 1)

    @property
    def now(self) -> tuple[str, int]:
        """The current activity, and its step."""
        return self._now[:2]

    def make_progress(self, of: Collection[str]) -> None:
        """Note progress, if the current activity is one of these; any thread may call it."""
        with self._lock:
            what, step, changes = self._now
            self._now = (what, step, changes + (what in of))

    def _write(self, value: dict[str, Any]) -> None:
        try:
            write_json(self._path, value)
        except OSError as error:
            if not is_full(error):
                raise
            overwrite(self._path, json.dumps(value))  # a trainer that waits for disk space is not a hang

    def _show(self) -> None:
        shown = None
        while True:
            if (now := self._now) != shown:
                what, step, changes = now
                try:
                    self._write({"doing": what, "step": step, "changes": changes, "time": time.time()})
                    shown = now
                except OSError as error:  # try again in the next round
                    logger.warning(
                        "`hpc-rl status` shows old activity, because the trainer can't record it: %s", error
                    )
            time.sleep(PERIOD_S)
