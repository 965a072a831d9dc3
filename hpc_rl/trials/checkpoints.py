"""Checkpoints of a trial for commands: choose one, verify it, request one, and refuse a useless import."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import Found
from hpc_rl.checkpoint.retention import hold, rank_best
from hpc_rl.checkpoint.start_facts import find_trimmed, list_seals
from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.experiment import list_training_paths
from hpc_rl.config.rules.consistency import METRICS
from hpc_rl.core.adapters import is_adapter
from hpc_rl.core.errors import CannotWrite, ConfigError, NothingToResume, TrialStateError
from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import Trial, load_json, write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.datasets.rows import compute_fingerprint
from hpc_rl.status.scheduler_view import TrialWatch
from hpc_rl.trials import submission
from hpc_rl.trials.first_start import check_end, list_sound_steps
from hpc_rl.trials.lock import TrialLock
from hpc_rl.trials.published_weights import (
    choose_version,
    describe_versions,
    find_version,
    hold_chain,
    list_versions,
)

Weights = Found | WeightVersion  # of a trial, to export: a checkpoint, or published weights
POLL_S = 0.5  # interval between scans of the checkpoints


def request_checkpoint(trial: Trial, wait_s: float) -> Found | None:
    """Ask a running trial to save after its current step; return the checkpoint, None after `wait_s`.

    Raises TrialStateError if the trial can't save, CannotWrite.
    """
    watch = TrialWatch(trial)
    status = watch.poll()
    if status.state is not TrialState.RUNNING:
        raise TrialStateError(f"{trial} is {status.state}: only a trial that runs can save a checkpoint.")
    if status.plan.get("recover_mode") == "disabled":
        raise TrialStateError(f"{trial} saves no checkpoints: its recover.mode is disabled.")
    least = max([status.step, *(one.step + 1 for one in generation.scan(trial))])
    request, end = {"id": uuid.uuid4().hex}, time.monotonic() + wait_s
    try:
        write_json(trial.save_intent, request)
        while not status.over and time.monotonic() < end:
            status = watch.poll()  # before the scan: a save may be the last that a trial does
            if found := [one for one in generation.scan(trial) if one.step >= least and not one.problem]:
                return found[0]
            time.sleep(POLL_S)
    except OSError as error:
        raise CannotWrite(f"{trial.save_intent} can't be written: {error.strerror or error}") from error
    finally:
        if load_json(trial.save_intent) == request:
            trial.save_intent.unlink(missing_ok=True)
    if status.over:
        raise TrialStateError(f"{trial} is {status.state} now, and saved no checkpoint {least} or later.")
    return None


def find_damages(trial: Trial, checkpoint: Found) -> list[str]:
    """Read every file of a checkpoint and return its damages."""
    if checkpoint.manifest is None:
        return [checkpoint.problem]
    try:
        with hold(trial, checkpoint.step, "verify") as folder:
            return generation.find_damage(folder, checkpoint.manifest.files)
    except TrialStateError as error:
        return [str(error)]


def check_import_source(source: Path) -> None:
    """Raise ConfigError for a folder that has neither a model nor an adapter."""
    if not (source / "config.json").is_file() and not is_adapter(source):
        raise ConfigError(f"{source} is not a Hugging Face model: config.json is missing")


def check_import_step(trial: Trial, step: int) -> None:
    """Raise TrialStateError if a start would not resume from an imported checkpoint of this step."""
    sound = list_sound_steps(trial)  # a start skips damaged ones
    cut, gone = list_seals(trial), find_trimmed(trial)
    first = max([gone, *(one + 1 for one in sound)])
    last = max(cut, default=gone or None)
    if first <= step and (last is None or step <= last):
        return
    if last is None:
        advice = f"Import as step {first} or later, or into another trial."
    elif first <= last:
        advice = f"Import as a step from {first} to {last}, or into another trial."
    else:
        advice = "Import into another trial, or set actor.path of a new one to the folder."
    if sound and sound[0] >= step:
        raise TrialStateError(
            f"{trial} has checkpoint {sound[0]}, from which `hpc-rl recover` would resume instead of step "
            f"{step}. {advice}"
        )
    assert last is not None  # without batches, only a checkpoint can be in the way
    kept = f"only contains batches {gone + 1} to {last}"
    if gone >= last:
        kept = f"contains no batch, because those up to {gone} were deleted"
    raise TrialStateError(f"{trial} cannot resume from step {step}: the batch log {kept}. {advice}")


def check_import_end(trial: Trial, step: int) -> None:
    """Raise ConfigError if the trial ends before this step: `recover` would refuse it."""
    config = load_json(trial.config_json)
    if not isinstance(config, dict):
        fix = "`hpc-rl render` of the same configuration restores it"
        raise ConfigError(f"{trial.config_json} is missing or damaged; {fix}")
    loaded = from_dict(config)
    check_end(step, trial, loaded, compute_fingerprint(*list_training_paths(loaded)).get("rows"))


@contextmanager
def claim_for_import(trial: Trial, step: int) -> Iterator[TrialLock]:
    """Lock a trial while a checkpoint is imported: a start in between would not know of it.

    Raises TrialBusy, TrialStateError, ConfigError.
    """
    with TrialLock(trial, "given an imported checkpoint") as lock:
        submission.check_idle(trial)
        check_import_step(trial, step)
        check_import_end(trial, step)
        yield lock


def make_row(one: Found) -> dict[str, Any]:
    """Return the facts of a checkpoint for programs; `time` in Unix seconds, `bytes` of all its files."""
    made, written_at = one.manifest, None
    with suppress(OSError):
        written_at = (one.path / generation.MANIFEST_NAME).stat().st_mtime
    return {
        "step": one.step,
        "path": str(one.path),
        "problem": one.problem,
        "sound": not one.problem,
        **{name: getattr(made, name, None) for name in ("lineage", "submission", "num_ranks")},
        "bytes": sum(file.size for file in made.files) if made else None,
        "metrics": one.metrics,
        "versions": made.versions if made else {},
        "time": written_at,
    }


def find_usual_metric(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the metric that a trainer evaluates, as eval_reward, among the rows'; "" without one."""
    usual = dict.fromkeys(name for names in METRICS.values() for name in names)
    return next((name for row in rows for name in usual if name in row["metrics"]), "")


