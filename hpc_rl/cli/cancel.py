"""`hpc-rl cancel <trial>`: the trial ends, stays dead, and keeps its state for `hpc-rl recover`."""

from __future__ import annotations

from hpc_rl.cli.options import ArgumentParser, Namespace, Seconds, add_json, add_trial, new_parser, print_json
from hpc_rl.errors import ExitCode
from hpc_rl.status.formatting import format_duration, program_name
from hpc_rl.status.trial_state import NOTHING_SAVED
from hpc_rl.status.trial_status import read_status
from hpc_rl.submit import trial_index
from hpc_rl.submit.cancellation import CancelledJob, CancelOutcome, cancel, wait_until_over
from hpc_rl.trial import Trial

WORDS = {
    CancelOutcome.OVER: "is over already ({was})",
    CancelOutcome.REMOVED: "waited to be started; it is taken out of the queue",
    CancelOutcome.DRAINING: "finishes its step, saves its state and ends; nothing starts it again",
    CancelOutcome.KILLED: "is being ended by the scheduler: it saves its state if that fits the scheduler's grace, then it is killed",
    CancelOutcome.SERVERS: "(servers) is taken away by the scheduler; servers hold no state",
    CancelOutcome.UNSURE: "is not known to the scheduler; should it still run, it ends as soon as it sees the wish",
}
UNSAVED = {
    CancelOutcome.DRAINING: f"finishes its step and ends; {NOTHING_SAVED}",
    CancelOutcome.KILLED: f"is being ended by the scheduler; {NOTHING_SAVED}",
}


def parser() -> ArgumentParser:
    made = new_parser("End a trial for good, with its state saved. Doing it again does no harm.")
    add_trial(made)
    made.add_argument(
        "--now", action="store_true", help="let the scheduler end it, which grants some seconds only"
    )
    made.add_argument(
        "--wait_s",
        type=Seconds,
        default=0.0,
        metavar="SECONDS",
        help="wait so long for the end (default: 0)",
    )
    add_json(made, "what was done")
    return made


def run(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    done = cancel(trial, args.now)
    if args.json:
        print_json(
            [
                {"job_id": item.job.job_id, "outcome": item.outcome, "was": item.was and item.was.state}
                for item in done
            ]
        )
    elif not done:
        print(f"{trial} was never submitted: nothing to cancel.")
    for item in done if not args.json else []:
        was = item.was.state.value if item.was else "unknown"
        words = WORDS if item.job.saves else WORDS | UNSAVED
        print(f"job {item.job.job_id} of {trial} {words[item.outcome].format(was=was)}.")
    acted = [item for item in done if item.outcome in (CancelOutcome.DRAINING, CancelOutcome.KILLED)]
    if args.wait_s and acted:
        return _wait(trial, acted[-1], args.wait_s, quiet=args.json)
    if acted and not args.json:
        print(f"next  {program_name()} status {trial_index.cli_name(trial)}")
    return 0


def _wait(trial: Trial, item: CancelledJob, timeout_s: float, quiet: bool) -> int:
    state = wait_until_over(trial, item.job, timeout_s)
    if state is None:
        if not quiet:
            look = f"{program_name()} status {trial_index.cli_name(trial)}"
            print(
                f"job {item.job.job_id} still runs after {format_duration(timeout_s)}; it goes on ending: {look}"
            )
        return ExitCode.STOPPED
    if not quiet:
        story = read_status(trial, state)
        print(f"job {item.job.job_id} is over: {story.state}" + (f", {story.reason}" if story.reason else ""))
        if story.generation is not None and story.state != "done":
            print(
                f"newest generation {story.generation}; to go on one day: {program_name()} recover {trial_index.cli_name(trial)}"
            )
    return 0
