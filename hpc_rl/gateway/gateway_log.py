"""Gateway log: what made each token of each completion, found again by token ids. Append-only and bounded.

Environments return token ids, often no log-probabilities, and never weight versions: `match` finds the logged
completions in a sequence. Text is never tokenized for that. A segment `segment-<NNNN>.log` has one writer,
the process that created it; it holds msgpack records, one after the other. Gateways in several processes may
share a folder, and any process may read what they write. Records are not fsynced: they survive a killed
process, which is what the log is for, and are advice after a lost node.
"""

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from hpc_rl.core.types import Turn, WeightVersion

logger = logging.getLogger(__name__)
NUM_SEGMENTS = 16  # the oldest is deleted as a whole
MAX_BYTES = 1 << 30  # of all segments together, about
_SEGMENT = re.compile(r"segment-(\d+)\.log")


@dataclass(slots=True)
class Behavior:
    """What the log knows of each token of a sequence. Shapes: [L].

    `logprobs` counts where `has_logprob`; `lineages` and `steps` are -1 where the version is unknown. A
    version without a log-probability is that of the same completion after another prompt. `temperatures` are
    those of the requests, NaN where nothing is known. `finish_reason` is that of the completion at whose end
    the last token is, "" where no completion ends there.
    """

    logprobs: np.ndarray
    has_logprob: np.ndarray
    lineages: np.ndarray
    steps: np.ndarray
    temperatures: np.ndarray
    finish_reason: str = ""

    @classmethod
    def unknown(cls, length: int) -> "Behavior":
        versions = np.full((2, length), -1, np.int32)
        temperatures = np.full(length, np.nan, np.float32)
        return cls(
            np.zeros(length, np.float32), np.zeros(length, bool), versions[0], versions[1], temperatures
        )


@dataclass(slots=True)
class _Record:
    """A completion as it was logged."""

    temperature: float
    ids: np.ndarray
    logprobs: np.ndarray
    spans: list[list[int]]  # lineage, step, start, end
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    output_hash: int
    segment: int
    offset: int
    size: int


class _Earlier:
    """Where in a sequence completions of the log begin; found once, when it is first asked for."""

    def __init__(self, ids: np.ndarray, by_prompt: Mapping[int, Sequence[_Place]]) -> None:
        self._ids, self._by_prompt = ids, by_prompt
        self._found: list[tuple[int, Sequence[_Place]]] | None = None

    def before(self, at: int) -> Iterator[tuple[int, Sequence[_Place]]]:
        """Yield beginnings before `at` and the completions there, the latest first."""
        if self._found is None:
            self._found, prefix = [], xxhash.xxh3_64()
            for first in range(len(self._ids)):
                if places := self._by_prompt.get(prefix.intdigest()):
                    self._found.append((first, places))
                prefix.update(self._ids[first : first + 1].tobytes())
        return (one for one in reversed(self._found) if one[0] < at)


@dataclass(slots=True)
class _Segment:
    fd: int
    size: int = 0
    places: list[tuple[int, _Place]] = field(default_factory=list)  # with the hash of the prompt


