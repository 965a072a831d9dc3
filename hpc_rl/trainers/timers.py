"""Timers: when to save, evaluate and export. State is what has elapsed; how often comes from the configuration in force.

Seconds are one process's clock: rank 0 decides, the loop tells the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hpc_rl.config.sections.operations import FrequencyConfig


class Timer:
    """Fires by epochs, steps or seconds, whichever is due; each of the three starts again only when it was due itself.

    freq_steps 4 and freq_secs 60: steps 4, 8, 12 fire, and besides the first step that ends 60 s after the last one that
    fired by seconds.
    """

    def __init__(self, frequency: FrequencyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.frequency = frequency
        self._clock = clock
        self._epochs = 0
        self._steps = 0
        self._since = clock()

    def check(self, epochs: int = 0, steps: int = 1) -> bool:
        """Count finished epochs and steps; true when something is due."""
        self._epochs += epochs
        self._steps += steps
        due = False
        if self.frequency.freq_epochs and self._epochs >= self.frequency.freq_epochs:
            self._epochs, due = 0, True
        if self.frequency.freq_steps and self._steps >= self.frequency.freq_steps:
            self._steps, due = 0, True
        if self.frequency.freq_secs and self._clock() - self._since >= self.frequency.freq_secs:
            self._since, due = self._clock(), True
        return due

    def state(self) -> dict[str, Any]:
        return {"epochs": self._epochs, "steps": self._steps, "secs": self._clock() - self._since}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; time while nothing ran does not count."""
        self._epochs = int(state.get("epochs", 0))
        self._steps = int(state.get("steps", 0))
        self._since = self._clock() - float(state.get("secs", 0.0))
