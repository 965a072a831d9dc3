"""Records and leases in a shared directory: a JSON file per record and per epoch of a lease, no locks.

Layout: record `a/b/c` is `<root>/a/b/c.json`; epoch N of the lease on `a/b` is `<root>/a/b.epoch-N`. A file
has one writer; of several processes that create it exactly one wins (link). Names with a leading dot are
incomplete: readers skip them.

Durability: every write is fsynced before it gets its name; directories are not fsynced, because records that
a crash of the file server loses are written again by the processes that live.

Caches: NFS remembers that a name was absent for up to a minute, but opening the parent directory revalidates
it. So a name that was absent is looked up by listing its directory, and content is polled by open and read,
never by mtime. Files of older epochs stay, so that a process with an old listing fails to create them instead
of reusing their number.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import ConfigError, Stale
from hpc_rl.files import is_full
from hpc_rl.trial import create_exclusive, overwrite, write_atomic

COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,127}")
FIRST_POLL_S, LAST_POLL_S = 0.05, 1.0
READ_TRIES = 4
READ_PAUSE_S = 0.02
EPOCH = ".epoch-"
RECORD = ".json"


@dataclass(frozen=True)
class LeaseView:
    """A lease as a reader judges it: alive while its counter moved within its time to live."""

    key: str
    value: dict[str, Any]
    epoch: int
    alive: bool
    age_s: float  # since the counter was last seen to move, by the reader's clock


class NameResolve:
    """Records and leases as files below one directory, which is made when the first one is written.

    Keys are `a/b/c` of safe components (ConfigError otherwise); values are JSON objects. `clock` gives the
    seconds of this reader; leases are judged by it alone.
    """

    def __init__(self, root: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = Path(root)
        self._clock = clock
        self._moved: dict[str, tuple[int, int, float]] = {}  # key -> epoch, counter, when it was first seen

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Write a record, or replace it."""
        path = self._path(key, RECORD)
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps({"value": value, "nonce": uuid.uuid4().hex}))

    def wait(self, key: str, timeout_s: float) -> dict[str, Any]:
        """Return the record once it exists. Raises TimeoutError that names the key."""
        path, deadline, pause_s = self._path(key, RECORD), time.monotonic() + timeout_s, FIRST_POLL_S
        while (record := _read(path)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no process published {key!r} within {timeout_s:g} s")
            # many readers must not ask the file server in step
            time.sleep(min(pause_s * random.uniform(0.8, 1.2), left_s))
            pause_s = min(2 * pause_s, LAST_POLL_S)
        return record["value"]

    def lease(self, key: str, value: dict[str, Any], ttl_s: float) -> Lease:
        """Take the key over with the next epoch: the highest epoch wins, holders of lower ones are stale."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        epoch = _highest_epoch(path) + 1
        while True:
            lease = Lease(path, key, epoch, value, ttl_s)
            won = create_exclusive(lease.path, lease.content())
            highest = _highest_epoch(path)  # fresh: the attempt to create a name revalidated the directory
            if won and highest == epoch:
                return lease
            epoch = max(highest, epoch) + 1

    def leases(self, prefix: str) -> dict[str, LeaseView]:
        """Return the leases on `prefix` and the keys right below it, judged by what earlier calls saw."""
        base = self._path(prefix)
        newest: dict[str, int] = {}
        for folder, above in ((base.parent, prefix.rpartition("/")[0]), (base, prefix)):
            for name in _scan(folder):
                stem, mark, number = name.rpartition(EPOCH)
                if mark and number.isdecimal() and (folder == base or stem == base.name):
                    key = f"{above}/{stem}" if above else stem
                    newest[key] = max(newest.get(key, 0), int(number))
        seen = {}
        for key, epoch in sorted(newest.items()):
            record = _read(self._path(key, f"{EPOCH}{epoch}"))
            if record is None or record["released"]:
                continue
            now = self._clock()
            last_epoch, last_counter, since = self._moved.get(key, (0, -1, now))
            if (last_epoch, last_counter) != (epoch, record["counter"]):
                since = now
                self._moved[key] = (epoch, record["counter"], now)
            seen[key] = LeaseView(key, record["value"], epoch, now - since <= record["ttl_s"], now - since)
        return seen

    def _path(self, key: str, suffix: str = "") -> Path:
        """Return the file of a key whose parts are safe as file names. Raises ConfigError."""
        *folders, name = parts = key.split("/")
        for part in parts:
            if not COMPONENT.fullmatch(part) or ".." in part or part.endswith(RECORD) or EPOCH in part:
                raise ConfigError(
                    f"name-resolve key {key!r}: {part!r} can't be a part: 1 to 128 letters, digits and "
                    ". _ + = @ -, a letter or digit first, without '..', '.epoch-' and a final '.json'"
                )
        return self.root.joinpath(*folders, name + suffix)


@dataclass
class Lease:
    """One epoch of a lease; the process that created its file is the only writer."""

    base: Path  # without the epoch
    key: str
    epoch: int
    value: dict[str, Any]
    ttl_s: float
    counter: int = 0
    released: bool = False

    @property
    def path(self) -> Path:
        return self.base.with_name(f"{self.base.name}{EPOCH}{self.epoch}")

    def content(self) -> str:
        fields = ("value", "epoch", "counter", "ttl_s", "released")
        return json.dumps({name: getattr(self, name) for name in fields} | {"nonce": uuid.uuid4().hex})

    def renew(self, value: dict[str, Any] | None = None) -> None:
        """Move the counter, with another value if given. Raises Stale once a higher epoch exists."""
        highest = _highest_epoch(self.base)
        if highest > self.epoch or self.released:
            reason = f"epoch {self.epoch} was released or is older than epoch {highest}"
            raise Stale(f"lease {self.key!r}: {reason}")
        self.value = self.value if value is None else value
        self._write()

    def release(self) -> None:
        """Give the key up: readers no longer see it. The tombstone tells from which epoch to count."""
        if not self.released:
            self.released = True
            self._write()

    def _write(self) -> None:
        self.counter += 1
        # On a full disk the old content is overwritten: a process that waits for room keeps its lease.
        text = self.content()
        try:
            _replace(self.path, text)
        except OSError as error:
            if not is_full(error):
                raise
            overwrite(self.path, text)


def _highest_epoch(base: Path) -> int:
    prefix = base.name + EPOCH
    marks = [name.removeprefix(prefix) for name in _scan(base.parent) if name.startswith(prefix)]
    return max((int(mark) for mark in marks if mark.isdecimal()), default=0)


def _replace(path: Path, text: str) -> None:
    # NFS may lose the reply to a rename that happened, so the file is believed rather than the error.
    try:
        write_atomic(path, text)
    except OSError:
        if _read(path) != json.loads(text):
            raise


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content, None where it is absent or stays unreadable after some tries."""
    for attempt in range(READ_TRIES):
        if attempt:
            time.sleep(READ_PAUSE_S * attempt)
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError:
            if path.name not in _scan(path.parent):
                return None
        except ValueError:
            continue
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        else:
            if isinstance(record, dict):
                return record
    return None


def _scan(folder: Path) -> list[str]:
    """Return the complete names in a folder; opening it drops what NFS remembers about absent names."""
    for attempt in range(READ_TRIES):
        try:
            with os.scandir(folder) as entries:
                return sorted(entry.name for entry in entries if not entry.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno != errno.ESTALE or attempt == READ_TRIES - 1:
                raise
            time.sleep(READ_PAUSE_S)
    return []
