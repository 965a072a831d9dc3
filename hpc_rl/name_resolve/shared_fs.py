"""Records and leases in a shared directory: a JSON file per record and per epoch of a lease, no locks.

Layout: record `a/b/c` is `<root>/a/b/c.json`; epoch N of the lease on `a/b` is `<root>/a/b.epoch-N`. Each
file has one writer; if several processes create a file, exactly one wins (link). Names with a leading dot are
incomplete: readers skip them.

Heartbeats: a lease among many shows them in the name of a second, empty file, `b.epoch-N.beat-C-W`, which
its holder renames: C is the counter, W the counter of the content. So a listing shows which leases live and
which have a new value; a reader opens only these. A lease without that file is replaced at each heartbeat.

Durability: records and new epochs are fsynced before they get their names. Heartbeats and directories are
not: after a crash of the file server, live processes write lost files again.

Load: a lease is renewed every sixth of its time to live, and written when its value changes. Who polls the
leases of servers reads their roster (`roster.py`).

Caches: NFS caches the absence of a name for up to a minute, but opening the parent directory revalidates it.
So an absent name is looked up by listing its directory, and content is polled by open and read, never by
mtime. The process that takes an epoch removes all epochs before the previous one; a process with an old
listing that creates one of these again lists anew, and takes a higher epoch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_rl.core.errors import ConfigError, Stale
from hpc_rl.core.files import is_full
from hpc_rl.core.trial import create_exclusive, overwrite, write_atomic

LEASE_TTL_S = 60.0  # file servers may be away, and absent names be cached, for this long
HEARTBEATS_PER_TTL = 6
TRIES_PER_TTL = 20  # while writing fails
KEPT_EPOCHS = 2

COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,127}")
FIRST_POLL_S, LAST_POLL_S = 0.05, 1.0
READ_TRIES = 4
READ_PAUSE_S = 0.02
READ_BYTES = 16 << 20  # more than any record: a short read ends a regular file
EPOCH = ".epoch-"
BEAT = re.compile(r"\.beat-(\d+)-(\d+)")  # after the name of a lease: counter, and counter of its content
RECORD = ".json"


@dataclass(frozen=True)
class LeaseView:
    """A lease as judged by a reader: alive if its counter moved within its time to live."""

    key: str
    value: dict[str, Any]
    epoch: int
    alive: bool
    age_s: float  # since the last observed move of the counter, by the reader's clock
    counter: int = 0
    ttl_s: float = 0.0


class LeaseMark(NamedTuple):
    """What a listing tells about the newest epoch of a lease.

    The content is new if one of the first three is. A renewal that replaces the file changes the inode; two
    of them may bring the old one back, and a full disk keeps it.
    """

    epoch: int
    inode: int
    written: int = 0  # counter of the content; 0 without a beat
    counter: int = 0  # of the newest beat

    @property
    def content(self) -> tuple[int, int, int]:
        return self[:3]


class NameResolve:
    """Records and leases as files below one directory, created by the first write.

    Keys are `a/b/c` of safe components (ConfigError otherwise); values are JSON objects. `clock` returns
    seconds of this reader; it alone judges leases.
    """

    def __init__(self, root: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = Path(root)
        self.clock = clock
        self._moved: dict[str, tuple[int, int, float]] = {}  # key -> epoch, counter, first seen

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Write a record, or replace it."""
        path = self._make_path(key, RECORD)
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, json.dumps({"value": value, "nonce": uuid.uuid4().hex}))

    def wait(self, key: str, timeout_s: float) -> dict[str, Any]:
        """Return the record once it exists. Raises TimeoutError that names the key."""
        path, deadline, pause_s = self._make_path(key, RECORD), time.monotonic() + timeout_s, FIRST_POLL_S
        while (record := _load(path)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"no process has written {key!r} to the name-resolve directory within {timeout_s:g} s"
                )
            # many readers must not ask the file server in step
            time.sleep(min(pause_s * random.uniform(0.8, 1.2), left_s))
            pause_s = min(2 * pause_s, LAST_POLL_S)
        return record["value"]

    def lease(
        self, key: str, value: dict[str, Any], ttl_s: float = LEASE_TTL_S, *, has_beats: bool = False
    ) -> Lease:
        """Take over the key with the next epoch: the highest wins, holders of lower epochs are stale.

        With `has_beats` a heartbeat is a rename that listings show: for many leases that one process watches.
        """
        path = self._make_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        epoch = max(_list_epochs(path), default=0) + 1
        while True:
            lease = Lease(
                path,
                key,
                epoch,
                value,
                ttl_s,
                clock=self.clock,
                make_folder=self._make_folder_again,
                has_beats=has_beats,
            )
            won = create_exclusive(lease.path, lease.encode())
            epochs = _list_epochs(path)  # fresh: the attempt to create a name revalidated the directory
            highest = max(epochs, default=0)
            if won and highest == epoch:
                for name in _list_names_until(path, epoch - KEPT_EPOCHS):
                    path.with_name(name).unlink(missing_ok=True)
                return lease
            epoch = max(highest, epoch) + 1

    def end(self, key: str, holder: Mapping[str, Any], known: LeaseView | None = None) -> None:
        """End the lease of an exited process, if its value agrees with `holder`.

        Creates the next epoch as released: readers see the lease end before its time to live is over. If the
        lease as it was `known` lately agrees, its folder, which may have thousands of names, is not listed;
        if it has a newer epoch, nothing is created.
        """

        def agrees(view: LeaseView | None) -> bool:
            return view is not None and all(view.value.get(one, it) == it for one, it in holder.items())

        seen = known if agrees(known) else self.list_leases(key).get(key)
        if seen is not None and agrees(seen):
            over = Lease(self._make_path(key), key, seen.epoch + 1, seen.value, seen.ttl_s, released=True)
            create_exclusive(over.path, over.encode())

    def list_leases(self, prefix: str) -> dict[str, LeaseView]:
        """Return the leases on `prefix` and the keys directly below it, judged by earlier observations."""
        views = {key: self.load_lease(key, mark) for key, mark in self.list_epochs(prefix).items()}
        return {key: view for key, view in views.items() if view is not None}

    def list_epochs(self, prefix: str) -> dict[str, LeaseMark]:
        """Return the mark of each lease of `list_leases`. It opens no file."""
        base = self._make_path(prefix)
        newest: dict[str, LeaseMark] = {}
        beats: dict[tuple[str, int], tuple[int, int]] = {}  # by key and epoch
        for folder, above in ((base.parent, prefix.rpartition("/")[0]), (base, prefix)):
            only = "" if folder is base else base.name
            for name, inode in _scan(folder).items():
                stem, _, rest = name.rpartition(EPOCH)
                number, beat = _split_epoch(rest)
                if not stem or number < 0 or (only and stem != only):
                    continue
                key = f"{above}/{stem}" if above else stem
                if beat:  # a rename whose reply was lost may leave two
                    beats[key, number] = max(beats.get((key, number), beat), beat)
                else:
                    newest[key] = max(newest.get(key, LeaseMark(0, 0)), LeaseMark(number, inode))
        marked = {key: _add_beat(mark, beats.get((key, mark.epoch))) for key, mark in newest.items()}
        return dict(sorted(marked.items()))

    def load_lease(self, key: str, mark: LeaseMark) -> LeaseView | None:
        """Return the lease with this mark; None if it is released, absent or unreadable."""
        record = _load(self._make_path(key, f"{EPOCH}{mark.epoch}"))
        if record is None or record["released"]:
            return None
        fields = (record["value"], mark.epoch, True, 0.0, record["counter"], record["ttl_s"])
        return self.judge(LeaseView(key, *fields), mark)

    def judge(self, view: LeaseView, mark: LeaseMark) -> LeaseView:
        """Return a lease as it is now, by the mark of a new listing of the same epoch."""
        counter = max(view.counter, mark.counter)
        age_s = self.note_counter(view.key, view.epoch, counter)
        alive = age_s <= view.ttl_s
        return LeaseView(view.key, view.value, view.epoch, alive, age_s, counter, view.ttl_s)

    def note_counter(self, key: str, epoch: int, counter: int, age_s: float = 0.0) -> float:
        """Note the counter of a lease, and return how long it has not moved.

        `age_s`: how long another observer has seen this counter.
        """
        now = self.clock()
        last_epoch, last_counter, since = self._moved.get(key, (0, -1, now))
        if (last_epoch, last_counter) != (epoch, counter):
            since = now - age_s
            self._moved[key] = (epoch, counter, since)
        return now - since

    def write_volatile(self, key: str, value: dict[str, Any]) -> None:
        """Write a record that is soon written again, without fsync. Raises OSError."""
        path, text = self._make_path(key, RECORD), json.dumps({"value": value}, separators=(",", ":"))
        try:
            _replace(path, text, durable=False)
        except FileNotFoundError:  # the first record in its folder, or the directory was removed
            self._make_folder_again(path)
            _replace(path, text, durable=False)

    def load_record(self, key: str) -> bytes:
        """Return the content of a record's file by one open and one read. Raises OSError."""
        path = self._make_path(key, RECORD)
        try:
            return _load_bytes(path)
        except OSError as error:
            if error.errno != errno.ESTALE:  # replaced between open and read
                raise
            return _load_bytes(path)

    def _make_folder_again(self, path: Path) -> None:
        """Create the removed folder of a key again, unless the whole trial was removed."""
        if self.root.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)

    def _make_path(self, key: str, suffix: str = "") -> Path:
        """Return the file of a key. Raises ConfigError for parts that are unsafe as file names."""
        *folders, name = parts = key.split("/")
        for part in parts:
            if not COMPONENT.fullmatch(part) or ".." in part or part.endswith(RECORD) or EPOCH in part:
                raise ConfigError(
                    f"name-resolve key {key!r}: {part!r} is not allowed: use 1 to 128 letters, digits and "
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
    clock: Callable[[], float] = time.monotonic
    make_folder: Callable[[Path], None] = lambda path: None
    has_beats: bool = False  # see NameResolve.lease

    def __post_init__(self) -> None:
        self._renewed_at = self.clock()
        self._failed_at = -math.inf
        self._written = 0  # counter of the content
        self._beat: Path | None = None

    @property
    def path(self) -> Path:
        return self.base.with_name(f"{self.base.name}{EPOCH}{self.epoch}")

    def encode(self) -> str:
        fields = ("value", "epoch", "counter", "ttl_s", "released")
        return json.dumps({name: getattr(self, name) for name in fields} | {"nonce": uuid.uuid4().hex})

    def is_due(self, value: dict[str, Any] | None = None) -> bool:
        """Return whether to renew now: the value has changed, or a heartbeat is due. No file access."""
        changed, now = value is not None and value != self.value, self.clock()
        if now - self._failed_at < self.ttl_s / TRIES_PER_TTL:
            return False
        return changed or now - self._renewed_at >= self.ttl_s / HEARTBEATS_PER_TTL

    def check(self) -> None:
        """Raise Stale once a higher epoch exists."""
        highest = max(_list_epochs(self.base), default=0)
        if highest > self.epoch or self.released:
            reason = f"another process owns the key now, or it was released (owner {self.epoch} of {highest})"
            raise Stale(f"this process no longer owns {self.key!r} in the name-resolve directory: {reason}")

    def renew(self, value: dict[str, Any] | None = None) -> None:
        """Advance the counter, with a new value if given. Raises Stale once a higher epoch exists."""
        self.check()
        changed = value is not None and value != self.value
        self.value = self.value if value is None else value
        if changed or not self.has_beats or not self._show_beat(self.counter + 1):
            self._write()

    def release(self) -> None:
        """Release the key: readers no longer see it. The file stays, so that epochs keep increasing."""
        if not self.released:
            self.released = True
            self._write()

    def _write(self) -> None:
        self.counter += 1
        self._failed_at = self.clock()
        # On a full disk, overwrite the old content: a process that waits for room keeps its lease.
        text = self.encode()
        try:
            _replace(self.path, text, durable=False)
        except FileNotFoundError:  # the directory was removed
            self.make_folder(self.path)
            _replace(self.path, text, durable=False)
        except OSError as error:
            if not is_full(error):
                raise
            overwrite(self.path, text)
        self._written = self.counter
        self._renewed_at, self._failed_at = self.clock(), -math.inf
        if self.has_beats:
            self._show_beat(self.counter)

    def _show_beat(self, counter: int) -> bool:
        """Show the counter in the name of the second file; return False if that fails."""
        path = self.path.with_name(f"{self.path.name}.beat-{counter}-{self._written}")
        before, self._beat = self._beat, None
        try:
            if before is not None:
                with suppress(FileNotFoundError):  # the directory was removed
                    os.rename(before, path)
                    os.utime(path)  # status/heartbeat.py compares the times of leases
                    self._beat = path
            if self._beat is None:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except OSError:
            return False
        self._beat, self.counter = path, counter
        self._renewed_at, self._failed_at = self.clock(), -math.inf
        return True


def _split_epoch(text: str) -> tuple[int, tuple[int, int] | None]:
    """Return the epoch of a name, -1 without one, and its beat: counter, and counter of the content."""
    number, dot, _ = text.partition(".")
    beat = BEAT.fullmatch(text, len(number)) if dot else None
    if not number.isdecimal() or (dot and beat is None):
        return -1, None
    return int(number), None if beat is None else (int(beat[1]), int(beat[2]))


def _add_beat(mark: LeaseMark, beat: tuple[int, int] | None) -> LeaseMark:
    return mark if beat is None else mark._replace(counter=beat[0], written=beat[1])


def _list_epochs(base: Path) -> list[int]:
    prefix = base.name + EPOCH
    marks = [name.removeprefix(prefix) for name in _scan(base.parent) if name.startswith(prefix)]
    return [int(mark) for mark in marks if mark.isdecimal()]


def _list_names_until(base: Path, epoch: int) -> list[str]:
    """Return the names of the files of a lease up to an epoch."""
    prefix = base.name + EPOCH
    names = [name for name in _scan(base.parent) if name.startswith(prefix)]
    return [name for name in names if 0 <= _split_epoch(name.removeprefix(prefix))[0] <= epoch]


def _replace(path: Path, text: str, durable: bool = True) -> None:
    # NFS may lose the reply to a successful rename, so trust the file rather than the error.
    try:
        write_atomic(path, text, durable=durable)
    except OSError:
        if _load(path) != json.loads(text):
            raise


def _load(path: Path) -> dict[str, Any] | None:
    """Return the content, None if it is absent or still unreadable after some tries."""
    for attempt in range(READ_TRIES):
        if attempt:
            time.sleep(READ_PAUSE_S * attempt)
        try:
            record = json.loads(_load_bytes(path))
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


def _load_bytes(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(fd, READ_BYTES)]
        while len(parts[-1]) == READ_BYTES:
            parts.append(os.read(fd, READ_BYTES))
    finally:
        os.close(fd)
    return b"".join(parts)


def _scan(folder: Path) -> dict[str, int]:
    """Return the complete names in a folder, with inodes; opening it drops NFS's cache of absent names."""
    for attempt in range(READ_TRIES):
        try:
            with os.scandir(folder) as entries:
                return {entry.name: entry.inode() for entry in entries if not entry.name.startswith(".")}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            if error.errno != errno.ESTALE or attempt == READ_TRIES - 1:
                raise
            time.sleep(READ_PAUSE_S)
    return {}
