"""A trial directory while it is prepared: by one process at a time, and undone on failure."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hpc_rl.core.errors import CannotWrite, TrialBusy, TrialStateError
from hpc_rl.core.proc import find_start_ticks
from hpc_rl.core.records import JsonRecord
from hpc_rl.core.trial import Trial, create_exclusive, write_atomic
from hpc_rl.trials.storage import find_write_problem

LOCK_STALE_S = 300.0  # after which the lock of another host counts as abandoned, unless it was renewed


@dataclass(frozen=True)
class LockOwner(JsonRecord):
    """The content of the lock file: the process that has it."""

    host: str = ""
    pid: int | None = None
    start_ticks: int | None = None
    time: float = 0.0  # Unix seconds
    for_what: str = "submitted"


class TrialLock:
    """Context manager: exclusive use of a trial directory.

    Leaving it by an exception undoes its writes: files get their old content, new ones
    vanish, and so does a directory that did not exist before.

    `for_what` tells a process that is refused meanwhile what is done to the trial. Raises TrialBusy if
    another process has the lock, CannotWrite where the directory can't be made.
    """

    def __init__(self, trial: Trial, for_what: str = "submitted") -> None:
        self.trial = trial
        self._for_what = for_what
        self._lock = trial.submitting
        self._missing: list[Path] = []  # directories that did not exist, outermost first
        self._fresh = False  # the trial directory holds nothing but the lock
        self._old: dict[Path, bytes | None] = {}

    def __enter__(self) -> TrialLock:
        here = self.trial.dir
        try:
            self._missing = [path for path in reversed([here, *here.parents]) if not path.exists()]
            self.trial.make_dir()
            self._take()
            self._fresh = [path.name for path in here.iterdir()] == [self._lock.name]
            self.trial.make_dirs()
        except TrialStateError:
            self._undo()
            raise
        except OSError as error:
            self._undo()
            raise _make_write_error(self.trial, error.strerror or str(error)) from error
        return self

    def write(self, path: Path, data: str | bytes, mode: int = 0o644) -> None:
        """Replace a file of the trial. Raises CannotWrite."""
        self._remember(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data, mode)
        except OSError as error:
            raise CannotWrite(f"{path} can't be written: {error.strerror or error}") from error

    def remove(self, path: Path) -> None:
        """Remove a file of the trial if it exists. Raises CannotWrite."""
        self._remember(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CannotWrite(f"{path} can't be removed: {error.strerror or error}") from error

    def _remember(self, path: Path) -> None:
        if path not in self._old:
            self._old[path] = path.read_bytes() if path.exists() else None

    def renew(self) -> None:
        """Show that the process is alive, during work that may take longer than LOCK_STALE_S."""
        with contextlib.suppress(OSError):  # the next renewal may succeed
            os.utime(self._lock)

    def keep(self) -> None:
        """Undo nothing from here on: the scheduler has the job."""
        self._fresh, self._old, self._missing = False, {}, []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._undo()
        if not (error is not None and self._fresh):
            self._lock.unlink(missing_ok=True)

    def _take(self) -> None:
        pid = os.getpid()
        own = LockOwner(socket.gethostname(), pid, find_start_ticks(pid), time.time(), self._for_what)
        text = json.dumps(own.to_json())
        if create_exclusive(self._lock, text):
            return
        other = LockOwner.read(self._lock)
        if _is_stale(other, self._lock):
            self._remove_stale(other)
            if create_exclusive(self._lock, text):
                return
        raise _make_busy_error(self.trial, other)

    def _remove_stale(self, other: LockOwner | None) -> None:
        """Move an abandoned lock away; one that a live process took in between is put back."""
        moved = self._lock.with_name(f".submitting.{uuid.uuid4().hex[:12]}.stale")
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._lock, moved)
            if LockOwner.read(moved) != other:
                with contextlib.suppress(FileExistsError):
                    os.link(moved, self._lock)
            moved.unlink()

    def _undo(self) -> None:
        # Errors are suppressed: the caller's error is the one to report.
        for path, data in self._old.items():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True) if data is None else write_atomic(path, data)
        if self._fresh:  # removed in one step: another submission may begin the next moment
            moved = self.trial.dir.with_name(f".{self.trial.name}.{uuid.uuid4().hex[:12]}.removed")
            with contextlib.suppress(OSError):
                os.rename(self.trial.dir, moved)
                shutil.rmtree(moved, ignore_errors=True)
        for path in reversed(self._missing):
            with contextlib.suppress(OSError):  # not empty: another trial was made there meanwhile
                path.rmdir()


def check_unlocked(trial: Trial) -> None:
    """Raise TrialBusy while another process has the lock; for commands that write nothing."""
    other = LockOwner.read(trial.submitting)
    if trial.submitting.exists() and not _is_stale(other, trial.submitting):
        raise _make_busy_error(trial, other)


def check_writable(trial: Trial) -> None:
    """Raise CannotWrite if the trial directory could not be made; for commands that write nothing."""
    if problem := find_write_problem(trial.dir):
        raise _make_write_error(trial, problem)


def _make_write_error(trial: Trial, reason: str) -> CannotWrite:
    return CannotWrite(f"the trial directory {trial.dir} can't be written: {reason}. Set cluster.fileroot.")


def _make_busy_error(trial: Trial, other: LockOwner | None) -> TrialBusy:
    owner = other or LockOwner()
    by = f"process {owner.pid or '?'} on {owner.host or '?'}"
    return TrialBusy(f"trial {trial} is being {owner.for_what} by {by} right now.")


def _is_stale(owner: LockOwner | None, lock: Path) -> bool:
    if owner is not None and owner.host == socket.gethostname() and owner.pid is not None:
        return find_start_ticks(owner.pid) != owner.start_ticks
    with contextlib.suppress(OSError):
        return time.time() - lock.stat().st_mtime > LOCK_STALE_S
    return True