def choose_checkpoint(trial: Trial, step: int | None = None, metric: str | None = None) -> Found:
    """Return the checkpoint of a step, the best one, or the newest sound one. Raises NothingToResume."""
    found = generation.scan(trial)
    if metric is not None:
        steps = rank_best([one for one in found if not one.problem], metric)
        if not steps:
            raise NothingToResume(
                f"no sound checkpoint of {trial} has a metric {metric!r}. {list_sound(trial)}"
            )
        step = steps[0]
    for one in found:
        if one.step == step or (step is None and not one.problem):
            return one
    if step is None:
        raise NothingToResume(f"{trial} has no sound checkpoint.")
    raise NothingToResume(f"{trial} has no checkpoint {step}. {list_sound(trial)}")


def choose_export(
    trial: Trial, step: int | None = None, metric: str | None = None, label: str | None = None
) -> Weights:
    """Return the published version with this label, else a checkpoint as `choose_checkpoint` does.

    A step without a sound checkpoint is a published version if it can be rebuilt, of the newest lineage.
    Raises NothingToResume or, for a damaged checkpoint, TrialStateError, with the steps that can be exported.
    """
    if label is not None:
        return choose_version(trial, label)
    refusal: TrialStateError
    try:
        found = choose_checkpoint(trial, step, metric)
        if not found.problem:
            return found
        problem = f"checkpoint {found.step} of {trial} is damaged: {found.problem}"
        refusal = TrialStateError(f"{problem}. {list_sound(trial)}")
    except NothingToResume as error:
        refusal = error
    versions = list_versions(trial)
    version = find_version(versions, step)
    if version is None:
        final = trial.exports / "final"
        is_there = step is None and metric is None and final.is_dir()
        last = f" The model after the last step is in {final}." if is_there else ""
        raise type(refusal)(f"{refusal} {describe_versions(versions)}{last}")
    return version


@contextmanager
def hold_export(trial: Trial, chosen: Weights, why: str) -> Iterator[None]:
    """Keep a checkpoint or a published version from removal. Raises NothingToResume, Damaged if gone."""
    holding = hold(trial, chosen.step, why) if isinstance(chosen, Found) else hold_chain(trial, chosen, why)
    with holding:
        yield


def list_sound(trial: Trial) -> str:
    sound = [str(one.step) for one in generation.scan(trial) if not one.problem]
    return f"Sound ones: {', '.join(sound)}." if sound else "There is no sound one."
