"""The run: one incarnation of a trainer, with its position, metrics, timers, saves, exports and exit.

It acts for all ranks together. The loop (loop.py) decides the order; the recipe defines the training of a
step.
"""

import functools
import logging
import math
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hpc_rl import __version__
from hpc_rl.checkpoint.generation import Manifest, hash_config, record_evaluation, scan
from hpc_rl.checkpoint.retention import RetentionPolicy
from hpc_rl.config.held_out import find_period
from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.options.operations import FrequencyConfig
from hpc_rl.core.errors import CannotWrite, ExitCode
from hpc_rl.core.records import check_newest_lineage
from hpc_rl.core.trial import Trial, load_json, load_object, parse_submission
from hpc_rl.core.types import WeightVersion
from hpc_rl.engines.base import Engine
from hpc_rl.stats.idle import MIN_IN_A_ROW, IdleSteps
from hpc_rl.stats.metrics_writers import MetricsWriters
from hpc_rl.stats.tracker import Tracker
from hpc_rl.trainers.activity import Activity
from hpc_rl.trainers.callbacks import ERRORS, Callbacks
from hpc_rl.trainers.evaluations import Evaluation, EvaluationsBeside
from hpc_rl.trainers.exports import Exports, Ranking, WeightWriter
from hpc_rl.trainers.saving import Saving
from hpc_rl.trainers.start import TrainerContext, list_counters
from hpc_rl.trainers.timer import Timer

logger = logging.getLogger(__name__)
LOGGED_METRICS = ("reward", "accuracy_delta", "loss", "grad_norm", "lr", "staleness_mean", "step_s")
ASKED_EVERY_S = 1.0  # between checks for a request to save
WAITS_FOR_EVALUATION = ("evaluate", "publish", "wait")  # activities that an evaluation may delay
RESULT_ROUND_S = 5.0  # of rank 0's wait for an evaluation; must be shorter than the limit of a collective
TRIM_EVERY_STEPS = 10  # between trims of the batch log, if no generations are saved
LIBRARIES = ("torch", "transformers", "numpy", "safetensors")


