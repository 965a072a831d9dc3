"""When periodic work of a trainer is due: saves, exports, evaluations. Without torch."""

import math
import time
from collections.abc import Callable
from typing import Any

from hpc_rl.config.options.operations import FrequencyConfig


class Timer:
    """Fires by epochs, steps or seconds. Each of the three counters restarts only when it fires.

    With freq_steps 4 and freq_secs 60, steps 4, 8, 12 … fire, and also the first step that ends 60 s after
    the last one that fired by seconds. Seconds are rank 0's clock. The state has elapsed counts, not
    frequencies.
    """

    def __init__(self, frequency: FrequencyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        limits = (frequency.freq_epochs, frequency.freq_steps, frequency.freq_secs)
        self._limits = dict(zip(("epochs", "steps", "secs"), limits, strict=True))
        self._clock = clock
        self.restore({})

    def check(self, epochs: int = 0, steps: int = 1) -> bool:
        """Count finished epochs and steps; return whether the timer fires."""
        self._epochs += epochs
        self._steps += steps
        elapsed = self.state()
        going_on = {
            name: value for name, value in elapsed.items() if value < (self._limits[name] or math.inf)
        }
        if going_on == elapsed:
            return False
        self.restore(going_on)
        return True

    def state(self) -> dict[str, Any]:
        return {"epochs": self._epochs, "steps": self._steps, "secs": self._clock() - self._since}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Time without a running trainer does not count."""
        self._epochs = int(state.get("epochs", 0))
        self._steps = int(state.get("steps", 0))
        self._since = self._clock() - float(state.get("secs", 0.0))
