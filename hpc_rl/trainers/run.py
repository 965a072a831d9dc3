"""Run: one incarnation of a trainer: where it stands, what it reports, and how its state, exports and exit come about.

The loop (loop.py) says when; this says how, for all ranks together. What is trained is the recipe's.
"""

from __future__ import annotations

import functools
import logging
import platform
import shutil
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from hpc_rl import __version__
from hpc_rl.checkpoint.generation import scan
from hpc_rl.checkpoint.manifest import Manifest, config_hash
from hpc_rl.checkpoint.retention import RetentionPolicy
from hpc_rl.config.sections.experiment import Config
from hpc_rl.engines.base import Engine
from hpc_rl.engines.hf_io import fsync_file
from hpc_rl.errors import CannotWrite, ExitCode
from hpc_rl.stats.sinks import Sinks
from hpc_rl.stats.tracker import Tracker
from hpc_rl.trainers import exports
from hpc_rl.trainers.activity import Activity
from hpc_rl.trainers.best import Best, measured_by
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.saving import Saving
from hpc_rl.trainers.timers import Timer
from hpc_rl.trial import Attempt, Trial, read_json, submission_of, write_json
from hpc_rl.types import WeightVersion

logger = logging.getLogger(__name__)
SAID = ("reward", "loss", "grad_norm", "lr", "staleness_mean", "step_s")  # of a step's metrics, in the log
TRIM_EVERY_STEPS = 10  # of the batch log, where no generation is saved
EXPORT_RECORD = "hpc_rl.json"
LIBRARIES = ("torch", "transformers", "numpy", "safetensors")


@dataclass(frozen=True)
class Due:
    """What the end of a step asks for."""

    stop: bool
    save: bool
    evaluate: bool
    export: bool


