"""A trial directory while it is being prepared: one preparer at a time, and everything goes back if that fails."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from hpc_rl.errors import CannotWrite, TrialBusy
from hpc_rl.proc import start_ticks
from hpc_rl.trial import Trial, create_exclusive, read_json, write_atomic

STALE_S = (
    300.0  # no submission takes so long; one of another host that is older, and was not renewed, has died
)


class TrialLock:
    """Context manager: exclusive use of a trial directory.

    Leaving it by an exception takes back what was written through it: files get their old content, new ones vanish, and so does
    a directory that was not there before.

    Raises TrialBusy where another claim holds, CannotWrite where the directory can't be made.

    Args:
        trial: The trial.
        for_what: What is done to the trial, for the words of who is refused meanwhile.
    """

    def __init__(self, trial: Trial, for_what: str = "submitted") -> None:
        self.trial = trial
        self._for_what = for_what
        self._lock = trial.submitting
        self._missing: list[Path] = []  # directories that were not there, outermost first
        self._fresh = False  # nothing but our lock lies in the trial directory
        self._old: dict[Path, bytes | None] = {}

    def __enter__(self) -> TrialLock:
        here = self.trial.dir
        try:
            self._missing = [path for path in reversed([here, *here.parents]) if not path.exists()]
            here.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._take()
            self._fresh = [path.name for path in here.iterdir()] == [self._lock.name]
            self.trial.make_dirs()
        except OSError as error:
            self._undo()
            raise CannotWrite(
                f"the trial directory {here} can't be written: {error.strerror or error}. Set cluster.fileroot."
            ) from error
        return self

    def write(self, path: Path, data: str | bytes, mode: int = 0o644) -> None:
        """Replace a file of the trial. Raises CannotWrite."""
        self._remember(path)
        try:
            write_atomic(path, data, mode)
        except OSError as error:
            raise CannotWrite(f"{path} can't be written: {error.strerror or error}") from error

    def remove(self, path: Path) -> None:
        """Remove a file of the trial if it is there. Raises CannotWrite."""
        self._remember(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CannotWrite(f"{path} can't be removed: {error.strerror or error}") from error

    def _remember(self, path: Path) -> None:
        if path not in self._old:
            self._old[path] = path.read_bytes() if path.exists() else None

    def renew(self) -> None:
        """Say that whoever holds it is alive: for what may take longer than STALE_S."""
        with contextlib.suppress(OSError):  # the next time, or it is stale for other hosts
            os.utime(self._lock)

    def keep(self) -> None:
        """From here on nothing is taken back: the scheduler has the job."""
        self._fresh, self._old, self._missing = False, {}, []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._undo()
        if not (error is not None and self._fresh):
            self._lock.unlink(missing_ok=True)

    def _take(self) -> None:
        me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start_ticks": start_ticks(os.getpid()),
            "time": time.time(),
        }
        me |= {"for_what": self._for_what}
        if create_exclusive(self._lock, json.dumps(me)):
            return
        other = read_json(self._lock) or {}
        if _is_stale(other, self._lock):
            self._bury(other)
            if create_exclusive(self._lock, json.dumps(me)):
                return
        raise _busy(self.trial, other)

    def _bury(self, other: dict[str, Any]) -> None:
        """Move the lock of a dead submitter away; a living one's, taken in between, goes back."""
        grave = self._lock.with_name(f".submitting.{uuid.uuid4().hex[:12]}.stale")
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._lock, grave)
            if (read_json(grave) or {}) != other:
                with contextlib.suppress(FileExistsError):
                    os.link(grave, self._lock)
            grave.unlink()

    def _undo(self) -> None:
        for path, data in self._old.items():
            with contextlib.suppress(OSError):  # on the way out of another error, which is the one to tell
                path.unlink(missing_ok=True) if data is None else write_atomic(path, data)
        if self._fresh:  # away in one step: another submitter may begin the next moment
            grave = self.trial.dir.with_name(f".{self.trial.name}.{uuid.uuid4().hex[:12]}.removed")
            with contextlib.suppress(OSError):
                os.rename(self.trial.dir, grave)
                shutil.rmtree(grave, ignore_errors=True)
        for path in reversed(self._missing):
            with contextlib.suppress(OSError):  # not empty: somebody else's trial lies there meanwhile
                path.rmdir()


def check_unlocked(trial: Trial) -> None:
    """Raises TrialBusy while somebody has the claim: for those who write nothing, and only say what a submission would do."""
    other = read_json(trial.submitting)
    if trial.submitting.exists() and not _is_stale(other or {}, trial.submitting):
        raise _busy(trial, other or {})


def _busy(trial: Trial, other: dict[str, Any]) -> TrialBusy:
    by = f"process {other.get('pid', '?')} on {other.get('host', '?')}"
    return TrialBusy(f"trial {trial} is being {other.get('for_what', 'submitted')} by {by} right now.")


def _is_stale(owner: dict[str, Any], lock: Path) -> bool:
    if owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int):
        return start_ticks(owner["pid"]) != owner.get("start_ticks")
    with contextlib.suppress(OSError):
        return time.time() - lock.stat().st_mtime > STALE_S
    return True
