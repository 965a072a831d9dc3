"""The trainer on a virtual clock: the order of work of trainers/loop.py, with the durations of the costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.core.errors import ExitCode
from hpc_rl.core.types import WeightVersion
from hpc_rl.simulate.batches import Batches
from hpc_rl.simulate.clock import Clock, Event, Steps
from hpc_rl.simulate.costs import Costs, compute_publication
from hpc_rl.simulate.setup import Setup
from hpc_rl.status.goodput import Bucket
from hpc_rl.trainers.timer import Timer
from hpc_rl.weight_files.chain import MAX_CHAIN


@dataclass
class StepRow:
    """One step, with the names of the metrics of a real one; times in seconds."""

    step: int
    lineage: int
    time: float = 0.0  # of its end
    wait_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    evaluate_s: float = 0.0
    save_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    step: int
    lineage: int
    timers: dict[str, dict[str, Any]]


@dataclass
class Trainer:
    """One incarnation. `train` is its activity; `on_save` gets each checkpoint, `does` each kind of work."""

    clock: Clock
    setup: Setup
    costs: Costs
    batches: Batches
    lineage: int
    step: int  # of the loaded checkpoint, or 0
    does: Callable[[Bucket, int], None]
    on_step: Callable[[StepRow], None]
    on_save: Callable[[Saved], None]
    stopping: bool = False
    is_over: bool = False  # ended or killed: what it has begun has no effect any more
    exit_code: int | None = None
    _published: Event = field(default_factory=Event)
    _publishes: bool = False
    _saving: bool = False
    _saved: Event = field(default_factory=Event)
    _evaluated_at: float = 0.0  # end of the evaluation beside training
    _save_s: float = 0.0  # since the last row

    def __post_init__(self) -> None:
        clock = lambda: self.clock.now  # noqa: E731
        self.timers = {"save": Timer(self.setup.save, clock), "evaluate": Timer(self.setup.evaluate, clock)}
        self._line_at = self.clock.now

    def restore(self, saved: Saved) -> None:
        for name, timer in self.timers.items():
            timer.restore(saved.timers[name])

    def train(self) -> Steps:
        total = self.setup.total_steps
        if self.step < total:
            yield from self._publish(self.step)
            if self.step == 0 and self.setup.evaluates:
                yield from self._evaluate(0, StepRow(0, self.lineage))
        for step in range(self.step + 1, total + 1):
            row = StepRow(step, self.lineage)
            self.does(Bucket.WAIT, step)
            begun = self.clock.now
            if not (yield from self._wait(step)):
                yield from self._stop(step - 1)
                return
            row.wait_s = self.clock.now - begun
            self.does(Bucket.TRAIN, step)
            row.train_s = self._compute_train_s(step)
            yield row.train_s
            begun = self.clock.now
            yield from self._publish(step)
            row.publish_s = self.clock.now - begun
            saves, evaluates = self._check_timers(step)
            if self.setup.evaluates and (evaluates or step == total):
                yield from self._evaluate(step, row)
            self.does(Bucket.SAVE, step)
            yield self.costs.log_s
            stops = self.stopping
            row.time, row.step_s, row.save_s = self.clock.now, self.clock.now - self._line_at, self._save_s
            self._line_at, self._save_s = self.clock.now, 0.0
            self.on_step(row)
            if saves or stops or step == total:
                yield from self._save(step, last=step == total or stops)
            if stops and step < total:
                yield from self._stop(step)
                return
        self.does(Bucket.STOP, total)
        yield self.costs.end_s
        self._exit(ExitCode.DONE)

    def kill(self) -> None:
        self.is_over = True

    def _exit(self, code: int) -> None:
        self.is_over, self.exit_code = True, int(code)

    def _stop(self, step: int) -> Steps:
        if step > self.step or step:
            yield from self._save(step, last=True)
        self._exit(ExitCode.STOPPED)

    def _wait(self, step: int) -> Steps:
        """Wait for a batch; return False if the trainer must stop instead."""
        batches = self.batches
        if self.setup.shares_gpus:
            yield from self._settle()
            batches.fleet.release()
        batches.observe(self.lineage, step - 1)
        while (seal := batches.cut(step)) is None:
            if self.stopping or batches.is_held:
                return False
            yield batches.changed
        if self.setup.shares_gpus:
            batches.fleet.hold()
        assert seal.step == step
        yield self.costs.batch_s
        return True

    def _compute_train_s(self, step: int) -> float:
        tokens = self.batches.tokens.get(step, 0) * self.batches.weight
        return self.costs.compute_train_s(tokens, self.setup.ranks)

    def _settle(self) -> Steps:
        while self._publishes:
            yield self._published

    def _publish(self, step: int) -> Steps:
        self.does(Bucket.PUBLISH, step)
        yield from self._settle()
        setup = self.setup
        whole = step == self.step or step % math.ceil(MAX_CHAIN / self.costs.changed_share) == 0
        times = compute_publication(self.costs, setup.update_mode, setup.ranks, setup.server_nodes, whole)
        self._publishes = True
        yield times.blocked_s
        self.clock.after(times.complete_s, lambda: self._arrive(step, times.pause_s))
        if step == setup.total_steps:
            yield from self._settle()

    def _arrive(self, step: int, pause_s: float) -> None:
        if not self.is_over:
            self.batches.fleet.update(WeightVersion(self.lineage, step), pause_s)
            self._publishes = False
            self._published.fire()

    def _check_timers(self, step: int) -> tuple[bool, bool]:
        per_epoch = self.setup.steps_per_epoch
        epochs = int(step / per_epoch) - int((step - 1) / per_epoch) if per_epoch else 0
        saves, evaluates = (timer.check(epochs) for timer in self.timers.values())
        return saves and self.setup.recover_mode != "disabled", evaluates

    def _evaluate(self, step: int, row: StepRow) -> Steps:
        self.does(Bucket.EVALUATE, step)
        begun = self.clock.now
        if self.setup.evaluates_blocking:
            yield from self._settle()
            yield self.costs.evaluate_s
        else:
            yield self._evaluated_at - self.clock.now
            self._evaluated_at = self.clock.now + self.costs.evaluate_s
            self.batches.fleet.lend(self.setup.server_share, self.costs.evaluate_s)
        row.evaluate_s += self.clock.now - begun

    def _save(self, step: int, last: bool) -> Steps:
        if self.setup.recover_mode == "disabled":
            return
        self.does(Bucket.SAVE, step)
        begun, waits = self.clock.now, last or not self.setup.async_save
        while self._saving:
            yield self._saved
        timers = {name: timer.state() for name, timer in self.timers.items()}
        saved = Saved(step, self.lineage, timers)
        if waits:
            yield self.costs.save_s
            self.on_save(saved)
        else:
            self._saving = True
            yield self.costs.save_copy_s
            self.clock.after(self.costs.save_s, lambda: self._commit(saved))
        self._save_s += self.clock.now - begun

    def _commit(self, saved: Saved) -> None:
        if not self.is_over:
            self._saving = False
            self.on_save(saved)
            self._saved.fire()
