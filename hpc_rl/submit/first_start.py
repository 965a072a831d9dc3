"""What the first start of a submission would do now, and why it may be refused. Only reads files.

The decision is the trainer's own (checkpoint/decide.py). What takes longer than a moment to read is left to
the start.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Decision, Situation, decide
from hpc_rl.checkpoint.start_facts import gather, read_limit, seals_of
from hpc_rl.config.loading.stored import from_dict
from hpc_rl.config.sections.experiment import LENGTH_OPTIONS, Config, GRPOConfig, last_step
from hpc_rl.config.tables.changes import Change, changes, refuse_unsafe
from hpc_rl.datasets.rows import check_same_rows, fingerprint_in_passing
from hpc_rl.errors import ConfigError, NothingToResume, TrialBusy
from hpc_rl.rollout.batch_log.ledger import OF_USER_CODE, LedgerDamaged
from hpc_rl.rollout.batch_log.replay import check_replay, read_state, rows_of
from hpc_rl.submit import trial_index
from hpc_rl.trial import Trial, account, entries, read_json

PLACEHOLDER_ATTEMPT = "next.0"  # an attempt id that no scheduler gives
MAX_LOG_BYTES = 64 << 20  # up to which a command reads a batch log before it submits a start that replays it
LOCATION_OPTIONS = ("cluster.fileroot", "experiment_name", "trial_name")


@dataclass(frozen=True)
class FirstStart:
    """What a first start would find and do. `unread`: files of its checkpoint that only the start reads."""

    situation: Situation
    decision: Decision
    unread: tuple[str, ...] = ()


def predict_start(trial: Trial, config: Config, start_mode: str, from_step: int | None = None) -> FirstStart:
    """Return what a first start in `start_mode` would do now, from checkpoint `from_step` if given."""
    mode, retries = config.recover.mode, config.recover.retries
    if not os.path.isdir(trial.dir):
        situation = Situation(mode, start_mode, first_start=True, wanted=from_step)
        return FirstStart(situation, decide(situation))
    attempt = trial.attempt(PLACEHOLDER_ATTEMPT)
    situation, _ = gather(trial, attempt, 0, mode, start_mode, retries, from_step, in_passing=True)
    decision = decide(situation)
    return FirstStart(situation, decision, _unread(trial, decision, from_step))


def _unread(trial: Trial, decision: Decision, from_step: int | None) -> tuple[str, ...]:
    found = generation.check(trial.generation(decision.step)) if decision.step is not None else None
    if found is None or found.manifest is None:
        return ()
    limit = read_limit(found, from_step, in_passing=True)
    return tuple(file.name for file in found.manifest.files if limit is not None and file.size > limit)


def check_start(trial: Trial, config: Config, start: FirstStart, replay: bool = False) -> list[Change]:
    """Return the options that change, all of them safe.

    Raises TrialBusy, NothingToResume or ConfigError where the start would fail or ruin what the trial has.
    """
    mode, situation = config.recover.mode, start.situation
    will_start = start.decision.action in ("load", "fresh")
    if situation.start_mode in ("disabled", "fault") and (trial.has_state() or not will_start):
        raise TrialBusy(
            f"trial {trial} has state already, and recover.mode={mode} starts from step 0. "
            f"{_ways_to_resume(trial, situation)}"
            f"For a fresh start give another trial_name, or remove {trial.dir}."
        )
    if not will_start:
        raise NothingToResume(f"{start.decision.reason}. {advice_on(trial, situation)}".rstrip())
    _check_length(trial, config, start.decision.step)
    found = option_changes(trial, config, start.decision)
    refuse_unsafe(found, str(trial), replay)
    _check_rows(trial, config, start.decision)
    _check_batches(trial, start.decision.step or 0)
    if situation.wanted is None:
        _check_finished(trial, config, found)
    return found


def needs_new_batches(
    config: Config, situation: Situation, changed: Sequence[Change], replay: bool = False
) -> bool:
    """Return whether the batches after the step to start from are set aside, and their prompts issued again.

    They are when the user goes back to a checkpoint, or changes the policy or what is generated.
    """
    if replay or not isinstance(config, GRPOConfig):
        return False
    return situation.wanted is not None or any(change.renews for change in changed)


def batches_after(trial: Trial, step: int | None) -> list[int]:
    """Return the steps of the batches that are cut and kept and come after this step, ascending."""
    return sorted(one for one in seals_of(trial) if one > (step or 0))


def _ways_to_resume(trial: Trial, situation: Situation) -> str:
    if sound_steps(trial, situation.trimmed):
        return f"Resume it with `hpc-rl recover {trial}` or recover.mode=auto. "
    return "" if situation.trimmed else "Resume it with recover.mode=auto. "


def advice_on(trial: Trial, situation: Situation) -> str:
    """Return what to do where there is nothing to start from as requested."""
    if situation.wanted is not None and (steps := sound_steps(trial, situation.trimmed)):
        return f"Allowed: {', '.join(map(str, steps))}."
    if situation.start_mode != "resume":
        return ""
    if situation.trimmed:
        return (
            f"Trial {trial} cannot start over either: batches 1 to {situation.trimmed} are gone. "
            "Give another trial_name."
        )
    return f"`hpc-rl submit` with recover.mode=auto starts trial {trial} from step 0."


def sound_steps(trial: Trial, first: int = 0) -> list[int]:
    """Return the steps of checkpoints from `first` on, newest first, of which no small file is damaged."""
    found = [one for one in generation.scan(trial) if one.step >= first]
    return [one.step for one in found if not generation.verify(one, generation.LIGHT_BYTES).problem]


def _check_length(trial: Trial, config: Config, step: int | None) -> None:
    if step is not None:
        data = _data_of(trial, step) or fingerprint_in_passing(config.train_dataset.path)
        check_end(step, trial, config, data.get("rows"))


def check_end(step: int, trial: Trial, config: Config, num_rows: int | None = None) -> None:
    """Raise ConfigError where a trial ends before a checkpoint; `num_rows` of its dataset, where known."""
    end = last_step(config, num_rows)
    if end is not None and end < step:
        values = {name: getattr(config, name) for name in LENGTH_OPTIONS}
        given = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        raise ConfigError(
            f"{given}: trial {trial} ends at step {end}, before checkpoint {step}. "
            f"Allowed: an end at step {step} or later; for a shorter trial give another trial_name."
        )


def _data_of(trial: Trial, step: int | None) -> dict[str, Any]:
    """Return the fingerprint of the rows behind the state to start from; {} where none was taken."""
    manifest = generation.check(trial.generation(step)).manifest if step is not None else None
    return (manifest.data if manifest else {}) or (rows_of(trial.rollout) if _has_batches(trial) else {})


def _check_rows(trial: Trial, config: Config, decision: Decision) -> None:
    path = config.train_dataset.path
    step = decision.step
    when = "its batch log was begun" if step is None else f"checkpoint {step} was made"
    check_same_rows(path, _data_of(trial, step), fingerprint_in_passing(path), when)


def _check_batches(trial: Trial, step: int) -> None:
    """Raise NothingToResume where a batch log, unless it is large, can't be replayed from `step`."""
    if not _has_batches(trial):
        return
    size = sum(entry.stat().st_size for entry in entries(trial.rollout) if entry.is_file())
    try:
        if size <= MAX_LOG_BYTES:
            check_replay(trial.rollout, step)
    except LedgerDamaged as error:
        origin = f"checkpoint {step}" if step else "the start"
        raise NothingToResume(
            f"trial {trial} cannot resume from {origin}: {error}. Put the file back, or resume from a later "
            "checkpoint; `hpc-rl checkpoint export` makes a model of its state for a new trial."
        ) from error


