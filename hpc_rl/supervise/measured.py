"""Measured: how long steps and saves of this attempt take, read from the trainer's metrics as they grow."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from hpc_rl.files import JsonLines
from hpc_rl.stats.tracker import p95
from hpc_rl.trial import Attempt

LATEST = 200  # values that count, of each kind: what was slow long ago is no measure


class Measured:
    """Reads on where it stopped, every metrics file of the attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._folder = attempt.dir
        self._files: dict[Path, JsonLines] = {}
        self._values: dict[str, deque[float]] = {name: deque(maxlen=LATEST) for name in ("step_s", "save_s")}

    def poll(self) -> None:
        for path in self._folder.glob("metrics.*.jsonl"):
            file = self._files.setdefault(path, JsonLines(path))
            for row in file.poll():
                for name, values in self._values.items():
                    value = row.get(name)
                    if isinstance(value, int | float) and value > 0:
                        values.append(float(value))
            file.rows.clear()

    @property
    def step_s(self) -> float:
        """95th percentile of a step, everything included; 0 before the first."""
        return p95(self._values["step_s"])

    @property
    def save_s(self) -> float:
        """95th percentile of a save; 0 before the first."""
        return p95(self._values["save_s"])
