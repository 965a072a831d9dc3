"""Fork: a new trial that begins with a checkpoint of another one, under options of its own."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import IMPORTED, IMPORTED_LINEAGE, Commit, Found
from hpc_rl.checkpoint.retention import hold
from hpc_rl.config.changes import Change, list_changes, refuse_other_model
from hpc_rl.config.load.stored import from_dict, redact_secrets
from hpc_rl.config.options.experiment import LENGTH_OPTIONS, Config, find_last_step
from hpc_rl.core.errors import CannotWrite, ConfigError, NothingToResume, TrialBusy, TrialStateError
from hpc_rl.core.records import ForkRecord
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Trial, load_object, write_json
from hpc_rl.datasets.rows import compute_fingerprint
from hpc_rl.trials.first_start import list_sound_steps

FORKED = "fork"


def find_changes(parent: Trial, found: Found, config: Config) -> list[Change]:
    """Return the options in which a fork differs from the configuration behind a checkpoint.

    Raises ConfigError if it could not load the state: another trainer, model or optimizer.
    """
    data = load_object(found.path / generation.CONFIG_NAME) or load_object(parent.config_json)
    differing = list_changes(redact_secrets(from_dict(data)), redact_secrets(config))
    refuse_other_model(differing, str(parent))
    return differing


def check_end(step: int, config: Config) -> None:
    """Raise ConfigError if the fork has no step to train."""
    end = find_last_step(config, compute_fingerprint(config.train_dataset.path).get("rows"))
    if end is not None and end <= step:
        why = f"the fork would end at step {end}, and checkpoint {step} is there already"
        use = f"add total_train_steps=N above {step}, or --from an earlier checkpoint"
        raise ConfigError(Refusal(option="", kind=Kind.CONFLICT, why=why, use=use, related=LENGTH_OPTIONS))


def choose_checkpoint(parent: Trial, step: int | None) -> Found:
    """Return the checkpoint of a step, or the newest sound one. Raises NothingToResume."""
    steps = list_sound_steps(parent)
    if not steps or step not in (None, *steps):
        wanted = "sound checkpoint" if step is None else f"sound checkpoint {step}"
        known = f"Allowed: {', '.join(map(str, steps))}." if steps else "It has none."
        raise NothingToResume(f"{parent} has no {wanted}. {known}")
    return generation.check(parent.generation(steps[0] if step is None else step))


@contextlib.contextmanager
def claim_trial(trial: Trial) -> Iterator[None]:
    """Remove the directory of a new trial where the block fails. Raises TrialBusy if there is one."""
    if os.path.lexists(trial.dir):
        raise TrialBusy(
            f"{trial.dir} exists already, and a fork is a new trial: give it another name. "
            f"If it was forked and not submitted, submit it with `hpc-rl recover {trial.dir}`."
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
            raise CannotWrite(f"{trial.recover}: the checkpoint can't be written: {error}") from error


def _link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())
