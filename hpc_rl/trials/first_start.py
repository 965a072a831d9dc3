"""What the first start of a submission would do now, and why it may be refused. Only reads files.

The decision is the trainer's own (checkpoint/decide.py). What takes longer than a moment to read is left to
the start.
"""

import contextlib
import functools
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Situation, decide
from hpc_rl.checkpoint.start_facts import choose_read_limit, gather, list_seals
from hpc_rl.config.changes import Change, digest_options, list_changes, refuse_unsafe
from hpc_rl.config.load.stored import from_dict, redact_secrets
from hpc_rl.config.options.experiment import (
    LENGTH_OPTIONS,
    Config,
    GRPOConfig,
    find_last_step,
    has_trainer,
    list_training_paths,
)
from hpc_rl.config.schedule import compute_step_rate, find_highest_rate, is_length_exact
from hpc_rl.core.errors import ConfigError, NothingToResume, TrialBusy
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Trial, find_account_name, list_entries, load_object
from hpc_rl.datasets.rows import check_same_rows, compute_fingerprint
from hpc_rl.rollout.batch_log.judged import Judged, count_rejected_by_user_code
from hpc_rl.rollout.batch_log.ledger import LedgerDamaged
from hpc_rl.rollout.batch_log.replay import check_replay, load_fingerprint, load_state
from hpc_rl.trials import trial_index
from hpc_rl.trials.user_code import CODE_OF, fingerprint_judges

PLACEHOLDER_ATTEMPT = "next.0"  # an attempt id that no scheduler gives
MAX_LOG_BYTES = 64 << 20  # largest batch log that a command reads before it submits a replay
RATE_TOLERANCE = 1e-6  # relative difference of equal learning rates
LOCATION_OPTIONS = ("cluster.fileroot", "experiment_name", "trial_name")


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What `hpc-rl recover` adds to a submission: its first start resumes, whatever the stored mode is."""

    from_step: int | None = None  # the checkpoint that the user named; None for the newest valid one
    replay: bool = False  # train on batches that an abandoned policy made
    parent: str | None = None  # job id of the submission that this one continues


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The data that a first start trains on, and the future of existing batches."""

    step: int  # that it starts from
    new_batches: bool
    set_aside: tuple[int, ...]  # batches by step; their prompts are issued again
    replayed: tuple[int, ...]  # batches by step that are trained on as they are
    of_another_policy: bool  # made by an abandoned policy or options
    learning_rate: float | None  # of the next step; None if it is not known
    learning_rate_before: float | None  # of the step before it, under the options of that time
    highest_learning_rate: float | None  # of the next step and all later ones
    learning_rate_exact: bool  # `max_length` may drop rows, which makes epochs and the schedule shorter
    raised_by_length: bool  # the schedule is longer now, so the rate rises
    rejected: int | None  # prompts that user code rejected; None if that takes long to read
    rejected_again: bool  # they are issued again


