"""Ledger: the history of each prompt, append-only, binary, checksummed; the rollout role's only memory.

A segment file `segment-<NNNN>.ledger` has one writer, the incarnation that created its number; a full segment
is followed by another number. Segment: 16 bytes of magic, then records. Record: `<IQ` length and xxh3-64 of
the payload, then the payload: one byte of kind, then

    GROUP   `<QiiiIId` index, begun, oldest step, oldest lineage, trajectories, tokens, sum of rewards;
            then the encoded group
    REJECT  `<Qi` index, version; then the reason in UTF-8
    BASE    msgpack: summary of the prompts whose records were trimmed
    OUTSIDE as GROUP, then `<i16sBH` environment, key, flags, number of parts; `<Q` index of each part; then
            the encoded group
    ENVIRONMENT msgpack: an environment as it registered
    DRAW    `<QHIQ` index; data set, row and visit that it has
    NOTE    `<QH` index, bytes of the key; the key in UTF-8; then the workflow's value under it, encoded

A reader stops at the first record that is short or does not match its checksum: the torn tail of a killed
writer. No process cuts a file that another one may be writing.
"""

import enum
import logging
import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from hpc_rl.core.files import Room, is_full
from hpc_rl.core.trial import fsync_dir
from hpc_rl.core.types import TrajectoryGroup
from hpc_rl.datasets.rows import Draw

logger = logging.getLogger(__name__)

MAGIC = b"hpc-rl ledger 1\n"
FRAME = struct.Struct("<IQ")
GROUP, REJECT, BASE, OUTSIDE, ENVIRONMENT, NOTE, DRAW = 1, 2, 3, 4, 5, 6, 7
FIRST_OUTSIDE = 1 << 48  # index of the first group from outside; prompts have lower ones
IS_PART, KEY_OF_CONTENT = 1, 2
_GROUP = struct.Struct("<BQiiiIId")
_OUTSIDE = struct.Struct("<i16sBH")
_REJECT = struct.Struct("<BQi")
_NOTE = struct.Struct("<BQH")
_DRAW = struct.Struct("<BQHIQ")
_SEGMENT = re.compile(r"segment-(\d+)\.ledger")
MAX_KEY_BYTES = 1000  # of a note
MAX_NOTE_BYTES = 16 << 20
SEGMENT_BYTES = 256 << 20  # a full segment can be trimmed while its writer lives


class RejectReason(enum.StrEnum):
    """Reason for a rejection, as stored in the ledger; a rejection is permanent."""

    STALE = "stale"  # its group got too old for its batch
    TOO_LONG = "too_long"
    REFUSED = "refused"  # every server refused the input
    WORKFLOW_NONE = "workflow_none"
    BAD_GROUP = "bad_group"
    EXCEPTION = "exception"  # of the workflow or of a request, after the configured retries
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_EXCEPTION = "reward_exception"


# reasons that can change with the user's code
OF_USER_CODE = frozenset(RejectReason) - {RejectReason.STALE, RejectReason.TOO_LONG, RejectReason.REFUSED}


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Position of a record."""

    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A finished group without its tokens, which `Ledger.fetch_group` fetches."""

    index: int
    begun: int  # the trainer's version when the prompt was issued
    oldest_step: int
    oldest_lineage: int
    num_trajectories: int
    num_tokens: int
    reward_sum: float

    @classmethod
    def from_group(cls, group: TrajectoryGroup, begun: int) -> "GroupRecord":
        return cls(
            group.index,
            begun,
            group.oldest_step(),
            min(group.lineages(), default=0),
            len(group.trajectories),
            sum(len(trajectory.ids) for trajectory in group.trajectories),
            float(sum(trajectory.reward for trajectory in group.trajectories)),
        )


@dataclass(frozen=True, slots=True)
class OutsideRecord(GroupRecord):
    """A group from an environment; its index gives the order of acknowledgement."""

    env_id: int = -1
    key: bytes = b""  # 16 bytes, equal for a repeated group
    key_of_content: bool = False  # the sender gave no key
    is_part: bool = False  # waits for others to make a whole group
    joins: tuple[int, ...] = ()  # indexes of its parts

    @property
    def flags(self) -> int:
        return IS_PART * self.is_part | KEY_OF_CONTENT * self.key_of_content


@dataclass(frozen=True, slots=True)
class RejectRecord:
    index: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class BaseRecord:
    content: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EnvironmentRecord:
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """A value that a workflow made once for a prompt; `value` is encoded."""

    index: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class DrawRecord:
    """The row of a prompt index."""

    index: int
    draw: Draw


Record = GroupRecord | RejectRecord | BaseRecord | EnvironmentRecord | NoteRecord | DrawRecord


def check_note(key: object, value: bytes = b"") -> None:
    """Raise ValueError if key or value is not allowed for a note."""
    if not isinstance(key, str) or not 0 < len(key.encode()) <= MAX_KEY_BYTES:
        raise ValueError(f"the key of a note must be a text of 1 to {MAX_KEY_BYTES} bytes, got {key!r:.80}")
    if len(value) > MAX_NOTE_BYTES:
        raise ValueError(f"note {key!r} has {len(value)} bytes; at most {MAX_NOTE_BYTES} are kept")