class GatewayLog:
    """The log in a folder: what this process appends, and what others did.

    Args:
        folder: Holds the segments; made if it is not there.
        max_records: Number of records, about: each costs some 200 bytes of memory.
    """

    def __init__(self, folder: Path, max_records: int = 500_000) -> None:
        self.folder = folder
        self.num_lost = 0  # completions that could not be written
        self._max_records = max_records
        self._by_prompt: dict[int, list[_Place]] = {}
        self._by_output: dict[int, _Place] = {}
        self._segments: dict[int, _Segment] = {}
        self._waiting: list[tuple[int, int, bytes]] = []
        self._writing = asyncio.Lock()
        self._write_lock = threading.Lock()  # a file system may take its time: match does not wait for it
        self._lock = threading.Lock()  # of the index
        folder.mkdir(parents=True, exist_ok=True)
        self._current = -1  # none of ours yet
        self._catch_up()

    def status(self) -> dict[str, int]:
        """Return sizes, for status pages."""
        with self._lock:
            kept = self._segments.values()
            records, size = sum(len(one.places) for one in kept), sum(one.size for one in kept)
        return {"records": records, "bytes": size, "lost": self.num_lost}

    async def append(self, prompt_ids: Sequence[int], turns: Sequence[Turn], temperature: float) -> None:
        """Log completions of one prompt; once it returns they survive the end of this process.

        A failure to write is logged and counted: those completions are unknown later.
        """
        prompt_hash, now = _hash(_array(prompt_ids)), time.time()
        for turn in turns:
            ids = _array(turn.output_ids)
            logprobs = np.asarray(turn.output_logprobs, np.float32)
            content = (now, temperature, ids.tobytes(), logprobs.tobytes(), _spans(turn), turn.finish_reason)
            output_hash = _hash(ids)
            packed = msgpack.packb((prompt_hash, output_hash, *content))
            self._waiting.append((prompt_hash, output_hash, packed))
        async with self._writing:
            # whoever was first wrote for all that waited
            if self._waiting:
                waiting, self._waiting = self._waiting, []
                await asyncio.to_thread(self._write, waiting)

    def match(self, ids: Sequence[int] | np.ndarray, mask: Sequence[bool] | np.ndarray) -> Behavior:
        """Return what made the tokens of a sequence where `mask` is true. Reads files: call it in a thread.

        A run of such tokens may be a completion, a part of one, or one with tokens behind it that no server
        made, which stay unknown.
        """
        sequence, chosen = _array(ids), np.asarray(mask, bool)
        with self._lock:
            while True:
                found = Behavior.unknown(len(sequence))
                earlier = _Earlier(sequence, self._by_prompt)
                for start, end in _runs(chosen):
                    found.finish_reason = self._match_run(sequence, start, end, found, earlier)
                if found.has_logprob[chosen].all() or not self._catch_up():
                    return found

    def close(self) -> None:
        with self._lock:
            for segment in self._segments.values():
                os.close(segment.fd)
            self._segments.clear()

    def _match_run(self, ids: np.ndarray, start: int, end: int, found: Behavior, earlier: "_Earlier") -> str:
        """Fill in what is known of a run; return how the completion finished that ends where the run ends."""
        at, finish_reason = start, ""
        while at < end:
            begun = self._longest(ids, at, at, end) or self._begun_before(ids, at, end, earlier)
            first, record = begun or (at, None)
            if record is None:
                break
            stop = min(end, first + _common(record.ids, ids[first:end]))
            _copy(record, first, at, stop, found, with_logprobs=True)
            at, finish_reason = stop, record.finish_reason if stop == first + len(record.ids) else ""
        same = self._by_output.get(_hash(ids[start:end])) if at == start else None
        record = self._read(same) if same else None
        if record is not None and np.array_equal(record.ids, ids[start:end]):
            _copy(record, start, start, end, found, with_logprobs=False)
            return record.finish_reason
        return finish_reason if at == end else ""

    def _longest(self, ids: np.ndarray, first: int, at: int, end: int) -> tuple[int, _Record] | None:
        """Return the completion of ids[:first] that has most tokens in common, if it reaches beyond `at`."""
        return self._best(self._by_prompt.get(_hash(ids[:first]), ()), ids, first, at, end)

    def _begun_before(
        self, ids: np.ndarray, at: int, end: int, earlier: "_Earlier"
    ) -> tuple[int, _Record] | None:
        """Return a completion that began before `at`: part of it is masked."""
        for first, places in earlier.before(at):
            best = self._best(places, ids, first, at, end)
            if best is not None:
                return best
        return None

    def _best(
        self, places: Sequence[_Place], ids: np.ndarray, first: int, at: int, end: int
    ) -> tuple[int, _Record] | None:
        if not places:
            return None
        output_hash = _hash(ids[first:end])
        exact = [place for place in places if place.output_hash == output_hash]
        records = [record for place in exact[-1:] or places if (record := self._read(place))]
        best = max(records, key=lambda record: _common(record.ids, ids[first:end]), default=None)
        return (first, best) if best and first + _common(best.ids, ids[first:end]) > at else None

    def _read(self, place: _Place) -> _Record | None:
        try:
            raw = os.pread(self._segments[place.segment].fd, place.size, place.offset)
            return _unpack(msgpack.unpackb(raw))
        except (OSError, ValueError, TypeError) as error:
            logger.warning("gateway log, segment %d offset %d: %s", place.segment, place.offset, error)
            return None

    def _write(self, waiting: list[tuple[int, int, bytes]]) -> None:
        with self._write_lock:
            try:
                self._append(b"".join(packed for *_, packed in waiting))
            except OSError as error:
                self.num_lost += len(waiting)
                logger.warning("the gateway log can't be written, %d are lost: %s", self.num_lost, error)
                return
            with self._lock:
                for prompt_hash, output_hash, packed in waiting:
                    self._index(prompt_hash, output_hash, self._current, len(packed))

    def _append(self, data: bytes) -> None:
        """Write all or nothing to the current segment. Raises OSError."""
        segment = self._segments.get(self._current)
        size, num_records = MAX_BYTES // NUM_SEGMENTS, self._max_records // NUM_SEGMENTS
        if segment is None or segment.size >= size or len(segment.places) >= num_records:
            segment = self._begin_segment()
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(segment.fd, left) :]
        except OSError:
            os.ftruncate(segment.fd, segment.size)
            raise

    def _index(self, prompt_hash: int, output_hash: int, number: int, size: int) -> None:
        segment = self._segments[number]
        place = _Place(output_hash, number, segment.size, size)
        segment.size += size
        segment.places.append((prompt_hash, place))
        self._by_prompt.setdefault(prompt_hash, []).append(place)
        self._by_output[output_hash] = place

    def _begin_segment(self) -> _Segment:
        with self._lock:
            number = max(self._numbers(), default=-1) + 1
            path = self.folder / f"segment-{number:04d}.log"
            segment = _Segment(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600))
            self._segments[number], self._current = segment, number
            while len(self._segments) > NUM_SEGMENTS:
                self._drop(min(self._segments))
            return segment

    def _numbers(self) -> list[int]:
        return sorted(
            int(found[1]) for name in os.listdir(self.folder) if (found := _SEGMENT.fullmatch(name))
        )

    def _drop(self, number: int) -> None:
        segment = self._segments.pop(number)
        for prompt_hash, place in segment.places:
            same = self._by_prompt[prompt_hash]
            same.remove(place)
            if not same:
                del self._by_prompt[prompt_hash]
            if self._by_output.get(place.output_hash) is place:
                del self._by_output[place.output_hash]
        os.close(segment.fd)
        (self.folder / f"segment-{number:04d}.log").unlink(missing_ok=True)

    def _catch_up(self) -> bool:
        """Index what other processes wrote, and forget what they deleted. Return whether there was more."""
        numbers = self._numbers()
        found = [self._load(number) for number in numbers if number != self._current]
        for number in self._segments.keys() - {*numbers, self._current}:
            self._drop(number)
        return any(found)

    def _load(self, number: int) -> bool:
        """Index what is new in a segment, but for a record that is torn, or still being written."""
        if number not in self._segments:
            with suppress(FileNotFoundError):
                fd = os.open(self.folder / f"segment-{number:04d}.log", os.O_RDONLY)
                self._segments[number] = _Segment(fd)
        segment = self._segments.get(number)
        if segment is None or os.fstat(segment.fd).st_size <= segment.size:
            return False
        start = segment.size
        with os.fdopen(os.dup(segment.fd), "rb") as file:
            file.seek(start)
            records = msgpack.Unpacker(file)
            try:
                for prompt_hash, output_hash, *_ in records:
                    self._index(prompt_hash, output_hash, number, start + records.tell() - segment.size)
            except (ValueError, TypeError, msgpack.UnpackException) as error:
                logger.warning("gateway log, segment %d: the rest is left out: %s", number, error)
        return segment.size > start


