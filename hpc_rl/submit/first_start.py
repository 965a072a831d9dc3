"""Outlook: what the first start of a submission would do now, and why it may not be submitted. Reads files of the trial only.

The decision is the trainer's own (checkpoint/decide.py). What needs longer than a moment to read is left to the start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Decision, Situation, decide
from hpc_rl.checkpoint.start_facts import gather, read_limit
from hpc_rl.config.loading.load import from_dict
from hpc_rl.config.sections.experiment import LENGTH_OPTIONS, Config, last_step
from hpc_rl.config.tables.changes import Change, changes, refuse_unsafe
from hpc_rl.datasets.rows import check_same_rows, fingerprint_in_passing
from hpc_rl.errors import ConfigError, NothingToResume, TrialBusy
from hpc_rl.rollout.batch_log.ledger import LedgerDamaged
from hpc_rl.rollout.batch_log.replay import check_replay, rows_of
from hpc_rl.submit import trial_index
from hpc_rl.trial import Trial, account, entries, read_json

NEXT = "next.0"  # an attempt id that no scheduler gives
IN_PASSING_BYTES = (
    64 << 20
)  # a command reads a batch log of this size before it submits a start that replays it
PLACE = ("cluster.fileroot", "experiment_name", "trial_name")  # options that say where a trial lies


@dataclass(frozen=True)
class FirstStart:
    """What a first start would find and do. `unread`: files of the generation to load that only the start itself reads."""

    situation: Situation
    decision: Decision
    unread: tuple[str, ...] = ()


def predict_start(trial: Trial, config: Config, start_mode: str, from_step: int | None = None) -> FirstStart:
    """What a first start in `start_mode` would do now, from the generation `from_step` where a person named one."""
    mode, retries = config.recover.mode, config.recover.retries
    if not os.path.isdir(trial.dir):
        situation = Situation(mode, start_mode, first_start=True, wanted=from_step)
        return FirstStart(situation, decide(situation))
    situation, _ = gather(
        trial, trial.attempt(NEXT), 0, mode, start_mode, retries, from_step, in_passing=True
    )
    decision = decide(situation)
    return FirstStart(situation, decision, _unread(trial, decision, from_step))


def _unread(trial: Trial, decision: Decision, from_step: int | None) -> tuple[str, ...]:
    found = generation.check(trial.generation(decision.step)) if decision.step is not None else None
    if found is None or found.manifest is None:
        return ()
    limit = read_limit(found, from_step, in_passing=True)
    return tuple(file.name for file in found.manifest.files if limit is not None and file.size > limit)


def check_start(trial: Trial, config: Config, outlook: FirstStart) -> list[Change]:
    """Raises TrialBusy, NothingToResume or ConfigError where the job would come to nothing; returns what changes, all safe."""
    mode, situation = config.recover.mode, outlook.situation
    will_start = outlook.decision.action in ("load", "fresh")
    if situation.start_mode in ("disabled", "fault") and (trial.has_state() or not will_start):
        raise TrialBusy(
            f"trial {trial} has state already, and recover.mode={mode} starts fresh. {_ways_on(trial, situation)}"
            f"For a fresh start give another trial_name, or remove {trial.dir}."
        )
    if not will_start:
        raise NothingToResume(f"{outlook.decision.reason}. {advice_on(trial, situation)}".rstrip())
    _refuse_length(trial, config, outlook.decision.step)
    found = option_changes(trial, config, outlook.decision)
    refuse_unsafe(found, str(trial))
    _refuse_other_rows(trial, config, outlook.decision)
    _refuse_lost_batches(trial, outlook.decision.step or 0)
    if situation.wanted is None:
        _refuse_finished(trial, config, found)
    return found


def _ways_on(trial: Trial, situation: Situation) -> str:
    if sound_steps(trial, situation.trimmed):
        return f"Go on from it with `hpc-rl recover {trial}` or recover.mode=auto. "
    return "" if situation.trimmed else "Go on from it with recover.mode=auto. "


def advice_on(trial: Trial, situation: Situation) -> str:
    """What to do where there is nothing to start from as asked; nothing that is refused as well."""
    if situation.wanted is not None and (steps := sound_steps(trial, situation.trimmed)):
        return f"Allowed: {', '.join(map(str, steps))}."
    if situation.start_mode != "resume":
        return ""
    if situation.trimmed:
        return f"Nor can trial {trial} start over: batches 1 to {situation.trimmed} are gone. Give another trial_name."
    return f"`hpc-rl submit` with recover.mode=auto starts trial {trial} from step 0."


def sound_steps(trial: Trial, first: int = 0) -> list[int]:
    """Steps of the generations from `first` on in which nothing wrong is seen without reading large files, newest first."""
    found = [one for one in generation.scan(trial) if one.step >= first]
    return [one.step for one in found if not generation.verify(one, generation.LIGHT_BYTES).problem]


def _refuse_length(trial: Trial, config: Config, step: int | None) -> None:
    if step is None:
        return
    data = _data_of(trial, step) or fingerprint_in_passing(config.train_dataset.path)
    check_end(step, trial, config, data.get("rows"))


def check_end(step: int, trial: Trial, config: Config, num_rows: int | None = None) -> None:
    """Raises ConfigError where a trial ends before a generation; `num_rows` are those of its dataset, where they are known."""
    end = last_step(config, num_rows)
    if end is not None and end < step:
        given = ", ".join(
            f"{name} {getattr(config, name)}" for name in LENGTH_OPTIONS if getattr(config, name) is not None
        )
        raise ConfigError(
            f"{given}: trial {trial} ends at step {end}, and generation {step} is past that. "
            f"Allowed: an end at step {step} or later; for a shorter trial give another trial_name."
        )


def _data_of(trial: Trial, step: int | None) -> dict[str, Any]:
    """Fingerprint of the rows that the state to start from was made with; {} where none was taken, as of an import."""
    manifest = generation.check(trial.generation(step)).manifest if step is not None else None
    return (manifest.data if manifest else {}) or (rows_of(trial.rollout) if _has_batches(trial) else {})


def _refuse_other_rows(trial: Trial, config: Config, decision: Decision) -> None:
    path = config.train_dataset.path
    when = "its batch log was begun" if decision.step is None else f"generation {decision.step} was made"
    check_same_rows(path, _data_of(trial, decision.step), fingerprint_in_passing(path), when)


def _refuse_lost_batches(trial: Trial, step: int) -> None:
    """Raises NothingToResume where the batch log can't be replayed from `step`; a large one only the start itself reads."""
    if not _has_batches(trial):
        return
    size = sum(entry.stat().st_size for entry in entries(trial.rollout) if entry.is_file())
    try:
        if size <= IN_PASSING_BYTES:
            check_replay(trial.rollout, step)
    except LedgerDamaged as error:
        whence = f"generation {step}" if step else "the start"
        raise NothingToResume(
            f"trial {trial} can't go on from {whence}: {error}. Put the file back, or go on from a later generation; "
            "`hpc-rl checkpoint export` makes a model of its state for a new trial."
        ) from error