@dataclass
class Run:
    """What a recipe and the loop need to know of this incarnation; every rank has one.

    Args:
        trial: The trial.
        attempt: This attempt.
        incarnation: This trainer incarnation.
        config: The configuration in force.
        engine: Initialized, its state loaded.
        ranks: All ranks.
        stopping: Set when this process is told to stop.
        lineage: The lineage that this incarnation writes.
        step: The step that it starts from: the loaded generation's, or 0.
        sinks: Where the numbers go; rank 0 only.
        data: Fingerprint of the training rows; {} where none was taken.
    """

    trial: Trial
    attempt: Attempt
    incarnation: int
    config: Config
    engine: Engine
    ranks: Ranks
    stopping: threading.Event
    lineage: int
    step: int
    sinks: Sinks
    data: dict[str, Any] = field(default_factory=dict)
    stats: Tracker = field(default_factory=Tracker)
    total_steps: int | None = None  # that training takes, once the loop knows
    metrics: dict[str, float] = field(
        default_factory=dict
    )  # of the last evaluation, and its step; rank 0 only
    loaded: str = ""  # version of the generation that was loaded
    owes_evaluation: bool = False  # due, and put off because the trainer was told to stop
    activity: Activity | None = None  # rank 0's
    _line_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        recover = self.config.recover
        metric, higher = measured_by(self.config)
        policy = RetentionPolicy(recover.keep, recover.keep_every_steps, recover.keep_best, metric, higher)
        self.saving = Saving(self.trial, self.attempt.id, self.incarnation, self.engine, self.ranks, policy)
        tokenizer = tokenizer_folder(self.config)
        self.writer = exports.Writer(
            self.engine, self.ranks, self.stopping, tokenizer, lambda: self.does("wait for room", self.step)
        )
        self.timers = {
            "save": Timer(self.config.recover),
            "evaluate": Timer(self.config.evaluator),
            "export": Timer(self.config.saver),
        }

    def restore(self, manifest: dict[str, Any]) -> None:
        """Take the counters of the generation that was loaded."""
        for name, timer in self.timers.items():
            timer.restore(manifest["timers"].get(name, {}))
        self.owes_evaluation = bool(manifest["timers"].get("owes_evaluation"))
        self.loaded = manifest["version"]
        self.saving.newest = self.step

    def version(self, step: int) -> WeightVersion:
        return WeightVersion(self.lineage, step)

    def any_rank(self, flag: bool) -> bool:
        return self.ranks.any(flag)[0]

    def does(self, what: str, step: int) -> None:
        """Show whoever watches what this rank does now."""
        if self.activity is not None:
            self.activity.does(what, step)

    def due(self, recipe: Any, step: int) -> Due:
        """What is to be done after a step: any rank may have been told to stop, rank 0's clock counts."""
        epochs = recipe.position(step)[0] - recipe.position(step - 1)[0]
        fired = {name: timer.check(epochs) and self.ranks.rank == 0 for name, timer in self.timers.items()}
        self.settle(recipe)
        self._trim_unsaved(recipe, step)
        saves = (fired["save"] and self.config.recover.mode != "disabled") or self.saving.owed
        return Due(*self.ranks.any(self.stopping.is_set(), saves, fired["evaluate"], fired["export"]))

    def evaluate(self, recipe: Any, step: int) -> None:
        """Evaluate now; owed where the trainer is told to stop meanwhile."""
        self.does("evaluate", step)
        with self.stats.timed("evaluate_s"):
            numbers = recipe.evaluate(step)
        if numbers:
            self.metrics = {
                name: value for name, value in numbers.items() if isinstance(value, int | float)
            } | {"step": step}
        kept = self._keep_best(numbers, step)
        self.owes_evaluation = self.any_rank(numbers is None or not kept)

    def log(self, step: int) -> None:
        """One line of metrics for the step, from what was tracked since the line before."""
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
        self.sinks.log(step, row)
        self._say(
            "step %d: %s",
            step,
            "  ".join(f"{name} {row[name]:.4g}" for name in SAID if isinstance(row.get(name), float)),
        )
        self._line_at = now

    def save(self, recipe: Any, step: int, last: bool = False) -> None:
        """Save a generation, unless the mode forbids or it lies there already; then drop what the policy does not keep.

        The last one is waited for. Others are written while training goes on with `recover.async_save`; one that is due
        while another is in flight follows after it.
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
            self.saving.start(step, lambda: self.manifest(recipe, step), copied=not waits, last=last)
            self.settle(recipe, waits)

    def settle(self, recipe: Any, wait: bool = False) -> None:
        """Learn what became of a save in flight; the batch log is needed from the oldest generation that is kept."""
        oldest = self.saving.settle(wait)
        if oldest is not None and self.ranks.rank == 0:
            recipe.retain(oldest)

    def _trim_unsaved(self, recipe: Any, step: int) -> None:
        """Where nothing is saved nothing goes back: trained batches may go, save those after a generation of before."""
        if self.config.recover.mode == "disabled" and self.ranks.rank == 0 and step % TRIM_EVERY_STEPS == 0:
            recipe.retain(min((found.step for found in scan(self.trial)), default=step))

    def manifest(self, recipe: Any, step: int) -> Manifest:
        epoch, cursor = recipe.position(step)
        timers = {name: timer.state() for name, timer in self.timers.items()}
        return Manifest(
            step=step,
            lineage=self.lineage,
            attempt=self.attempt.id,
            incarnation=self.incarnation,
            submission=submission_of(self.attempt.id),
            version=str(self.version(step)),
            num_ranks=self.ranks.num,
            config_hash=config_hash(read_json(self.trial.config_json) or {}),
            epoch=epoch,
            cursor=cursor,
            data=self.data,
            timers={**timers, "owes_evaluation": self.owes_evaluation},
            ledger=recipe.frontier(step),
            counters=self.engine.counters(),
            stats=self.sinks.state(),
            metrics={
                name: value
                for name, value in self.metrics.items()
                if self.metrics["step"] == step and name != "step"
            },
            versions=versions(self.trial),
        )

    def export(self, step: int) -> None:
        """Write the weights for people, as `exports/step-<step>`; where the disk is full there is none of this step."""
        folder = self.trial.exports / f"step-{step:08d}"
        if not self._export(folder, step, patient=False) and self.ranks.rank == 0:
            logger.error(
                "EXPORT FAILED: no room for %s. Training goes on; make room in %s", folder.name, folder.parent
            )

    def export_final(self, step: int) -> bool:
        """Write `exports/final`, the last thing that a trial does: the last weights, or the best where that was asked for.

        False where the trainer was told to stop while it waited for room.
        """
        folder = self.trial.exports / "final"
        keep, best = self.config.saver.keep_best, read_json(self._best_record)
        if not self.any_rank(
            self.ranks.rank == 0 and keep is not None and keep.as_final and best is not None
        ):
            return self._export(folder, step)
        copy = [lambda: self._best_as_final(folder, step, best or {}) if self.ranks.rank == 0 else None]
        return self.writer.until_room("exports/final", folder.parent, copy, exports.beside(folder, "tmp"))

    @property
    def _best_record(self) -> Path:
        return self.trial.exports / "best" / EXPORT_RECORD

    def _keep_best(self, numbers: dict[str, Any] | None, step: int) -> bool:
        """Write `exports/best` where these numbers (rank 0's) beat what stands there. False where a stop kept it from that."""
        best = Best.of(self.config, self._best_record)
        found = best.improvement(numbers) if best is not None and self.ranks.rank == 0 else None
        if not self.any_rank(found is not None):
            return True
        if not self._export(self._best_record.parent, step, found or {}):
            return False
        if found:
            self._say("step %d is the best so far: %s %.4g", step, found["metric"], found["value"])
        return True

    def _best_as_final(self, folder: Path, step: int, best: dict[str, Any]) -> None:
        temporary = exports.begin(folder)
        for source in sorted(self._best_record.parent.iterdir()):
            fsync_file(Path(shutil.copyfile(source, temporary / source.name)))
        self._name_export(folder, step, {"version": best["version"], "best": best})
        logger.info("the final export is the best model, of step %d", best["step"])

    def is_done(self, total: int) -> bool:
        """Whether an earlier start came to the end of these very `total` steps: its export is of the state that was loaded."""
        record = read_json(self.trial.exports / "final" / EXPORT_RECORD) or {}
        exported = record.get("step") == total and record.get("version") == self.loaded
        return self.step >= total and self.any_rank(self.ranks.rank == 0 and exported)

    def _export(
        self, folder: Path, step: int, said: dict[str, Any] | None = None, patient: bool = True
    ) -> bool:
        self.does("export", step)
        begin, finish = partial(exports.begin, folder), partial(self._name_export, folder, step, said or {})
        done = self.writer.weights(
            f"exports/{folder.name}", folder, begin, finish, durable=True, patient=patient
        )
        if done:
            self._say("step %d exported to %s", step, folder)
        return done

    def _name_export(self, folder: Path, step: int, said: dict[str, Any]) -> None:
        version = self.loaded if step == self.step and self.loaded else str(self.version(step))
        record = {"step": step, "version": version, "trial": str(self.trial), **said}
        write_json(exports.beside(folder, "tmp") / EXPORT_RECORD, record)
        exports.put(folder)
        self._drop_old_exports()

    def _drop_old_exports(self) -> None:
        """Keep the newest `saver.keep_last` exports, the final and the best one not counted."""
        keep = self.config.saver.keep_last
        for folder in sorted(self.trial.exports.glob("step-[0-9]*"))[:-keep] if keep else []:
            exports.remove(folder)

    def finish(self, recipe: Any, step: int) -> ExitCode:
        """The end, after the export. A last save that failed is tried once more, and put on record where it fails again."""
        if self.saving.problem:
            self.save(recipe, step, last=True)
        if self.saving.problem and self.ranks.rank == 0:
            logger.error(
                "THE LAST STATE IS NOT SAVED: %s. The training is done, exports/final is whole",
                self.saving.problem,
            )
            path = self.trial.exports / "final" / EXPORT_RECORD
            try:
                write_json(path, (read_json(path) or {}) | {"not_saved": self.saving.problem})
            except OSError as error:  # what keeps a save from its place may keep this, too
                logger.error("that can't be written to %s either: %s", path, error)
        return ExitCode.DONE

    def stop(self, recipe: Any, step: int) -> ExitCode:
        """End at the boundary after `step`, its state saved. Before the first step there is none: a fresh start has the same."""
        if step == 0 and self.saving.newest < 0:
            self._say("told to stop before the first step: there is nothing to save")
            return ExitCode.STOPPED
        self.save(recipe, step, last=True)
        if self.saving.problem:
            raise CannotWrite(self.saving.problem)
        words = (
            "nothing is saved: recover.mode is disabled"
            if self.config.recover.mode == "disabled"
            else "its state is saved"
        )
        self._say("told to stop: after step %d, %s", step, words)
        return ExitCode.STOPPED

    def _say(self, words: str, *values: object) -> None:
        if self.ranks.rank == 0:
            logger.info(words, *values)


@functools.cache
def versions(trial: Trial) -> dict[str, str]:
    """Of the code and the libraries that make the state."""
    found = {"hpc_rl": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = ((read_json(trial.provenance_json) or {}).get("git") or {}).get("commit")
    return {**found, **({"commit": commit} if commit else {})}


def tokenizer_folder(config: Config) -> Path:
    model = config.model if hasattr(config, "model") else config.actor
    return Path(config.tokenizer_path or model.path).expanduser()