class FirstStart:
    """What the first start of a submission would find and do, as the files of the trial are now."""

    def __init__(self, trial: Trial, config: Config, recovery: Recovery | None = None) -> None:
        self.trial, self.config = trial, config
        # without a trainer there are no checkpoints: the ledger has the finished prompts
        self.mode = "resume" if recovery and has_trainer(config) else config.recover.mode
        self.changes: list[Change] = []  # by find_changes
        self._before: Config | None = None  # what they are changes of
        self._replay = recovery is not None and recovery.replay
        self.judged = Judged(trial.rollout, fingerprint_judges(config, [os.getcwd(), *sys.path]))
        wanted = recovery.from_step if recovery else None
        self.situation = Situation(
            config.recover.mode, self.mode, retries=config.recover.retries, wanted=wanted
        )
        if os.path.isdir(trial.dir):
            attempt = trial.attempt(PLACEHOLDER_ATTEMPT)
            self.situation, _ = gather(trial, attempt, 0, self.situation, in_passing=True)
        self.decision = decide(self.situation)
        self.step = self.decision.step
        # files of that checkpoint that only the start reads
        self.unread = _list_unread(trial, self.step, wanted) if self.step is not None else ()

    def check(self) -> None:
        """Raise TrialBusy, NothingToResume or ConfigError if it would fail or damage the trial's state."""
        trial, situation = self.trial, self.situation
        will_start = self.decision.action in ("load", "fresh")
        if self.mode in ("disabled", "fault") and (trial.has_state() or not will_start):
            raise TrialBusy(
                f"trial {trial} has state already, and recover.mode={situation.mode} starts from step 0. "
                f"{self._list_ways_to_resume()}"
                f"For a fresh start give another trial_name, or remove {trial.dir}."
            )
        if not will_start:
            raise NothingToResume(f"{self.decision.reason}. {self._make_advice()}".rstrip())
        if self.step is not None:
            check_end(self.step, trial, self.config, self._num_rows)
        self.find_changes()
        refuse_unsafe(self.changes, str(trial), self._replay)
        paths = list_training_paths(self.config)
        when = "its batch log was begun" if self.step is None else f"checkpoint {self.step} was made"
        check_same_rows(paths[0], self._data, compute_fingerprint(*paths), when)
        self._check_batches()
        if situation.wanted is None:
            self._check_finished()

    @property
    def new_batches(self) -> bool:
        """Whether the batches after the step to start from are set aside, and their prompts issued again.

        They are when the user goes back to a checkpoint, or changes the policy or what is generated.
        """
        if self._replay or not isinstance(self.config, GRPOConfig):
            return False
        return self.situation.wanted is not None or any(change.new_batches for change in self.changes)

    def continuation(self, is_dropped: bool = False) -> Continuation:
        """Return what this start trains on, as far as the batch log has it, which may be dropped before."""
        cut = tuple(sorted(one for one in list_seals(self.trial) if one > (self.step or 0)))
        new, step, before = self.new_batches, self.step or 0, self._before or self.config
        num_rows = self._num_rows
        rate = compute_step_rate(self.config, step + 1, num_rows)
        former = compute_step_rate(before, max(step, 1), num_rows)
        highest = find_highest_rate(self.config, step + 1, num_rows)
        usual = max(former or 0.0, find_highest_rate(before, step + 1, num_rows) or 0.0)
        rises = highest is not None and highest > usual * (1 + RATE_TOLERANCE)
        longer = any(change.name in LENGTH_OPTIONS for change in self.changes)
        given_up = self.situation.wanted is not None or any(change.new_batches for change in self.changes)
        return Continuation(
            step=self.step or 0,
            new_batches=new,
            set_aside=cut if new else (),
            replayed=() if new else cut,
            of_another_policy=given_up,
            learning_rate=rate,
            learning_rate_before=former,
            highest_learning_rate=highest,
            learning_rate_exact=is_length_exact(self.config, num_rows),
            raised_by_length=rises and longer,
            rejected=self.count_rejected(),
            rejected_again=self.judges_anew or is_dropped,
        )

    @property
    def judges_anew(self) -> bool:
        """Whether prompts that user code rejected are issued again: that code or its options have changed.

        Where nothing came of the trial they are, too, unless it is known that these are the same.
        """
        return bool(self.judged.changed) or not (self.judged.before or has_progress(self.trial))

    def count_rejected(self) -> int | None:
        """Return how many prompts user code rejected; None if the batch log is too large to read now.

        Not the prompts that are issued again with the batches of their time.
        """
        if not isinstance(self.config, GRPOConfig):
            return 0
        until = self.step or 0 if self.new_batches and not self.judges_anew else None
        with contextlib.suppress(OSError, LedgerDamaged):
            if _is_small_log(self.trial):
                return count_rejected_by_user_code(load_state(self.trial.rollout), until)
        return None

    def find_changes(self) -> None:
        """Find differences from the configuration behind the trial's state, if it has any.

        That is the configuration of the checkpoint to be loaded, without the options of later submissions;
        if there are only batches, the trial's own file. Raises ConfigError if neither is readable.
        """
        trial = self.trial
        if not has_progress(trial):
            return
        step = self.step
        copies = [trial.generation(step) / generation.CONFIG_NAME] if step is not None else []
        for path in (*copies, trial.config_json):
            if data := load_object(path):
                try:
                    self._before = from_dict(data)
                    found = list_changes(redact_secrets(self._before), redact_secrets(self.config))
                    self.changes = [self._allow_move(change) for change in found]
                    self.changes += self._find_code_changes()
                except ConfigError as error:
                    raise ConfigError(
                        f"trial {trial} can't resume, because {path} is of another version of hpc-rl: {error}"
                    ) from error
                return
        raise ConfigError(
            f"{trial.config_json} is lost or damaged, and no sound checkpoint has a copy: cannot verify that "
            f"the state of trial {trial} is compatible with these options. Put the file back, or give "
            "another trial_name."
        )

    def _find_code_changes(self) -> list[Change]:
        """Return the differences of the user's code since the rollout role last ran, as checksums."""
        found = []
        for name in self.judged.changed:
            if name.startswith(CODE_OF):
                old, new = (f"sha256 {side[name][:12]}" for side in (self.judged.before, self.judged.now))
                found.append(Change(name, old, new, safe=True, new_batches=True))
        return found

    def _allow_move(self, change: Change) -> Change:
        """Return the change as safe where a path differs only because the same thing was moved."""
        if change.name == "train_dataset.path" and self._data:
            return replace(change, safe=True, reason="its rows must be the same, and are compared")
        if change.name in LOCATION_OPTIONS:
            config = self.config
            names = (config.experiment_name, config.trial_name)
            now = Trial.of(config.cluster.fileroot, find_account_name(), *names)
            if os.path.realpath(now.dir) == os.path.realpath(self.trial.dir):
                return replace(change, safe=True, reason="the trial is there now")
        return change

    def _list_ways_to_resume(self) -> str:
        if list_sound_steps(self.trial, self.situation.trimmed):
            return f"Resume it with `hpc-rl recover {self.trial}` or recover.mode=auto. "
        return "" if self.situation.trimmed else "Resume it with recover.mode=auto. "

    def _make_advice(self) -> str:
        """Return what to do if there is nothing to start from as requested."""
        trial, situation = self.trial, self.situation
        if situation.wanted is not None and (steps := list_sound_steps(trial, situation.trimmed)):
            return f"Allowed: {', '.join(map(str, steps))}."
        if self.mode != "resume":
            return ""
        if situation.trimmed:
            return (
                f"Trial {trial} cannot start over either: batches 1 to {situation.trimmed} are gone. "
                "Give another trial_name."
            )
        return f"`hpc-rl submit` with recover.mode=auto starts trial {trial} from step 0."

    @functools.cached_property
    def _num_rows(self) -> int | None:
        """How many rows the dataset has, before `max_length` drops any; None if that is not known."""
        rows = (self._data or compute_fingerprint(*list_training_paths(self.config))).get("rows")
        return rows if isinstance(rows, int) else None

    @property
    def _data(self) -> dict[str, Any]:
        """The fingerprint of the rows behind the state to start from; {} if none was taken."""
        found = generation.check(self.trial.generation(self.step)).manifest if self.step is not None else None
        has_log = _has_batches(self.trial)
        return (found.data if found else {}) or (load_fingerprint(self.trial.rollout) if has_log else {})

    def _check_batches(self) -> None:
        """Raise NothingToResume if a batch log, unless it is large, can't be replayed from the step."""
        trial = self.trial
        if not _has_batches(trial):
            return
        try:
            if _is_small_log(trial):
                check_replay(trial.rollout, self.step or 0)
        except LedgerDamaged as error:
            origin = f"checkpoint {self.step}" if self.step else "the start"
            raise NothingToResume(
                f"trial {trial} cannot resume from {origin}: {error}. Put the file back, or resume from a "
                "later checkpoint; or start a new trial with a model from `hpc-rl checkpoint export`."
            ) from error

    def _check_finished(self) -> None:
        trial = self.trial
        if trial.done.exists() and not has_trainer(self.config):
            raise NothingToResume(
                f"{trial} has finished; its results are in {trial.results}. "
                "To repeat it, give another name by --name."
            )
        if trial.done.exists() and not any(change.name in LENGTH_OPTIONS for change in self.changes):
            end = "total_train_steps" if self.config.total_train_epochs is None else "total_train_epochs"
            raise NothingToResume(
                f"{trial} has reached its end. To train it longer: "
                f"hpc-rl recover {trial_index.format_name(trial)} {end}=N; "
                f"its results are in {trial.exports}. "
                "For a fresh start give another trial_name."
            )


