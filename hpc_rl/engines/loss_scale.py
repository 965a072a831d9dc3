"""Dynamic loss scaling for float16, whose gradients would vanish otherwise. Other types have the scale 1."""

from __future__ import annotations

from typing import Any

from hpc_rl.config.sections.training import OptimizerConfig


class LossScale:
    """The factor on the loss: halved after `hysteresis` overflows, doubled after `loss_scale_window` updates without one."""

    def __init__(self, config: OptimizerConfig, active: bool) -> None:
        self.config = config
        self.active = active
        self.value = config.initial_loss_scale if active else 1.0
        self._good = 0
        self._patience = config.hysteresis

    def update(self, overflow: bool) -> None:
        if not self.active:
            return
        if overflow:
            self._good = 0
            self._patience -= 1
            if self._patience <= 0:
                self.value = max(self.value / 2, self.config.min_loss_scale)
            return
        self._good += 1
        if self._good >= self.config.loss_scale_window:
            self._good, self._patience = 0, self.config.hysteresis
            self.value *= 2

    def state(self) -> dict[str, Any]:
        return {"loss_scale": [self.value, self._good, self._patience]} if self.active else {}

    def restore(self, counters: dict[str, Any]) -> None:
        if self.active and "loss_scale" in counters:
            self.value, self._good, self._patience = counters["loss_scale"]
