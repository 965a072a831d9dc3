"""Sinks: where the numbers of a step go. JSON lines always, TensorBoard beside them. One process writes: rank 0. No torch here.

A line is whole and handed to the file system before `log` returns, so that a killed trainer loses none that it reported.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

Scalars = Mapping[str, float | int | str]


class StatsSink(Protocol):
    """What takes numbers."""

    def log(self, step: int, scalars: Scalars) -> None: ...

    def close(self) -> None: ...

    def state(self) -> dict[str, Any]:
        """Where the sink stands, for the manifest of a generation."""


class JsonlSink:
    """One JSON object a line, `step` first. A number that JSON has no word for (NaN, infinity) becomes null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, scalars: Scalars) -> None:
        row = {"step": step, **{name: _finite(value) for name, value in scalars.items()}}
        self._file.write(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def state(self) -> dict[str, Any]:
        return {"file": self.path.name, "bytes": 0 if self._file.closed else self._file.tell()}


def _finite(value: float | int | str) -> float | int | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardSink:
    """Event files by TensorBoard's own writer, which needs neither TensorFlow nor torch."""

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = folder
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder), flush_secs=5)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # what lies beyond it from before is dropped by readers
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=start_step + 1, session_log=start))

    def log(self, step: int, scalars: Scalars) -> None:
        numbers = {name: float(value) for name, value in scalars.items() if isinstance(value, (int, float)) and name != "time"}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        when = scalars.get("time", 0.0)
        self._writer.add_event(self._event(wall_time=float(when), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()

    def state(self) -> dict[str, Any]:
        return {"folder": str(self.folder)}


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: list[StatsSink]) -> None:
        self.sinks = sinks

    def log(self, step: int, scalars: Scalars) -> None:
        for sink in self.sinks:
            sink.log(step, scalars)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def state(self) -> dict[str, Any]:
        return {type(sink).__name__: sink.state() for sink in self.sinks}


def open_sinks(metrics: Path, tensorboard: Path, start_step: int = 0) -> Sinks:
    """The sinks of a trainer incarnation that goes on from `start_step`: JSON lines, and TensorBoard where it is installed."""
    sinks: list[StatsSink] = [JsonlSink(metrics)]
    try:
        sinks.append(TensorBoardSink(tensorboard, start_step))
    except ImportError as error:
        logger.warning("no TensorBoard files: %s", error)
    return Sinks(sinks)