def _list_unread(trial: Trial, step: int, wanted: int | None) -> tuple[str, ...]:
    found = generation.check(trial.generation(step))
    limit = choose_read_limit(found, wanted, in_passing=True)
    if found.manifest is None or limit is None:
        return ()
    return tuple(file.name for file in found.manifest.files if file.size > limit)


def list_sound_steps(trial: Trial, first: int = 0) -> list[int]:
    """Return the steps of checkpoints from `first` on, newest first, of which no small file is damaged."""
    found = [one for one in generation.scan(trial) if one.step >= first]
    return [one.step for one in found if not generation.verify(one, generation.LIGHT_BYTES).problem]


def check_end(step: int, trial: Trial, config: Config, num_rows: int | None = None) -> None:
    """Raise ConfigError if a trial ends before a checkpoint; `num_rows` of its dataset, where known."""
    end = find_last_step(config, num_rows)
    if end is not None and end < step:
        values = {name: getattr(config, name) for name in LENGTH_OPTIONS}
        given = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        why = f"{given}: trial {trial} ends at step {end}, before checkpoint {step}"
        use = f"allowed: an end at step {step} or later; for a shorter trial give another trial_name"
        raise ConfigError(Refusal(option="", kind=Kind.CONFLICT, why=why, use=use, related=LENGTH_OPTIONS))


