"""Fork: a new trial that begins with a checkpoint of another one, under its own options.

A step without a checkpoint may have published weights. Then the fork is a trial that trains from step 0, and
its model is an export of these weights in its directory.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import IMPORTED, IMPORTED_LINEAGE, Commit, Found
from hpc_rl.checkpoint.retention import hold
from hpc_rl.config.changes import Change, list_changes, refuse_other_model
from hpc_rl.config.load.stored import from_dict, redact_secrets
from hpc_rl.config.options.experiment import (
    LENGTH_OPTIONS,
    Config,
    find_last_step,
    get_value,
    list_training_paths,
)
from hpc_rl.config.rules.consistency import FOLLOWS
from hpc_rl.core.errors import (
    CannotWrite,
    ConfigError,
    NothingToResume,
    TrialBusy,
    TrialNameError,
    TrialStateError,
)
from hpc_rl.core.records import ForkRecord
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Trial, fsync_dir, load_object, write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.datasets.rows import compute_fingerprint
from hpc_rl.trials import trial_index
from hpc_rl.trials.first_start import list_sound_steps
from hpc_rl.trials.published_weights import (
    find_version,
    format_steps,
    hold_chain,
    list_versions,
    write_export,
)

FORKED = "fork"
INITIAL = "initial"  # export of the weights that a fork without a checkpoint begins with
_AT_STEP = re.compile(r"(.+)@(?:gen-)?([0-9]+)")
Origin = Found | WeightVersion  # of a fork: a checkpoint, or published weights


def resolve_parent(text: str, step: int | None) -> tuple[Trial, int | None]:
    """Return the trial and the step of `TRIAL@STEP`; of `TRIAL` with `step`. Raises TrialNameError."""
    match = _AT_STEP.fullmatch(text)
    try:
        return trial_index.resolve(text), step  # a trial's name may contain @
    except TrialNameError:
        if match is None:
            raise
    if step is not None:
        raise ConfigError(f"{text} --from {step} names two steps: remove one of them.")
    return trial_index.resolve(match[1]), int(match[2])


def find_changes(parent: Trial, origin: Origin, config: Config) -> list[Change]:
    """Return the options of a fork that differ from the configuration behind its origin.

    Raises ConfigError if it could not load the state: another trainer, model or optimizer.
    """
    of_checkpoint = isinstance(origin, Found) and load_object(origin.path / generation.CONFIG_NAME)
    data = of_checkpoint or load_object(parent.config_json)
    differing = list_changes(redact_secrets(from_dict(data)), redact_secrets(config))
    refuse_other_model(differing, str(parent), only_weights=not isinstance(origin, Found))
    return differing


def check_start(origin: Origin, config: Config) -> None:
    """Raise ConfigError if the fork has no step to train, or would not start."""
    if not isinstance(origin, Found):
        if config.recover.mode == "resume":
            raise ConfigError(
                f"recover.mode resume needs a checkpoint, and step {origin.step} has published weights only: "
                "add recover.mode=auto."
            )
        return
    end = find_last_step(config, compute_fingerprint(*list_training_paths(config)).get("rows"))
    if end is not None and end <= origin.step:
        why = f"the fork would end at step {end}, which checkpoint {origin.step} has reached already"
        use = f"add total_train_steps=N above {origin.step}, or --from an earlier checkpoint"
        raise ConfigError(Refusal(option="", kind=Kind.CONFLICT, why=why, use=use, related=LENGTH_OPTIONS))


def choose_origin(parent: Trial, step: int | None) -> Origin:
    """Return the checkpoint of a step, or the newest sound one; else the published weights of the step.

    Raises NothingToResume with the allowed steps.
    """
    steps = list_sound_steps(parent)
    if steps and step in (None, *steps):
        return generation.check(parent.generation(steps[0] if step is None else step))
    versions = list_versions(parent)
    if version := find_version(versions, step):
        return version
    wanted = "sound checkpoint" if step is None else f"sound checkpoint {step}"
    known = f"Allowed: {', '.join(map(str, steps))}." if steps else "It has none."
    weights = f" Published weights can be forked by @STEP: {format_steps(versions)}." if versions else ""
    raise NothingToResume(f"{parent} has no {wanted}. {known}{weights}")


def describe_origin(parent: Trial, origin: Origin) -> str:
    if isinstance(origin, Found):
        return f"fork       of {parent} at checkpoint {origin.step}"
    afresh = "training begins at step 0, and the optimizer starts afresh"
    return f"fork       of {parent} with weights {origin}: {afresh}"


@contextlib.contextmanager
def claim_trial(trial: Trial) -> Iterator[None]:
    """Remove the directory of a new trial where the block fails. Raises TrialBusy if there is one."""
    if os.path.lexists(trial.dir):
        record = ForkRecord.read(trial.forked_from)
        only_weights = record is not None and record.only_weights
        submit = f"submit {trial.config_yaml}" if only_weights else f"recover {trial.dir}"
        raise TrialBusy(
            f"{trial.dir} exists already, and a fork is a new trial: give it another name. "
            f"If it was forked and not submitted, submit it with `hpc-rl {submit}`."
        )
    try:
        yield
    except BaseException:  # before anything is submitted
        shutil.rmtree(trial.dir, ignore_errors=True)
        raise


def give_checkpoint(parent: Trial, found: Found, trial: Trial, command: Sequence[str]) -> None:
    """Commit a checkpoint of another trial in a rendered one, whose configuration it gets.

    Files are linked where both are on one file system: they never change. Raises TrialStateError if the
    checkpoint is damaged or gone, CannotWrite.
    """
    manifest = found.manifest
    if manifest is None or found.problem:
        raise TrialStateError(f"checkpoint {found.step} of {parent} is damaged: {found.problem}.")
    with hold(parent, found.step, f"fork to {trial.dir}") as source:
        sound = generation.verify(generation.check(source), generation.LIGHT_BYTES)
        if sound.problem:
            raise TrialStateError(f"checkpoint {found.step} of {parent} is damaged: {sound.problem}.")
        commit = Commit(trial, found.step, FORKED, 0)
        try:
            commit.begin()
            for file in manifest.files:
                if file.name != generation.CONFIG_NAME:
                    _link_or_copy(source / file.name, commit.folder / file.name)
            commit.commit(
                replace(
                    manifest,
                    lineage=IMPORTED_LINEAGE,
                    attempt=f"{FORKED}.0",
                    incarnation=0,
                    submission=FORKED,
                    version=IMPORTED,
                    config_hash=generation.hash_config(load_object(trial.config_json)),
                    data={},  # the rows may be others
                    ledger={},
                    timers={},
                    stats={},
                )
            )
            origin = ForkRecord(
                trial=str(parent),
                dir=str(parent.dir),
                step=found.step,
                version=manifest.version,
                command=tuple(command),
            )
            write_json(trial.forked_from, origin.to_json())
        except OSError as error:
            raise CannotWrite(
                f"the checkpoint of the fork can't be written to {trial.recover}: {error}"
            ) from error


def write_weights(parent: Trial, version: WeightVersion, trial: Trial, config: Config) -> Path:
    """Export published weights into the directory of a new trial; return the folder.

    Raises Damaged if they can't be rebuilt, CannotWrite.
    """
    folder = trial.exports / INITIAL
    temporary = folder.with_name(f".{INITIAL}.tmp")
    try:
        with hold_chain(parent, version, f"fork to {trial.dir}"):
            trial.make_dirs(int(config.launcher.umask, 8))
            temporary.mkdir()
            write_export(parent, version, temporary)
        os.rename(temporary, folder)
        fsync_dir(trial.exports)
    except OSError as error:
        raise CannotWrite(
            f"the weights of the fork can't be written to {folder}: {error.strerror or error}"
        ) from error
    return folder


def list_weights_options(config: Config, folder: Path) -> list[str]:
    """Return the options of a fork whose model is in a folder."""
    options = [f"actor.path={folder}", "actor.init_from_scratch=false"]
    same = (name for name, other in FOLLOWS.items() if other == "actor.path")
    return options + [f"{name}={folder}" for name in same if get_value(config, name)]


def record_weights(parent: Trial, version: WeightVersion, trial: Trial, command: Sequence[str]) -> None:
    """Record the weights that a fork begins with. Raises CannotWrite."""
    record = ForkRecord(
        trial=str(parent),
        dir=str(parent.dir),
        step=version.step,
        version=str(version),
        command=tuple(command),
        only_weights=True,
    )
    try:
        write_json(trial.forked_from, record.to_json())
    except OSError as error:
        raise CannotWrite(f"{trial.forked_from} can't be written: {error.strerror or error}") from error


def _link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())
