"""The file-system probe of one machine, as a program of its own: a mount that hangs costs the asker a time limit, not its life.

`python -m hpc_rl.doctor.filesystem DIR` prints one JSON object. What several machines must see of each other is node.py's.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.files import mount_of

TIMEOUT_S = 60.0


@dataclass
class FileSystem:
    """What was found out about a directory.

    Args:
        path: The directory.
        error: Why nothing more is known.
        exists: Whether it was there; else its nearest parent was probed.
        kind: Type of the mount (nfs4, lustre, ext4, tmpfs, …).
        options: Of the mount.
        rename: Whether rename replaces a file as a whole.
        link: Whether link refuses a name that is taken.
        exclusive: Whether O_EXCL and mkdir do.
        flock: Whether a second descriptor is kept out by flock.
        fsync_s: Seconds that a small synced write takes.
        free_bytes: Free for this account.
        free_inodes: The same; None where the file system counts none.
        skew_s: The file server's clock minus ours.
    """

    path: str = ""
    error: str = ""
    exists: bool = True
    kind: str = ""
    options: list[str] = field(default_factory=list)
    rename: bool = False
    link: bool = False
    exclusive: bool = False
    flock: bool = False
    fsync_s: float = 0.0
    free_bytes: int = 0
    free_inodes: int | None = None
    skew_s: float = 0.0


def look(path: Path, timeout_s: float = TIMEOUT_S) -> FileSystem:
    """Probe a directory in a child process."""
    argv = [sys.executable, "-m", "hpc_rl.doctor.filesystem", str(path)]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
        return FileSystem(**json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return FileSystem(str(path), error=f"gave no answer within {timeout_s:g} s")
    except (OSError, ValueError, TypeError) as error:
        return FileSystem(str(path), error=f"the probe failed: {error}")


def probe(path: Path) -> FileSystem:
    """Try everything in a temporary folder below the directory, or below its nearest parent that is there."""
    found = FileSystem(str(path), exists=path.is_dir())
    base = next(parent for parent in (path, *path.parents) if parent.exists())
    found.kind, found.options = mount_of(base)
    try:
        usage = os.statvfs(base)
        found.free_bytes = usage.f_bavail * usage.f_frsize
        found.free_inodes = usage.f_favail if usage.f_files else None
        folder = Path(tempfile.mkdtemp(prefix=".hpc-rl-doctor-", dir=base))
    except OSError as error:
        found.error = f"{base} can't be written: {error.strerror or error}"
        return found
    try:
        _try(folder, found)
    except OSError as error:
        found.error = f"{error.strerror or error} ({error.filename or folder})"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _try(folder: Path, found: FileSystem) -> None:
    start = time.monotonic()
    first = _written(folder / "a", b"old")
    found.fsync_s = time.monotonic() - start
    found.skew_s = first.stat().st_mtime - time.time()
    os.replace(_written(folder / "b", b"new"), first)
    found.rename = first.read_bytes() == b"new" and not (folder / "b").exists()
    found.link = _refuses(lambda: os.link(_written(folder / "c", b"x"), first))
    open_it = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    found.exclusive = _refuses(lambda: os.close(os.open(first, open_it))) and _refuses(
        lambda: os.mkdir(first)
    )
    with first.open("r+b") as one, first.open("r+b") as two:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.flock = _refuses(lambda: fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB), BlockingIOError)
        except OSError:
            found.flock = False


def _written(path: Path, content: bytes) -> Path:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path


def _refuses(act: Any, error: type[OSError] = FileExistsError) -> bool:
    try:
        act()
    except error:
        return True
    return False


if __name__ == "__main__":
    print(json.dumps(asdict(probe(Path(sys.argv[1])))))