def option_changes(trial: Trial, config: Config, decision: Decision) -> list[Change]:
    """What differs from the configuration that the trial's state was made with; none where there is no such state.

    That is the configuration of the generation to be loaded: of what was submitted since, nothing is in it. The trial's own
    file counts where there are only batches. Raises ConfigError where neither can be read, or is of another version.
    """
    if not has_progress(trial):
        return []
    copy = (
        trial.generation(decision.step) / generation.CONFIG_NAME
        if decision.step is not None
        else trial.config_json
    )
    for path in (copy, trial.config_json):
        data = read_json(path)
        if isinstance(data, dict):
            try:
                found = changes(from_dict(data), config)
                return [_as_it_lies(change, trial, config, decision) for change in found]
            except ConfigError as error:
                raise ConfigError(
                    f"{path}, which trial {trial} goes on from, is of another version: {error}"
                ) from error
    raise ConfigError(
        f"{trial.config_json} is lost or damaged, and no sound generation has a copy: nobody can tell whether the state of trial "
        f"{trial} fits these options. Put the file back, or give another trial_name."
    )


def _as_it_lies(change: Change, trial: Trial, config: Config, decision: Decision) -> Change:
    """What is unsafe by its name alone, and not where the very thing was moved."""
    if change.name == "train_dataset.path" and _data_of(trial, decision.step):
        return replace(change, safe=True, reason="its rows must be the same, and are compared")
    if change.name in PLACE and _same_place(
        Trial.of(config.cluster.fileroot, account(), *_names(config)), trial
    ):
        return replace(change, safe=True, reason="the trial lies there now")
    return change


def _names(config: Config) -> tuple[str, str]:
    return config.experiment_name, config.trial_name


def _same_place(one: Trial, other: Trial) -> bool:
    return os.path.realpath(one.dir) == os.path.realpath(other.dir)


def has_progress(trial: Trial) -> bool:
    """Whether anything was made that a start goes on from: a generation, be it damaged, or a batch."""
    return _has_batches(trial) or any(trial.recover.glob("gen-*/manifest.json"))


def _has_batches(trial: Trial) -> bool:
    return trial.trimmed.exists() or any(trial.batches.glob("*.seal"))


def stale_leftovers(trial: Trial, config: Config) -> list[Path]:
    """Files that a trial without generation or batch has of earlier starts, where other options or rows made them: no start may
    use them.

    Those are groups and rejections that no batch came of, and the pointer to the weights that servers begin with.
    """
    if has_progress(trial):
        return []
    data, path = read_json(trial.config_json), config.train_dataset.path
    with contextlib.suppress(ConfigError):
        check_same_rows(path, rows_of(trial.rollout), fingerprint_in_passing(path), "the log was begun")
        if isinstance(data, dict) and all(change.safe for change in changes(from_dict(data), config)):
            return []
    return [
        path for path in (*trial.rollout.glob("segment-*.ledger"), trial.current_weights) if path.exists()
    ]


def _refuse_finished(trial: Trial, config: Config, changed: Sequence[Change]) -> None:
    if trial.done.exists() and not any(change.name in LENGTH_OPTIONS for change in changed):
        end = "total_train_steps" if config.total_train_epochs is None else "total_train_epochs"
        raise NothingToResume(
            f"{trial} has reached its end. To train it longer: hpc-rl recover {trial_index.cli_name(trial)} {end}=N; "
            f"what it made is in {trial.exports}. For a fresh start give another trial_name."
        )
