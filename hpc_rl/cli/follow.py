"""The live view of `--follow`, for the commands that have it."""

import sys

from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.trials import trial_index


def follow_trial(trial: Trial) -> int:
    """Show a trial live until it is over; return its exit code."""
    from hpc_rl.status.follow import follow  # importing rich takes time

    try:
        return follow(trial)
    except KeyboardInterrupt:
        [cancel] = trial_index.list_commands(trial, "cancel")
        print(f"\nhpc-rl: interrupted; the trial continues. Stop it with: {cancel}", file=sys.stderr)
        return ExitCode.KILLED_BY_PERSON