class LedgerDamaged(OSError):
    """A needed record can't be read."""


def get_segment_path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:04d}.ledger"


def list_segments(folder: Path) -> list[int]:
    """Return the numbers of the existing segments, ascending."""
    names = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _SEGMENT.fullmatch(name)))


def load_segment(folder: Path, number: int) -> Iterator[tuple[RecordPlace, Record]]:
    """Yield the records up to the end or the first damaged one; none if the segment is gone."""
    try:
        file = get_segment_path(folder, number).open("rb")
    except FileNotFoundError:
        return
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        offset = len(MAGIC)
        while len(frame := file.read(FRAME.size)) == FRAME.size:
            length, checksum = FRAME.unpack(frame)
            payload = file.read(length)
            if len(payload) < length or xxhash.xxh3_64_intdigest(payload) != checksum:
                break
            yield RecordPlace(number, offset), _unpack(payload)
            offset += FRAME.size + length
        size = os.fstat(file.fileno()).st_size
        if offset < size:
            form = "file %s of the batch log ends with an incomplete record; its %d bytes are ignored"
            logger.warning(form, get_segment_path(folder, number).name, size - offset)


def load_group(fd: int, place: RecordPlace) -> bytes:
    """Return the encoded group of a GROUP record from its segment's open file. Raises LedgerDamaged."""
    where = f"batch log, file {get_segment_path(Path('rollout'), place.segment)}, byte {place.offset}"
    try:
        length, checksum = FRAME.unpack(os.pread(fd, FRAME.size, place.offset))
        payload = os.pread(fd, length, place.offset + FRAME.size)
    except struct.error as error:  # a later incarnation has rewritten it
        raise LedgerDamaged(_describe_loss(place.segment)) from error
    except OSError as error:
        raise LedgerDamaged(f"{where}: {error}") from error
    if len(payload) < length or xxhash.xxh3_64_intdigest(payload) != checksum:
        raise LedgerDamaged(f"{where}: the record of a group of trajectories is damaged")
    if payload[0] not in (GROUP, OUTSIDE):
        raise LedgerDamaged(f"{where}: the record is not a group of trajectories")
    return payload[_measure_head(payload) :]


def _describe_loss(segment: int) -> str:
    name = get_segment_path(Path("rollout"), segment)
    return f"{name} is missing or truncated, but batches need it; restore it from a copy"


def _measure_head(payload: bytes) -> int:
    """Return the number of bytes of a group's payload before the encoded group."""
    if payload[0] == GROUP:
        return _GROUP.size
    num_parts = _OUTSIDE.unpack_from(payload, _GROUP.size)[-1]
    return _GROUP.size + _OUTSIDE.size + 8 * num_parts


def _unpack(payload: bytes) -> Record:
    if payload[0] == GROUP:
        return GroupRecord(*_GROUP.unpack_from(payload)[1:])
    if payload[0] == REJECT:
        _, index, version = _REJECT.unpack_from(payload)
        return RejectRecord(index, version, payload[_REJECT.size :].decode())
    if payload[0] == OUTSIDE:
        env_id, key, flags, num_parts = _OUTSIDE.unpack_from(payload, _GROUP.size)
        joins = struct.unpack_from(f"<{num_parts}Q", payload, _GROUP.size + _OUTSIDE.size)
        group = GroupRecord(*_GROUP.unpack_from(payload)[1:])
        more = (env_id, key, bool(flags & KEY_OF_CONTENT), bool(flags & IS_PART), joins)
        return OutsideRecord(*astuple(group), *more)  # type: ignore[call-arg]
    if payload[0] == NOTE:
        _, index, size = _NOTE.unpack_from(payload)
        value_at = _NOTE.size + size
        return NoteRecord(index, payload[_NOTE.size : value_at].decode(), payload[value_at:])
    if payload[0] == DRAW:
        _, index, *draw = _DRAW.unpack(payload)
        return DrawRecord(index, Draw(*draw))
    content = msgpack.unpackb(payload[1:], strict_map_key=False)
    return EnvironmentRecord(content) if payload[0] == ENVIRONMENT else BaseRecord(content)


def _write_durably(fd: int, data: bytes) -> None:
    """Append all of it, or nothing as far as the file's position goes: then the call can be repeated.

    A network file system may report only at the fsync that the disk is full, and drop the bytes: the repeated
    call writes them again.
    """
    start, view = os.lseek(fd, 0, os.SEEK_CUR), memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except OSError:
        os.lseek(fd, start, os.SEEK_SET)
        raise


