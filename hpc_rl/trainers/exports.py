"""Exports: folders of weights that get their names only when they are complete, and waiting on a full disk.

Two renames replace a folder: the old folder gets a hidden name, then the new folder gets its name. After a
kill between the two, the next start calls `repair`.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpc_rl.config.changes import digest_options
from hpc_rl.config.load.stored import find_trainer
from hpc_rl.config.options.experiment import Config
from hpc_rl.config.rules.consistency import METRICS
from hpc_rl.core import files
from hpc_rl.core.errors import Damaged, RoleFailed
from hpc_rl.core.trial import EXPORT_RECORD_NAME, Trial, fsync_dir, load_json, write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.engines.base import Engine
from hpc_rl.engines.shared.hf_io import fsync_file
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.weight_files.chain import load_chain
from hpc_rl.weight_files.model_copy import build_model

logger = logging.getLogger(__name__)
CRITIC = "critic"  # the folder of the critic in an export
_LEFTOVER = re.compile(r"\.(best|final|step-\d{8,})\.(tmp|old|gone)")


def begin(folder: Path) -> Path:
    """Make an empty hidden folder next to `folder`, for writing. Raises OSError."""
    temporary = make_hidden_path(folder)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def install(folder: Path) -> None:
    """Rename the written hidden folder to `folder`, durably; replace an existing one. Raises OSError."""
    temporary, old = make_hidden_path(folder), make_hidden_path(folder, "old")
    fsync_dir(temporary)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(temporary, folder)
    fsync_dir(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove an export. First rename it, so no reader sees half of it. Raises OSError."""
    gone = make_hidden_path(folder, "gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    fsync_dir(folder.parent)  # otherwise a power failure could restore the name of a partly removed folder
    shutil.rmtree(gone, ignore_errors=True)


def repair(exports: Path) -> None:
    """Finish or undo the exports of a killed incarnation. For the owner of the trial only. Raises OSError."""
    for entry in sorted(os.listdir(exports)) if exports.is_dir() else []:
        if match := _LEFTOVER.fullmatch(entry):
            name, mark = match.groups()
            if mark == "old" and not (exports / name).exists():  # killed between the two renames
                os.rename(exports / entry, exports / name)
                fsync_dir(exports)
            else:
                shutil.rmtree(exports / entry, ignore_errors=True)


def _copy_durably(source: str, target: str) -> None:
    fsync_file(Path(shutil.copyfile(source, target)))


def make_hidden_path(folder: Path, mark: str = "tmp") -> Path:
    """Return the hidden path where a folder is written or moved."""
    return folder.with_name(f".{folder.name}.{mark}")


@dataclass
class WeightWriter:
    """Writes the weights of all ranks, and waits while the disk is full."""

    engine: Engine
    ranks: Ranks
    stopping: threading.Event  # ends the waiting
    tokenizer: Path  # folder of the tokenizer files that are written with the weights
    on_wait: Callable[[], None] = lambda: None  # called before each retry
    critic: Engine | None = None  # written to the folder `critic` within

    def write(self, what: str, folder: Path, finish: Callable[[], object], patient: bool = True) -> bool:
        """Write the weights to a hidden folder next to `folder`, then call `finish` on rank 0. Collective.

        On a full disk, waits for space if `patient`. Returns False if nothing was written because of a full
        disk or a stop. Any other error is raised on every rank.
        """
        first, temporary = self.ranks.rank == 0, make_hidden_path(folder)

        def export() -> None:
            self.engine.export(temporary, self.tokenizer)
            if self.critic is not None:
                if first:
                    (temporary / CRITIC).mkdir()
                self.critic.export(temporary / CRITIC, self.tokenizer)
            if first:
                finish()

        parts = [lambda: begin(folder) if first else None, export]
        return self.until_space(what, folder, parts, patient)

    def until_space(
        self, what: str, folder: Path, parts: Sequence[Callable[[], object]], patient: bool = True
    ) -> bool:
        """Run the parts in order; start over when rank 0 finds the disk full. See `write`."""
        reported = False
        for pause_s in files.yield_pauses():
            error: OSError | None = None
            for part in parts:
                try:
                    part()
                except OSError as caught:
                    error = caught
                full, broken, stop = self.ranks.any_of(
                    files.is_full(error),
                    error is not None and not files.is_full(error),
                    self.stopping.is_set(),
                )
                if broken:
                    raise error or RoleFailed(
                        f"trainer rank 0 could not write {what}; its log has the reason"
                    )
                if full:
                    break
            else:
                if reported and self.ranks.rank == 0:
                    files.tell_room(what)
                return True
            if self.ranks.rank == 0:
                # free the space for other writers
                shutil.rmtree(make_hidden_path(folder), ignore_errors=True)
                if patient and not reported:
                    files.tell_full(what, error, folder.parent)
            if stop or not patient:
                return False
            reported = True
            self.on_wait()
            self.stopping.wait(pause_s)
        raise AssertionError("files.yield_pauses() is endless")


@dataclass(frozen=True)
class Ranking:
    """The metric of evaluations that compares states."""

    metric: str
    mode: str  # min | max
    measured_by: Mapping[str, str]  # options that affect the metric, with digests of their values

    @classmethod
    def of(cls, config: Config) -> Ranking:
        keep = config.saver.keep_best
        metric = (keep.metric if keep else None) or METRICS[find_trainer(config)][0]
        mode = (keep.mode if keep else None) or ("min" if metric.endswith("loss") else "max")
        return cls(metric, mode, digest_options(config))

    def list_changes_since(self, standing: Mapping[str, Any]) -> list[str]:
        """Return the options that changed since `standing` was recorded and make it incomparable."""
        before = standing.get("measured_by") or {}
        changed = [
            option for option, digest in self.measured_by.items() if before.get(option, digest) != digest
        ]
        same = (standing.get("metric"), standing.get("mode")) == (self.metric, self.mode)
        return changed if same else ["saver.keep_best", *changed]

    def improvement(
        self, numbers: Mapping[str, Any] | None, standing: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return the record of an evaluation if it beats the `standing` one, else None."""
        value = (numbers or {}).get(self.metric)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
        new = {**vars(self), "value": float(value)}
        if self.list_changes_since(standing):
            return new
        old = float(standing["value"])
        better = value > old if self.mode == "max" else value < old
        return new if better else None


@dataclass
class Exports:
    """The folders that training writes in `exports/`: `step-…`, `best` and `final`.

    The best result is recorded only on disk: a restart compares with it if it was measured in the same way. A
    recover keeps a best model of discarded steps, because it was evaluated and is complete.
    """

    trial: Trial
    config: Config
    writer: WeightWriter
    version_of: Callable[[int], str]  # the label of the weights after a step
    on_export: Callable[[int], None]  # called with the step before each export

    def __post_init__(self) -> None:
        self.folder = self.trial.exports
        self.ranks = self.writer.ranks
        self.saver = self.config.saver

    def write_step(self, step: int) -> None:
        """Write `exports/step-<step>`; on a full disk, skip it and log an error."""
        folder = self.folder / f"step-{step:08d}"
        if not self._write(folder, step, patient=False) and self.ranks.rank == 0:
            logger.error(
                "EXPORT FAILED: the disk has no room for %s. Training continues; free space in %s",
                folder.name,
                self.folder,
            )

    def keep_best(self, numbers: Mapping[str, Any] | None, step: int, version: str = "") -> bool:
        """Write `exports/best` if an evaluation (rank 0's numbers) beats it.

        The weights are the present ones, or a published version. Returns False if a stop prevented the
        export.
        """
        found = None
        if self.saver.keep_best is not None and self.ranks.rank == 0:
            ranking, standing = Ranking.of(self.config), self.record("best") or {}
            found = ranking.improvement(numbers, standing)
            if found and standing and (changed := ranking.list_changes_since(standing)):
                form = (
                    "the model of step %s is not the best any more, because it was measured with another %s"
                )
                logger.warning(form, standing.get("step"), ", ".join(changed))
            # a further set has its own period
            if numbers and ranking.metric not in numbers and not self.config.evaluator.sets:
                measured = ", ".join(name for name, value in numbers.items() if not isinstance(value, str))
                form = (
                    "saver.keep_best has no effect: the evaluation of step %d lacks its metric %s; it has %s"
                )
                logger.error(form, step, ranking.metric, measured)
        if not self.ranks.any(found is not None):
            return True
        folder = self.folder / "best"
        if self.ranks.any(bool(version)):
            done = self._rebuild(folder, step, {**(found or {}), "version": version})
        else:
            done = self._write(folder, step, found or {})
        if not done:
            return False
        if found:
            logger.info("step %d is the best so far: %s %.4g", step, found["metric"], found["value"])
        return True

    def write_final(self, step: int) -> bool:
        """Write `exports/final`: the last weights, or the best ones with `saver.keep_best.as_final`.

        Returns False if the trainer was asked to stop while it waited for space.
        """
        folder = self.folder / "final"
        keep, best = self.saver.keep_best, self.record("best")
        use_best = keep is not None and keep.as_final and best is not None
        use_best = use_best and not Ranking.of(self.config).list_changes_since(best or {})
        if not self.ranks.any(self.ranks.rank == 0 and use_best):
            return self._write(folder, step)
        copy = [lambda: self._best_as_final(folder, step, best or {}) if self.ranks.rank == 0 else None]
        return self.writer.until_space("exports/final", folder, copy)

    def record(self, name: str) -> dict[str, Any] | None:
        """Return the record of an export, None if there is no such export."""
        return load_json(self.folder / name / EXPORT_RECORD_NAME)

    def note_not_saved(self, problem: str) -> None:
        """Record in `exports/final` that the last state could not be saved."""
        path = self.folder / "final" / EXPORT_RECORD_NAME
        try:
            write_json(path, (self.record("final") or {}) | {"not_saved": problem})
        except OSError as error:  # for example, the disk is still full
            form = "can't record in %s that the last checkpoint is missing; the export is complete: %s"
            logger.error(form, path, error)

    def _write(
        self, folder: Path, step: int, extra: Mapping[str, Any] | None = None, patient: bool = True
    ) -> bool:
        self.on_export(step)
        finish = partial(self._finish, folder, step, extra or {})
        what = f"exports/{folder.name}"
        done = self.writer.write(what, folder, finish, patient=patient)
        if done and self.ranks.rank == 0:
            logger.info("step %d exported to %s", step, folder)
        return done

    def _rebuild(self, folder: Path, step: int, record: Mapping[str, Any]) -> bool:
        """Write an export of a published version, on rank 0."""
        self.on_export(step)

        def write() -> None:
            temporary, version = begin(folder), WeightVersion.parse(record["version"])
            try:
                build_model(temporary, self.trial.weights, load_chain(self.trial.weights, version))
            except Damaged as error:
                shutil.rmtree(temporary, ignore_errors=True)
                form = "EXPORT FAILED: the weights of step %d can't be rebuilt; the trial continues: %s"
                logger.error(form, step, error)
                return
            for path in temporary.iterdir():
                fsync_file(path)
            self._finish(folder, step, record)
            logger.info("step %d exported to %s", step, folder)

        parts = [write if self.ranks.rank == 0 else lambda: None]
        return self.writer.until_space(f"exports/{folder.name}", folder, parts)

    def _best_as_final(self, folder: Path, step: int, best: Mapping[str, Any]) -> None:
        temporary = begin(folder)
        shutil.copytree(self.folder / "best", temporary, copy_function=_copy_durably, dirs_exist_ok=True)
        for inner in filter(Path.is_dir, temporary.iterdir()):
            fsync_dir(inner)
        self._finish(folder, step, {"version": best["version"], "best": best})
        logger.info("the final export is the best model, of step %d", best["step"])

    def _finish(self, folder: Path, step: int, extra: Mapping[str, Any]) -> None:
        record = {"step": step, "version": self.version_of(step), "trial": str(self.trial), **extra}
        write_json(make_hidden_path(folder) / EXPORT_RECORD_NAME, record)
        install(folder)
        drop_old_exports(self.folder, self.saver.keep_last)


def drop_old_exports(folder: Path, keep_last: int | None) -> None:
    """Remove all `step-…` exports except the newest `keep_last`; None keeps all. Raises OSError."""
    for old in sorted(folder.glob("step-[0-9]*"))[:-keep_last] if keep_last else []:
        remove(old)