def option_changes(trial: Trial, config: Config, decision: Decision) -> list[Change]:
    """Return what differs from the configuration behind the trial's state, if it has any.

    That is the configuration of the checkpoint to be loaded, which has nothing of what was submitted since;
    where there are only batches, the trial's own file. Raises ConfigError where neither is readable.
    """
    if not has_progress(trial):
        return []
    copy = trial.config_json
    if decision.step is not None:
        copy = trial.generation(decision.step) / generation.CONFIG_NAME
    for path in (copy, trial.config_json):
        data = read_json(path)
        if isinstance(data, dict):
            try:
                found = changes(from_dict(data), config)
                return [_allow_move(change, trial, config, decision) for change in found]
            except ConfigError as error:
                raise ConfigError(
                    f"{path}, from which trial {trial} would resume, is of another version: {error}"
                ) from error
    raise ConfigError(
        f"{trial.config_json} is lost or damaged, and no sound checkpoint has a copy: cannot verify that the "
        f"state of trial {trial} is compatible with these options. Put the file back, or give another "
        "trial_name."
    )


def _allow_move(change: Change, trial: Trial, config: Config, decision: Decision) -> Change:
    """Return the change as safe where a path differs only because the same thing was moved."""
    if change.name == "train_dataset.path" and _data_of(trial, decision.step):
        return replace(change, safe=True, reason="its rows must be the same, and are compared")
    if change.name in LOCATION_OPTIONS:
        names = (config.experiment_name, config.trial_name)
        now = Trial.of(config.cluster.fileroot, account(), *names)
        if os.path.realpath(now.dir) == os.path.realpath(trial.dir):
            return replace(change, safe=True, reason="the trial is there now")
    return change


