"""Gateway log: the origin of each token of each completion, looked up by token ids. Append-only and bounded.

Environments return token ids, often no log-probabilities, and never weight versions: `match` finds the logged
completions in a sequence, without tokenizing any text. A segment `segment-<NNNN>.log` has one writer, the
process that created it; it holds a sequence of msgpack records. Gateways in several processes may share a
folder, and any process may read all segments. Records are not fsynced: they survive a killed process, which
is their purpose, but the newest may be lost with a node.
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
NUM_SEGMENTS = 16  # the oldest segment is deleted as a whole
MAX_BYTES = 1 << 30  # of all segments together, approximately
_SEGMENT = re.compile(r"segment-(\d+)\.log")


@dataclass(slots=True)
class Behavior:
    """The log's knowledge about each token of a sequence. Shapes: [L].

    `logprobs` is valid if `has_logprob`; `lineages` and `steps` are -1 if the version is unknown. A version
    without a log-probability comes from the same completion after another prompt. `temperatures` come from
    the requests, NaN if unknown. `finish_reason` belongs to the completion that ends at the last token; it is
    "" if no completion ends there.
    """

    logprobs: np.ndarray
    has_logprob: np.ndarray
    lineages: np.ndarray
    steps: np.ndarray
    temperatures: np.ndarray
    finish_reason: str = ""

    @classmethod
    def make_unknown(cls, length: int) -> "Behavior":
        versions = np.full((2, length), -1, np.int32)
        temperatures = np.full(length, np.nan, np.float32)
        return cls(
            np.zeros(length, np.float32), np.zeros(length, bool), versions[0], versions[1], temperatures
        )


@dataclass(slots=True)
class _Record:
    """A logged completion."""

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
    """Places in a sequence where logged completions begin; searched once, at the first use."""

    def __init__(self, ids: np.ndarray, by_prompt: Mapping[int, Sequence[_Place]]) -> None:
        self._ids, self._by_prompt = ids, by_prompt
        self._found: list[tuple[int, Sequence[_Place]]] | None = None

    def iterate_before(self, at: int) -> Iterator[tuple[int, Sequence[_Place]]]:
        """Yield places before `at` and the completions there, the latest first."""
        if self._found is None:
            self._found, prefix = [], xxhash.xxh3_64()
            for first in range(len(self._ids)):
                if places := self._by_prompt.get(prefix.intdigest()):
                    self._found.append((first, places))
                prefix.update(self._ids[first : first + 1].tobytes())
        return (place for place in reversed(self._found) if place[0] < at)


@dataclass(slots=True)
class _Segment:
    fd: int
    size: int = 0
    places: list[tuple[int, _Place]] = field(default_factory=list)  # with the prompt's hash


class GatewayLog:
    """The log in a folder: records of this process, and of others.

    Args:
        folder: Holds the segments; created if missing.
        max_records: Approximate number of records; each costs some 200 bytes of memory.
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
        self._write_lock = threading.Lock()  # a file system may be slow: match does not wait for it
        self._lock = threading.Lock()  # of the index
        folder.mkdir(parents=True, exist_ok=True)
        self._current = -1  # no segment of this process yet
        self._catch_up()

    def get_status(self) -> dict[str, int]:
        """Return sizes, for status pages."""
        with self._lock:
            kept = self._segments.values()
            records, size = (
                sum(len(segment.places) for segment in kept),
                sum(segment.size for segment in kept),
            )
        return {"records": records, "bytes": size, "lost": self.num_lost}

    async def append(self, prompt_ids: Sequence[int], turns: Sequence[Turn], temperature: float) -> None:
        """Log completions of one prompt; after the return they survive the end of this process.

        A failure to write is logged and counted; those completions are then unknown.
        """
        prompt_hash, now = _hash_tokens(_make_array(prompt_ids)), time.time()
        for turn in turns:
            ids = _make_array(turn.output_ids)
            logprobs = np.asarray(turn.output_logprobs, np.float32)
            content = (
                now,
                temperature,
                ids.tobytes(),
                logprobs.tobytes(),
                _list_spans(turn),
                turn.finish_reason,
            )
            output_hash = _hash_tokens(ids)
            packed = msgpack.packb((prompt_hash, output_hash, *content))
            self._waiting.append((prompt_hash, output_hash, packed))
        async with self._writing:
            # the first thread wrote for all waiting ones
            if self._waiting:
                waiting, self._waiting = self._waiting, []
                await asyncio.to_thread(self._write, waiting)

    def match(self, ids: Sequence[int] | np.ndarray, mask: Sequence[bool] | np.ndarray) -> Behavior:
        """Return the origin of a sequence's tokens with a true `mask`. Reads files: call it in a thread.

        A run of such tokens may be a completion, a part of one, or one with further tokens at its end that no
        server made, which stay unknown.
        """
        sequence, chosen = _make_array(ids), np.asarray(mask, bool)
        with self._lock:
            while True:
                behavior = Behavior.make_unknown(len(sequence))
                earlier = _Earlier(sequence, self._by_prompt)
                for start, end in _find_runs(chosen):
                    behavior.finish_reason = self._match_run(sequence, start, end, behavior, earlier)
                if behavior.has_logprob[chosen].all() or not self._catch_up():
                    return behavior

    def close(self) -> None:
        with self._lock:
            for segment in self._segments.values():
                os.close(segment.fd)
            self._segments.clear()

    def _match_run(self, ids: np.ndarray, start: int, end: int, found: Behavior, earlier: "_Earlier") -> str:
        """Fill in the known values of a run; return the finish reason of a completion that ends with it."""
        at, finish_reason = start, ""
        while at < end:
            begun = self._find_longest(ids, at, at, end) or self._find_begun_before(ids, at, end, earlier)
            first, record = begun or (at, None)
            if record is None:
                break
            stop = min(end, first + _count_common(record.ids, ids[first:end]))
            _copy(record, first, at, stop, found, with_logprobs=True)
            at, finish_reason = stop, record.finish_reason if stop == first + len(record.ids) else ""
        same = self._by_output.get(_hash_tokens(ids[start:end])) if at == start else None
        record = self._load_record(same) if same else None
        if record is not None and np.array_equal(record.ids, ids[start:end]):
            _copy(record, start, start, end, found, with_logprobs=False)
            return record.finish_reason
        return finish_reason if at == end else ""

    def _find_longest(self, ids: np.ndarray, first: int, at: int, end: int) -> tuple[int, _Record] | None:
        """Return the completion of ids[:first] with the most common tokens, if it reaches beyond `at`."""
        return self._choose_best(self._by_prompt.get(_hash_tokens(ids[:first]), ()), ids, first, at, end)

    def _find_begun_before(
        self, ids: np.ndarray, at: int, end: int, earlier: "_Earlier"
    ) -> tuple[int, _Record] | None:
        """Return a completion that began before `at`, with a masked first part."""
        for first, places in earlier.iterate_before(at):
            best = self._choose_best(places, ids, first, at, end)
            if best is not None:
                return best
        return None

    def _choose_best(
        self, places: Sequence[_Place], ids: np.ndarray, first: int, at: int, end: int
    ) -> tuple[int, _Record] | None:
        if not places:
            return None
        output_hash = _hash_tokens(ids[first:end])
        exact = [place for place in places if place.output_hash == output_hash]
        records = [record for place in exact[-1:] or places if (record := self._load_record(place))]
        best = max(records, key=lambda record: _count_common(record.ids, ids[first:end]), default=None)
        return (first, best) if best and first + _count_common(best.ids, ids[first:end]) > at else None

    def _load_record(self, place: _Place) -> _Record | None:
        try:
            raw = os.pread(self._segments[place.segment].fd, place.size, place.offset)
            return _unpack(msgpack.unpackb(raw))
        except (OSError, ValueError, TypeError) as error:
            form = "the gateway ignores a logged answer that it can't read (segment-%04d.log, offset %d): %s"
            logger.warning(form, place.segment, place.offset, error)
            return None

    def _write(self, waiting: list[tuple[int, int, bytes]]) -> None:
        with self._write_lock:
            try:
                self._append(b"".join(packed for *_, packed in waiting))
            except OSError as error:
                self.num_lost += len(waiting)
                form = (
                    "the gateway continues, but can't write its log; %d answers are missing there so far: %s"
                )
                logger.warning(form, self.num_lost, error)
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
            number = max(self._list_numbers(), default=-1) + 1
            path = self.folder / f"segment-{number:04d}.log"
            segment = _Segment(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600))
            self._segments[number], self._current = segment, number
            while len(self._segments) > NUM_SEGMENTS:
                self._drop(min(self._segments))
            return segment

    def _list_numbers(self) -> list[int]:
        return sorted(
            int(match[1]) for name in os.listdir(self.folder) if (match := _SEGMENT.fullmatch(name))
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
        """Index other processes' new records, forget deleted segments. Return whether anything was new."""
        numbers = self._list_numbers()
        changes = [self._load(number) for number in numbers if number != self._current]
        for number in self._segments.keys() - {*numbers, self._current}:
            self._drop(number)
        return any(changes)

    def _load(self, number: int) -> bool:
        """Index new records of a segment, except one that is torn or still being written."""
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
                form = "segment-%04d.log of the gateway is damaged, so the rest of this file is not used: %s"
                logger.warning(form, number, error)
        return segment.size > start


def _find_runs(chosen: np.ndarray) -> list[tuple[int, int]]:
    """Return start and end of each run of true values."""
    first = int(chosen.argmax()) if len(chosen) else 0
    if chosen[first:].all():  # most sequences are a prompt and one completion
        return [(first, len(chosen))] if first < len(chosen) else []
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2)
    return [(start, end) for start, end in edges.tolist()]


def _make_array(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(ids, np.int32)


def _hash_tokens(ids: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(ids.tobytes())


def _list_spans(turn: Turn) -> list[tuple[int, int, int, int]]:
    """Return the spans that have a valid version label of this trial."""
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


def _count_common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of leading tokens that two sequences share."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def _copy(
    record: _Record, first: int, start: int, stop: int, behavior: Behavior, *, with_logprobs: bool
) -> None:
    """Copy known values of tokens start to stop of a sequence; the record begins at `first` in it."""
    if with_logprobs and len(record.logprobs) == len(record.ids):
        behavior.logprobs[start:stop] = record.logprobs[start - first : stop - first]
        behavior.has_logprob[start:stop] = True
        behavior.temperatures[start:stop] = record.temperature
    for lineage, step, begin, end in record.spans:
        part = slice(max(start, first + begin), max(start, min(stop, first + end)))
        behavior.lineages[part], behavior.steps[part] = lineage, step