@dataclass(kw_only=True)
class Run(TrainerContext):
    """A trainer incarnation with its engine, for the recipe and the loop."""

    engine: Engine  # of the policy; initialized, its state loaded
    critic: Engine | None = None  # of the critic; the same
    lineage: int  # of this incarnation
    step: int  # start: the step of the loaded generation, or 0
    writers: MetricsWriters  # where metrics go; rank 0 only
    stats: Tracker = field(default_factory=Tracker)  # metrics of the current step
    total_steps: int | None = None  # set by the loop
    evaluation: tuple[int, dict[str, float]] = (-1, {})  # step and numbers of the last evaluation; on rank 0
    loaded: str = ""  # version of the loaded generation; '' after a fresh start
    owes_evaluation: bool = False  # a stop postponed an evaluation
    evaluates_beside: bool = False  # whether evaluations run beside training
    beside: EvaluationsBeside | None = None  # these evaluations; rank 0 only
    adapted: dict[str, float] = field(default_factory=dict)  # numbers that the recipe adapts after each step
    activity: Activity | None = None  # current activity, for the supervisor; rank 0 only
    callbacks: Callbacks | None = None  # of the user; rank 0 only
    idle: IdleSteps = field(default_factory=IdleSteps)  # of this incarnation
    pending_evaluations: list[Evaluation] = field(default_factory=list)  # in the loaded generation
    _line: tuple[int, dict[str, float | int | str]] | None = None  # the newest line, and its step
    _line_at: float = field(default_factory=time.monotonic)
    _request: object = None  # id of the last request of `hpc-rl checkpoint now`
    _look_at: float = 0.0  # time of the next check for one, monotonic clock

    def __post_init__(self) -> None:
        recover = self.config.recover
        ranking = Ranking.of(self.config)
        policy = RetentionPolicy(
            newest=recover.keep,
            every_steps=recover.keep_every_steps,
            best=recover.keep_best,
            metric=ranking.metric,
            higher_is_better=ranking.mode == "max",
        )
        self.saving = Saving(self.trial, self.attempt.id, self.incarnation, self.engines, self.ranks, policy)
        self.writer = WeightWriter(
            self.engine,
            self.ranks,
            self.stopping,
            find_tokenizer_folder(self.config),
            lambda: self.does("wait for room", self.step),
            self.critic,
        )
        self.exports = Exports(self.trial, self.config, self.writer, self.export_version, self._exports)
        self.timers = {
            "save": Timer(self.config.recover),
            "export": Timer(self.config.saver),
        }
        self._sets: dict[str, str] = {"evaluate": ""}  # timer -> held-out set
        periods: dict[str, FrequencyConfig] = {"evaluate": self.config.evaluator}
        if isinstance(self.config, GRPOConfig):
            self._sets |= {f"evaluate {name}": name for name in self.config.evaluator.sets}
            periods = {timer: find_period(self.config, name) for timer, name in self._sets.items()}
        self.timers |= {timer: Timer(period) for timer, period in periods.items()}
        self._due_sets: list[str] = []  # on rank 0

    @property
    def engines(self) -> list[Engine]:
        """The trained models, the policy first."""
        return [self.engine] if self.critic is None else [self.engine, self.critic]

    def restore(self, manifest: dict[str, Any]) -> None:
        """Restore the counters of the loaded generation."""
        for name, timer in self.timers.items():
            timer.restore(manifest["timers"].get(name, {}))
        self.owes_evaluation = bool(manifest["timers"].get("owes_evaluation"))
        self.adapted = dict(manifest["adapted"])
        self.loaded = manifest["version"]
        left = map(Evaluation.parse, manifest["timers"].get("evaluations", ()))
        self.pending_evaluations = [one for one in left if {*one.sets} <= {*self._sets.values()}]
        self.saving.newest = self.step

    def version(self, step: int) -> WeightVersion:
        return WeightVersion(self.lineage, step)

    def export_version(self, step: int) -> str:
        """Return the version of an export after `step`; for loaded weights, their original version."""
        return self.loaded if step == self.step and self.loaded else str(self.version(step))

    def does(self, what: str, step: int) -> None:
        """Report the current activity to the supervisor."""
        if self.activity is not None:
            self.activity.does(what, step)

    def due(self, recipe: Any, step: int) -> list[bool]:
        """Return whether to stop, save, evaluate and export after a step.

        Any rank can request a stop; rank 0's clock decides the rest.
        """
        epochs = recipe.position(step)[0] - recipe.position(step - 1)[0]
        fired = {name: timer.check(epochs) and self.ranks.rank == 0 for name, timer in self.timers.items()}
        self._due_sets = [name for timer, name in self._sets.items() if fired[timer]]
        self.collect(recipe)
        self.settle(recipe)
        # without saves no start goes back: remove trained batches, except after an older generation
        if self.config.recover.mode == "disabled" and self.ranks.rank == 0 and step % TRIM_EVERY_STEPS == 0:
            recipe.retain(min((found.step for found in scan(self.trial)), default=step))
        asked = fired["save"] or self._is_save_asked()
        saves = (asked and self.config.recover.mode != "disabled") or self.saving.owed
        return self.ranks.any_of(self.stopping.is_set(), saves, bool(self._due_sets), fired["export"])

    def _is_save_asked(self) -> bool:
        """Return whether `hpc-rl checkpoint now` requests a new save. Only rank 0 checks, rarely."""
        if self.ranks.rank != 0 or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + ASKED_EVERY_S
        path = self.trial.save_intent
        # list the directory first: NFS caches for a long time that a file does not exist
        with suppress(OSError):
            if path.name in os.listdir(path.parent):
                before, self._request = self._request, load_object(path).get("id")
                return self._request not in (None, before)
        return False

    def evaluate(self, recipe: Any, step: int) -> None:
        """Evaluate now, or begin to evaluate beside training.

        If the trainer must stop meanwhile, the next start repeats or continues the evaluation.
        """
        self.does("evaluate", step)
        if self.evaluates_beside:
            self._begin_evaluation(recipe, step)
            return
        with self.stats.timed("evaluate_s"):
            numbers = recipe.evaluate(step)
        if numbers:
            known = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
            self.evaluation = (step, known)
            self._call_back("on_evaluation", step, numbers)
        kept = self.exports.keep_best(numbers, step)
        self.owes_evaluation = self.ranks.any(numbers is None or not kept)

    def choose_sets(self, step: int) -> list[str]:
        """Return the held-out sets to evaluate after a step: all, before the first and after the last."""
        is_end = step in (0, self.total_steps)
        return list(self._sets.values()) if is_end or not self._due_sets else self._due_sets

    def make_progress(self) -> None:
        """Note progress of an evaluation, for the supervisor. Any thread may call it."""
        if self.activity is not None:
            self.activity.make_progress(WAITS_FOR_EVALUATION)

    def evaluate_beside(self, beside: EvaluationsBeside | None) -> None:
        """Evaluate beside training from now on, first what an earlier start left. `beside`: on rank 0."""
        self.evaluates_beside, self.beside = True, beside
        if beside is not None:
            for evaluation in self.pending_evaluations:
                beside.begin(evaluation, is_published=True)

    def _begin_evaluation(self, recipe: Any, step: int) -> None:
        with self.stats.timed("evaluate_s"):
            # one at a time: a slow evaluation slows training, instead of more and more that wait
            self._wait_for_evaluations(recipe, math.inf)
        if self.beside is not None:
            self.beside.begin(Evaluation(str(self.version(step)), step, tuple(self.choose_sets(step))))
        self.owes_evaluation = False

    def collect(self, recipe: Any) -> bool:
        """Use the result of the evaluation beside training, if it has arrived. Collective.

        Returns False if a stop prevented the export of the best model.
        """
        found = self.beside.find_result() if self.beside is not None else None
        if not self.evaluates_beside or not self.ranks.any(found is not None):
            return True
        numbers, step, version = {}, -1, ""
        if found is not None and found.problem:
            form = "THE EVALUATION OF STEP %d IS LOST: no server can load its weights; training continues: %s"
            logger.error(form, found.evaluation.step, found.problem)
        elif found is not None:
            step, version = found.evaluation.step, found.evaluation.version
            numbers = recipe.report_evaluation(step, version, found.results, found.elapsed_s)
            known = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
            if self.config.recover.mode != "disabled":
                record_evaluation(self.trial, version, known)
            self._call_back("on_evaluation", step, numbers)
        kept = self.exports.keep_best(numbers, step, version)
        if kept and self.beside is not None:
            self.beside.finish()
        return kept

    def finish_evaluations(self, recipe: Any, step: int) -> bool:
        """Wait for the evaluations beside training; return False after a stop. Collective."""
        if not self.evaluates_beside:
            return True
        self.does("evaluate", step)
        limit_s = self.config.evaluator.end_wait_s
        done = self._wait_for_evaluations(recipe, limit_s)
        if done or self.ranks.any(self.stopping.is_set()):
            return done
        form = "the trial ends without its last evaluation, which took more than %d s (evaluator.end_wait_s)"
        self._log_info(form, limit_s)
        return True

    def _wait_for_evaluations(self, recipe: Any, limit_s: float) -> bool:
        """Wait until no evaluation is pending; return False after a stop or the limit."""
        until = time.monotonic() + limit_s
        while self.collect(recipe):
            is_late = self.beside is not None and time.monotonic() > until
            is_pending, ends = self.ranks.any_of(
                self.beside is not None and self.beside.is_pending, self.stopping.is_set() or is_late
            )
            if not is_pending or ends:
                return not is_pending
            if self.beside is not None:
                self.beside.wait(min(RESULT_ROUND_S, max(0.0, until - time.monotonic())))
        return False

    def log(self, step: int) -> None:
        """Log one line with the metrics tracked since the previous line. Raises Stale."""
        self._check_newest()
        self.stats.add("save_s", 0.0)
        now = time.monotonic()
        row: dict[str, float | int | str] = {
            "time": time.time(),
            "version": str(self.version(step)),
            "lineage": self.lineage,
        }
        row |= {**self.stats.take(), "step_s": now - self._line_at}
        if self.saving.problem:
            row |= {"save_failed": self.saving.num_failed, "save_error": self.saving.problem}
        if self.total_steps is not None:
            row["total_steps"] = self.total_steps
        row |= self.callbacks.list_metrics() if self.callbacks else {}
        self.writers.log(step, row)
        self._line = (step, row)
        names = [name for name in row if name in LOGGED_METRICS or name.startswith("reward/")]
        shown = {
            name: row[name] for name in sorted(names, key=_find_place) if isinstance(row.get(name), float)
        }
        self._log_info("step %d: %s", step, "  ".join(f"{name} {value:.4g}" for name, value in shown.items()))
        self._line_at = now
        self._warn_of_idle(step, row)
        self._call_back("on_step", step, row)

    def _call_back(
        self,
        point: str,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        path: Path | None = None,
        is_done: bool = False,
    ) -> None:
        """Call the user's callbacks, on rank 0; their time is a metric of the next line."""
        if self.callbacks is None:
            return
        before = self.activity.now if self.activity else None
        with self.stats.timed("callbacks_s"):
            self.callbacks.call(
                point, step, metrics, total_steps=self.total_steps, path=path, is_done=is_done
            )
        if before is not None:
            self.does(*before)

    def _end_callbacks(self, step: int, is_done: bool = False) -> None:
        """Call `on_end`; write the newest line again if it lacks errors, which no later line would have."""
        self._call_back("on_end", step, is_done=is_done)
        if self.callbacks is not None and self._line is not None:
            at, row = self._line
            if row.get(ERRORS, 0) != self.callbacks.num_errors:
                self.writers.correct(at, row | self.callbacks.list_metrics())

    def _warn_of_idle(self, step: int, row: dict[str, float | int | str]) -> None:
        """Warn that nothing was learned for 10, 20, 40 and so on steps in a row."""
        self.idle.add(step, row)
        times, rest = divmod(self.idle.in_a_row, MIN_IN_A_ROW)
        if times and not rest and times.bit_count() == 1 and self.ranks.rank == 0:
            logger.warning("NOTHING IS LEARNED: %s", self.idle.text)

    def save(self, recipe: Any, step: int, last: bool = False) -> None:
        """Save a generation, unless the mode forbids it or it exists; then apply retention.

        Waits for the last generation. With `recover.async_save` the others are written while training
        continues; a save that is due during another save follows it.
        """
        if self.config.recover.mode == "disabled":
            return
        waits = last or not self.config.recover.async_save
        self.does("save", step)
        with self.stats.timed("save_s"):
            self.settle(recipe, waits)
            if self.saving.newest == step:
                return
            if self.saving.in_flight:
                self.saving.owed = True
                return
            pending = self.beside.list_pending() if self.beside is not None else []
            self.saving.waits_for = frozenset(one["step"] for one in pending)
            self.saving.start(step, lambda: self.manifest(recipe, step), copied=not waits, last=last)
            self.settle(recipe, waits)

    def settle(self, recipe: Any, wait: bool = False) -> None:
        """Finish a save in flight if it is written; release batches that only removed generations needed."""
        oldest = self.saving.settle(wait)
        if oldest is not None and self.ranks.rank == 0:
            recipe.retain(oldest)
            newest = self.saving.newest
            self._call_back("on_checkpoint", newest, path=self.trial.generation(newest))

    def manifest(self, recipe: Any, step: int) -> Manifest:
        epoch, cursor = recipe.position(step)
        evaluated, numbers = self.evaluation
        timers = {name: timer.state() for name, timer in self.timers.items()}
        pending = self.beside.list_pending() if self.beside is not None else []
        return Manifest(
            step=step,
            lineage=self.lineage,
            attempt=self.attempt.id,
            incarnation=self.incarnation,
            submission=parse_submission(self.attempt.id),
            version=str(self.version(step)),
            num_ranks=self.ranks.num,
            config_hash=hash_config(load_json(self.trial.config_json) or {}),
            epoch=epoch,
            cursor=cursor,
            data=self.data,
            timers={**timers, "owes_evaluation": self.owes_evaluation, "evaluations": pending},
            adapted=dict(self.adapted),
            ledger=recipe.frontier(step),
            counters=list_counters(self.engines),
            stats=self.writers.state(),
            metrics=numbers if evaluated == step else {},
            versions=list_versions(self.trial),
        )

    def is_done(self, total: int) -> bool:
        """Return whether an earlier start finished `total` steps: the final export has the loaded version."""
        record = self.exports.record("final") or {}
        exported = record.get("step") == total and record.get("version") == self.loaded
        return self.step >= total and self.ranks.any(self.ranks.rank == 0 and exported)

    def finish(self, recipe: Any, step: int) -> ExitCode:
        """Exit after the final export. Retries a failed last save once, then records the failure."""
        if self.saving.problem:
            self.save(recipe, step, last=True)
        if self.saving.problem and self.ranks.rank == 0:
            logger.error(
                "THE LAST STATE IS NOT SAVED: %s. The training is done, and exports/final is complete",
                self.saving.problem,
            )
            self.exports.note_not_saved(self.saving.problem)
        self._end_callbacks(step, is_done=True)
        return ExitCode.DONE

    def stop(self, recipe: Any, step: int) -> ExitCode:
        """Exit after `step` and save its state; before the first step there is nothing to save."""
        if step == 0 and self.saving.newest < 0:
            self._log_info("asked to stop before the first step: there is nothing to save")
            self._end_callbacks(step)
            return ExitCode.STOPPED
        self.save(recipe, step, last=True)
        if self.saving.problem:
            raise CannotWrite(self.saving.problem)
        disabled = self.config.recover.mode == "disabled"
        outcome = "nothing is saved (recover.mode disabled)" if disabled else "its state is saved"
        self._log_info("asked to stop: after step %d, %s", step, outcome)
        self._end_callbacks(step)
        return ExitCode.STOPPED

    def _exports(self, step: int) -> None:
        self._check_newest()
        self.does("export", step)

    def _check_newest(self) -> None:
        if self.ranks.rank == 0:
            check_newest_lineage(self.trial, self.lineage)

    def _log_info(self, text: str, *values: object) -> None:
        if self.ranks.rank == 0:
            logger.info(text, *values)


def _find_place(name: str) -> int:
    """Return the sort key of a metric in the log line; parts of the reward follow it."""
    return LOGGED_METRICS.index(name.partition("/")[0])


@functools.cache
def list_versions(trial: Trial) -> dict[str, str]:
    """Return the versions of the code and of the libraries that affect the state."""
    found = {"hpc_rl": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = ((load_json(trial.provenance_json) or {}).get("git") or {}).get("commit")
    return {**found, **({"commit": commit} if commit else {})}


def find_tokenizer_folder(config: Config) -> Path:
    model = config.model if hasattr(config, "model") else config.actor
    return Path(config.tokenizer_path or model.path).expanduser()
