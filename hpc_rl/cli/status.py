"""`hpc-rl status <trial>`: the state and the history of a trial; at most one scheduler query."""

import sys
from dataclasses import asdict

from hpc_rl.checkpoint.decide import PastStart
from hpc_rl.cli.follow import follow_trial
from hpc_rl.cli.list import find_only_trial, format_table, list_live_rows
from hpc_rl.cli.options import CommandParser, Namespace, print_json
from hpc_rl.core.errors import ConfigError, TrialStateError
from hpc_rl.core.records import TrialState
from hpc_rl.status.heartbeat import WATCH_S
from hpc_rl.status.scheduler_view import describe_complaint, query_if
from hpc_rl.status.status_text import describe_trial, list_fruitless_starts
from hpc_rl.status.trial_status import TrialStatus, load_status
from hpc_rl.trials import trial_index
from hpc_rl.trials.next_steps import describe_next_steps

SHOWN_ATTEMPTS = 5  # without --all
DESCRIPTION = """Show the state of a trial and its history. It reads files and rarely queries the scheduler:
all commands of an account share one query for all of its jobs, at most 4 a minute."""
EPILOG = f"""--json prints one object; null and "" mean an unknown value; times are Unix seconds:
  state, reason         {", ".join(TrialState)}; and why
  step, total_steps, steps_per_second, eta_s
                        last trained step, length, rate, time left
  since, ends_at, last_sign
                        start of this state, time limit of the job, newest change of a file
  checkpoint, exports   step of the newest checkpoint, names of the exports
  weight_history        published weights that weights.history_gb keeps: bytes, steps as ranges
  metrics, evaluations, rollout
                        metrics of the newest step, all evaluations, counters of the rollout role
  scores                result of `evaluate` or `generate`
  rejected_prompts, held_out_rows
                        prompts without a group, by reason; held-out rows that were scored and left out
  idle_steps            steps that taught the model nothing: in a row up to the newest, in all, and why
  jobs, servers         submissions, and server arrays of layout jobs
  attempts, lineages    starts by the scheduler with their roles, starts of training
  fruitless_starts, last_end
                        starts in a row without a new checkpoint, why the last attempt ended
  scheduler_error, scheduler_asked_at
                        error message and time of the scheduler query"""


def make_parser() -> CommandParser:
    made = CommandParser(DESCRIPTION, EPILOG)
    made.add_trial("the one that runs, else the newest; several that run are listed")
    made.add_flag("--offline", help="do not query the scheduler")
    made.add_flag("--all", help=f"show every attempt, not only the newest {SHOWN_ATTEMPTS}")
    made.add_flag("-f", "--follow", help="live view until the trial is over; exits with its code")
    made.add_json("everything")
    return made


def main(args: Namespace) -> int:
    rows = [] if args.trial else list_live_rows(args.offline)
    if len(rows) > 1 and not (args.follow or args.json):
        print("\n".join(format_table(rows)))
        return 0
    trial = trial_index.resolve(args.trial) if args.trial else find_only_trial(rows)
    if args.follow:
        if args.json:
            raise ConfigError("--json cannot be combined with --follow.")
        return follow_trial(trial)
    answer = query_if(not args.offline, trial)
    status = load_status(trial, answer.newest, answer.asked_at or None, WATCH_S)
    past: tuple[PastStart, ...] = ()
    try:
        past = list_fruitless_starts(status)
    except TrialStateError as error:  # the rest can be shown
        print(f"hpc-rl: {error}", file=sys.stderr)
    if args.json:
        asked = {"scheduler_error": answer.complaint, "scheduler_asked_at": answer.asked_at or None}
        print_json(status.to_json() | asked | {"fruitless_starts": [asdict(start) for start in past]})
        return 0
    print("\n".join(describe_status(status, None if args.all else SHOWN_ATTEMPTS, past)))
    if complaint := describe_complaint(answer):
        print(f"hpc-rl: {complaint}", file=sys.stderr)
    return 0


def describe_status(
    status: TrialStatus, max_attempts: int | None = None, past: tuple[PastStart, ...] = ()
) -> list[str]:
    """Return all lines of the page: the trial, then the next steps."""
    return [*describe_trial(status, max_attempts, past), "", *describe_next_steps(status)]
