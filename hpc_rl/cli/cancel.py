"""`hpc-rl cancel <trial>`: stop a trial permanently and keep its state for `hpc-rl recover`."""

from hpc_rl.cli.options import CommandParser, Namespace, Seconds, print_result
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import Trial
from hpc_rl.status.formatting import flatten_line, format_duration
from hpc_rl.status.state_reason import NOTHING_SAVED, describe_state
from hpc_rl.status.trial_status import load_status
from hpc_rl.trials import trial_index
from hpc_rl.trials.cancellation import CancelledJob, CancelOutcome, cancel, wait_until_over

OUTCOMES = {
    CancelOutcome.OVER: "is over already ({was})",
    CancelOutcome.REMOVED: "was pending and has been removed from the queue",
    CancelOutcome.DRAINING: "finishes its step, saves its state and exits; it is not started again",
    CancelOutcome.KILLED: "is being terminated by the scheduler; "
    "it saves its state if the grace period allows",
    CancelOutcome.SERVERS: "(servers) was cancelled; servers hold no state",
    CancelOutcome.UNSURE: "is not known to the scheduler; if it is still running, it will stop when it reads "
    "the cancel request",
}
OUTCOMES_UNSAVED = OUTCOMES | {
    CancelOutcome.DRAINING: f"finishes its step and exits; {NOTHING_SAVED}",
    CancelOutcome.KILLED: f"is being terminated by the scheduler; {NOTHING_SAVED}",
}
_OUTCOMES_OF_PROMPTS = {
    CancelOutcome.DRAINING: "keeps its finished prompts and exits; it is not started again",
    CancelOutcome.KILLED: "is being terminated by the scheduler; finished prompts are kept",
}
OUTCOMES_OF_PURPOSES = {
    "serve": {
        CancelOutcome.DRAINING: "ends its servers and exits; it is not started again",
        CancelOutcome.KILLED: "is being terminated by the scheduler",
    },
    "generate": _OUTCOMES_OF_PROMPTS,
    "evaluate": _OUTCOMES_OF_PROMPTS,
}


def make_parser() -> CommandParser:
    made = CommandParser("Stop a trial permanently, with its state saved. Repeating it is harmless.")
    made.add_trial()
    made.add_flag(
        "--now", help="cancel through the scheduler immediately (only a short grace period to save)"
    )
    wait = "seconds to wait for the job to finish (default: 0)"
    made.add_argument("--wait_s", type=Seconds, default=0.0, metavar="SECONDS", help=wait)
    made.add_json("the result")
    return made


def main(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    done = cancel(trial, args.now)
    rows = [
        {"job_id": item.job.job_id, "outcome": item.outcome, "was": item.was and item.was.state}
        for item in done
    ]
    print_result(args.json, rows, describe_outcomes(trial, done))
    stopping = [item for item in done if item.outcome in (CancelOutcome.DRAINING, CancelOutcome.KILLED)]
    if args.wait_s and stopping:
        return _wait(trial, stopping[-1], args.wait_s, quiet=args.json)
    if stopping and not args.json:
        print("next ", *trial_index.list_commands(trial, "status"))
    return 0


def describe_outcomes(trial: Trial, done: list[CancelledJob]) -> list[str]:
    """Return the outcome for each job."""
    if not done:
        return [f"{trial} was never submitted: nothing to cancel."]
    lines = []
    for item in done:
        outcomes = OUTCOMES if item.job.saves else OUTCOMES_UNSAVED
        text = (outcomes | OUTCOMES_OF_PURPOSES.get(item.job.purpose, {}))[item.outcome]
        was = item.was.state.value if item.was else "unknown"
        lines.append(f"job {item.job.job_id} of {trial} {text.format(was=was)}.")
    return lines


def _wait(trial: Trial, item: CancelledJob, timeout_s: float, quiet: bool) -> int:
    state = wait_until_over(trial, item.job, timeout_s)
    if quiet:
        return ExitCode.DONE if state is not None else ExitCode.BUSY
    show, resume = trial_index.list_commands(trial, "status", "recover")
    job = f"job {item.job.job_id} is"
    if state is None:
        print(f"{job} still shutting down after {format_duration(timeout_s)}; to look again: {show}")
        return ExitCode.BUSY
    status = load_status(trial, state)
    print(f"{job} over: {flatten_line(describe_state(status.state, status.reason))}")
    if status.generation is not None and status.state is not TrialState.DONE:
        print(f"the newest checkpoint is {status.generation}; to resume the trial later, run: {resume}")
    return ExitCode.DONE