def has_progress(trial: Trial) -> bool:
    """Return whether a start could resume anything: a checkpoint, even a damaged one, or a batch."""
    return _has_batches(trial) or any(trial.recover.glob("gen-*/manifest.json"))


def _has_batches(trial: Trial) -> bool:
    return trial.trimmed.exists() or any(trial.batches.glob("*.seal"))


def stale_leftovers(trial: Trial, config: Config) -> list[Path]:
    """Return files of earlier starts that no start may use, because other options or rows made them.

    Only of a trial without checkpoints and batches: groups and rejections that are in no batch, and the
    pointer to the weights that servers begin with.
    Where user code rejected a prompt they are stale as well: it may be other code now.
    """
    if has_progress(trial):
        return []
    data, path = read_json(trial.config_json), config.train_dataset.path
    with contextlib.suppress(ConfigError):
        check_same_rows(path, rows_of(trial.rollout), fingerprint_in_passing(path), "the log was begun")
        found = changes(from_dict(data), config) if isinstance(data, dict) else []
        # the policy that they were made by is still the initial one, whatever it is trained with
        fit = [change.safe and (not change.renews or change.name.startswith("actor.")) for change in found]
        keeps = isinstance(data, dict) and all(fit)
        if keeps and not _was_rejected_by_user_code(trial):
            return []
    left = (*trial.rollout.glob("segment-*.ledger"), trial.current_weights)
    return [path for path in left if path.exists()]


def _was_rejected_by_user_code(trial: Trial) -> bool:
    paths = list(trial.rollout.glob("segment-*.ledger"))
    if sum(path.stat().st_size for path in paths) > MAX_LOG_BYTES:
        return False
    return any(record.reason in OF_USER_CODE for record in read_state(trial.rollout).rejected.values())


def _check_finished(trial: Trial, config: Config, changed: Sequence[Change]) -> None:
    if trial.done.exists() and not any(change.name in LENGTH_OPTIONS for change in changed):
        end = "total_train_steps" if config.total_train_epochs is None else "total_train_epochs"
        raise NothingToResume(
            f"{trial} has reached its end. To train it longer: "
            f"hpc-rl recover {trial_index.cli_name(trial)} {end}=N; its results are in {trial.exports}. "
            "For a fresh start give another trial_name."
        )
