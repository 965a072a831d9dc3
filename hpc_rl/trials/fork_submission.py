"""Make the trial of a fork: its plan, and its directory with the checkpoint or weights to begin with."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_rl.config.changes import Change
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import WeightVersion
from hpc_rl.trials import forking, prepare, submission
from hpc_rl.trials.checklist import Planned, make_planned
from hpc_rl.trials.first_start import Recovery

NAMES = ("experiment_name", "trial_name")  # which differ in each fork


@dataclass(frozen=True)
class Fork:
    """A fork that is ready for its submission."""

    parent: Trial
    origin: forking.Origin
    trial: Trial
    planned: Planned
    changes: list[Change]  # options that differ from the origin's, without the names

    @property
    def recovery(self) -> Recovery | None:
        """What its submission resumes; None for a fork of published weights, which begins at step 0."""
        return None if isinstance(self.origin, WeightVersion) else Recovery()


def make_fork(
    parent_name: str,
    name: str,
    *,
    from_step: int | None,
    overrides: Sequence[str],
    command: Sequence[str],
    skip_cluster: bool = False,
    dry_run: bool = False,
) -> Fork:
    """Plan a fork, and make its directory unless `dry_run`. A failure leaves no directory.

    `parent_name` is a trial as commands name it, or TRIAL@STEP; `name` is a trial name, or experiment/name.
    Raises TrialNameError, NothingToResume, TrialBusy, ConfigError, SchedulerError, CannotWrite.
    """
    parent, step = forking.resolve_parent(parent_name, from_step)
    origin = forking.choose_origin(parent, step)
    experiment, _, trial_name = name.rpartition("/")
    names = [f"trial_name={trial_name}", *([f"experiment_name={experiment}"] if experiment else [])]
    options = [*overrides, *names]
    loaded = prepare.load_stored(parent, options)
    trial = submission.make_trial(loaded.config)
    with forking.claim_trial(trial):
        planned = make_planned(loaded, count_rows=dry_run)
        planned = prepare.compare_with_cluster(planned, trial, skip_cluster)
        config = planned.loaded.config
        changes = forking.find_changes(parent, origin, config)
        changes = [change for change in changes if change.name not in NAMES]
        forking.check_start(origin, config)
        if dry_run:
            return Fork(parent, origin, trial, planned, changes)
        if isinstance(origin, WeightVersion):
            folder = forking.write_weights(parent, origin, trial, config)
            of_weights = forking.list_weights_options(loaded.config, folder)
            planned = make_planned(prepare.load_stored(parent, [*options, *of_weights]))
            planned = prepare.compare_with_cluster(planned, trial, skip_cluster)
            submission.render_to(planned.loaded, planned.plan, command=command)
            forking.record_weights(parent, origin, trial, command)
        else:
            submission.render_to(planned.loaded, planned.plan, command=command)
            forking.give_checkpoint(parent, origin, trial, command)
    return Fork(parent, origin, trial, planned, changes)