def _runs(chosen: np.ndarray) -> list[tuple[int, int]]:
    """Return start and end of each run of true values."""
    first = int(chosen.argmax()) if len(chosen) else 0
    if chosen[first:].all():  # most sequences are a prompt and what was made of it
        return [(first, len(chosen))] if first < len(chosen) else []
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2)
    return [(start, end) for start, end in edges.tolist()]


def _array(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(ids, np.int32)


def _hash(ids: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(ids.tobytes())


def _spans(turn: Turn) -> list[tuple[int, int, int, int]]:
    """Return the spans with a version that is one of this trial's labels."""
    spans = []
    for label, start, end in turn.versions:
        try:
            version = WeightVersion.parse(label)
        except ValueError:
            continue
        spans.append((version.lineage, version.step, start, end))
    return spans


def _unpack(content: list[Any]) -> _Record:
    temperature, ids, logprobs, spans, *more = content[3:]
    return _Record(
        temperature, np.frombuffer(ids, np.int32), np.frombuffer(logprobs, np.float32), spans, *more[:1]
    )


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of leading tokens that two sequences share."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def _copy(
    record: _Record, first: int, start: int, stop: int, found: Behavior, *, with_logprobs: bool
) -> None:
    """Copy what is known of tokens start to stop of a sequence in which the record begins at `first`."""
    if with_logprobs and len(record.logprobs) == len(record.ids):
        found.logprobs[start:stop] = record.logprobs[start - first : stop - first]
        found.has_logprob[start:stop] = True
        found.temperatures[start:stop] = record.temperature
    for lineage, step, begin, end in record.spans:
        part = slice(max(start, first + begin), max(start, min(stop, first + end)))
        found.lineages[part], found.steps[part] = lineage, step