def has_progress(trial: Trial) -> bool:
    """Return whether a start could resume anything: a checkpoint, even a damaged one, or a batch."""
    return _has_batches(trial) or any(trial.recover.glob("gen-*/manifest.json"))


def _has_batches(trial: Trial) -> bool:
    return trial.trimmed.exists() or any(trial.batches.glob("*.seal"))


def _is_small_log(trial: Trial) -> bool:
    """Return whether a command may read the batch log, or what there is of one."""
    files = [entry for entry in list_entries(trial.rollout) if entry.is_file(follow_symlinks=False)]
    return sum(entry.stat().st_size for entry in files) <= MAX_LOG_BYTES


def find_stale_leftovers(trial: Trial, config: Config, start: FirstStart) -> list[Path]:
    """Return files of earlier starts that no start may use, because other options or rows made them.

    Only of a trial without checkpoints and batches: groups and rejections that are in no batch, and the
    pointer to the weights that servers begin with.
    Where user code rejected a prompt they are stale as well, unless it is known to be the same code.
    """
    if has_progress(trial):
        return []
    data, paths = load_object(trial.config_json), list_training_paths(config)
    with contextlib.suppress(ConfigError):
        now = compute_fingerprint(*paths)
        check_same_rows(paths[0], load_fingerprint(trial.rollout), now, "the log was begun")
        before = from_dict(data) if data else config
        found = list_changes(before, config)
        # the policy that they were made by is still the initial one, whatever it is trained with
        fit = [
            change.safe and (not change.new_batches or change.name.startswith("actor.")) for change in found
        ]
        if not has_trainer(config):
            is_same = digest_options(before) == digest_options(config)
            fit.append(is_same and not start.judged.changed)
        if data and all(fit) and not (start.count_rejected() and start.judges_anew):
            return []
    left = (*trial.rollout.glob("segment-*.ledger"), trial.current_weights)
    return [path for path in left if path.exists()]