class Ledger:
    """One incarnation's writer, and the reader of all segments.

    `append_*` only buffer; `commit` writes and fsyncs everything appended before it. Append from one thread,
    commit from any. On a full disk a commit waits for room until `close` is called.

    After a segment reaches `segment_bytes`, the next one begins.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.segment_bytes = segment_bytes
        self.room = Room(folder)
        self._appending = threading.RLock()  # protects the buffer and the place of the next record
        self._committing = threading.Lock()
        self._fds: dict[int, int] = {}  # of segments that groups were read from
        self._waiting: list[tuple[int, bytes]] = []  # segment, bytes
        self._write_fds: dict[int, int] = {}
        self.begin_segment()

    def append_group(self, record: GroupRecord, encoded: bytes) -> RecordPlace:
        return self._append(_GROUP.pack(GROUP, *astuple(record)) + encoded)

    def append_outside(self, record: OutsideRecord, encoded: bytes) -> RecordPlace:
        group = _GROUP.pack(OUTSIDE, *astuple(record)[:7])
        more = _OUTSIDE.pack(record.env_id, record.key, record.flags, len(record.joins))
        return self._append(group + more + struct.pack(f"<{len(record.joins)}Q", *record.joins) + encoded)

    def append_environment(self, facts: dict[str, Any]) -> RecordPlace:
        return self._append(bytes([ENVIRONMENT]) + msgpack.packb(facts))

    def append_reject(self, record: RejectRecord) -> RecordPlace:
        return self._append(_REJECT.pack(REJECT, record.index, record.version) + record.reason.encode())

    def append_note(self, record: NoteRecord) -> RecordPlace:
        key = record.key.encode()
        return self._append(_NOTE.pack(NOTE, record.index, len(key)) + key + record.value)

    def append_draw(self, record: DrawRecord) -> RecordPlace:
        return self._append(_DRAW.pack(DRAW, record.index, *astuple(record.draw)))

    def append_base(self, content: dict[str, Any]) -> RecordPlace:
        return self._append(bytes([BASE]) + msgpack.packb(content))

    def _append(self, payload: bytes) -> RecordPlace:
        data = FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
        with self._appending:
            if self._size >= self.segment_bytes:
                try:
                    self._create_segment()
                except OSError as error:
                    # on a full disk this segment grows instead: the appending thread must not wait
                    if not is_full(error):
                        raise
            place = RecordPlace(self.segment, self._size)
            self._waiting.append((self.segment, data))
            self._size += len(data)
        return place

    def begin_segment(self) -> None:
        """Begin a new segment for all later records, with a higher number than any other."""
        self.room.write("the batch log", self._create_segment)

    @property
    def uncommitted(self) -> bool:
        return bool(self._waiting)

    def commit(self) -> None:
        """Make all appended records durable. After an OSError the ledger must not be used any more."""
        with self._committing:
            with self._appending:
                waiting, self._waiting = self._waiting, []
                current = self.segment
            for number in dict.fromkeys(number for number, _ in waiting):
                data = b"".join(data for owner, data in waiting if owner == number)
                self.room.write("the batch log", partial(_write_durably, self._write_fds[number], data))
            # a later segment may be open by now
            for number in [number for number in list(self._write_fds) if number < current]:
                os.close(self._write_fds.pop(number))

    def fetch_group(self, place: RecordPlace) -> bytes:
        """Return the encoded group of a committed GROUP record. Raises LedgerDamaged."""
        try:
            if place.segment not in self._fds:
                self._fds[place.segment] = os.open(get_segment_path(self.folder, place.segment), os.O_RDONLY)
        except FileNotFoundError as error:
            raise LedgerDamaged(_describe_loss(place.segment)) from error
        except OSError as error:
            raise LedgerDamaged(f"the batch log can't be read: {error}") from error
        return load_group(self._fds[place.segment], place)

    def check_owned(self, numbers: set[int]) -> None:
        """Raise LedgerDamaged if one of these segments was deleted, as by a later owner of the ledger."""
        gone = [number for number in sorted(numbers) if not get_segment_path(self.folder, number).exists()]
        if gone:
            names = ", ".join(get_segment_path(self.folder, number).name for number in gone)
            raise LedgerDamaged(f"a later start of the rollout role deleted {names} of the batch log")

    def drop_segment(self, number: int) -> None:
        """Delete a segment that is not needed."""
        if number in self._fds:
            os.close(self._fds.pop(number))
        get_segment_path(self.folder, number).unlink(missing_ok=True)

    def count_bytes(self) -> int:
        """Return the bytes of all segments on disk."""
        size = 0
        for number in list_segments(self.folder):
            with suppress(FileNotFoundError):  # deleted meanwhile
                size += get_segment_path(self.folder, number).stat().st_size
        return size

    def close(self) -> None:
        self.room.closing.set()
        self.commit()
        for fd in (*self._fds.values(), *self._write_fds.values()):
            os.close(fd)
        self._fds, self._write_fds = {}, {}

    def _create_segment(self) -> None:
        with self._appending:
            self.folder.mkdir(parents=True, exist_ok=True)
            number = max(list_segments(self.folder), default=-1) + 1
            while True:
                try:
                    path = get_segment_path(self.folder, number)
                    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                    break
                except FileExistsError:
                    number += 1
            try:
                os.write(fd, MAGIC)
                os.fsync(fd)
                fsync_dir(self.folder)
            except OSError:
                os.close(fd)
                path.unlink()  # it is still empty
                raise
            self._write_fds[number] = fd
            self.segment, self._size = number, len(MAGIC)
