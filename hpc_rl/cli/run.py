"""`hpc-rl run`: a trial in the foreground of the Slurm job that the command is typed in."""

import os
import signal
import sys

from hpc_rl.cli.options import CommandParser, Namespace
from hpc_rl.cli.outcome import collect_sources, describe_submission
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.schedulers.local import AllocationScheduler
from hpc_rl.trials import prepare, submission
from hpc_rl.trials.cancellation import cancel
from hpc_rl.trials.checklist import Planned
from hpc_rl.trials.surrounding_job import find_surrounding_job

ABOUT = """Run a trial inside a Slurm allocation (salloc, or an interactive job), in the foreground, on all
of its nodes. Returns the trial's exit code; Ctrl-C saves the state and ends the trial."""
EPILOG = """examples:
  salloc -N 2 -c 16 --gpus-per-node=4 hpc-rl run grpo.yaml
  hpc-rl run grpo.yaml actor.optimizer.lr=1e-6"""
LEAVE_S = 30.0  # for the runner, once the trial is over


def make_parser() -> CommandParser:
    made = CommandParser(ABOUT, EPILOG)
    made.add_config()
    return made


def main(args: Namespace) -> int:
    job = find_surrounding_job(os.environ)
    planned = prepare.plan_for_job(collect_sources(args), job)
    return _stay_in_foreground(planned, submission.make_trial(planned.loaded.config), args.argv)


def _stay_in_foreground(planned: Planned, trial: Trial, argv: list[str]) -> int:
    """Start the trial as a child of this process, and show it until it is over; return its exit code."""
    scheduler = AllocationScheduler(trial)
    done = submission.submit(
        planned.loaded,
        planned.plan,
        command=["hpc-rl", *argv],
        trial=trial,
        scheduler=scheduler,
        avoid=(),
    )
    runner = scheduler.runner
    assert runner is not None
    # The end of the surrounding job: save while there is time, as a job would.
    signal.signal(signal.SIGTERM, lambda *_: runner.terminate())
    print("\n".join(describe_submission(done, planned)), flush=True)
    code = _watch(trial)
    runner.wait(LEAVE_S)
    return code


def _watch(trial: Trial) -> int:
    from hpc_rl.status.follow import follow  # importing rich takes time

    interrupts = 0
    while True:
        try:
            return follow(trial)
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 2:
                return ExitCode.KILLED_BY_PERSON
            cancel(trial, now=interrupts > 1)
            next_one = "kills it now" if interrupts == 1 else "ends this command"
            what = "the trial saves its state and stops" if interrupts == 1 else "the trial is being killed"
            print(f"\nhpc-rl: {what}; another Ctrl-C {next_one}", file=sys.stderr)
