"""`hpc-rl sweep`: submit trials that differ in some options, and compare their results."""

import sys
import time
from pathlib import Path

from hpc_rl.cli.cancel import describe_outcomes
from hpc_rl.cli.options import CommandParser, Count, Namespace, align_columns, print_json, print_result
from hpc_rl.cli.outcome import collect_sources
from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.status.formatting import find_program_name, flatten_line, format_number
from hpc_rl.status.state_reason import describe_state
from hpc_rl.status.sweep_report import SweepReport, make_sweep_report
from hpc_rl.trials import sweep_points
from hpc_rl.trials.cancellation import CancelOutcome
from hpc_rl.trials.prepare import ConfigSources, load_config
from hpc_rl.trials.sweeps import (
    Advance,
    SweepPlan,
    advance_sweep,
    cancel_sweep,
    find_sweep,
    list_live,
    load_statuses,
    plan_sweep,
)

POLL_S = 1.0  # between two looks at trials of this machine
ABOUT = """Submit a trial for each combination of some options, or compare the trials of a sweep.
On Slurm the trials are one job array if their requests are equal, else jobs that wait for each other, and the
command returns at once. On this machine it stays, and starts the next trial when one ends. Repeat the same
command to continue a sweep that was interrupted: submitted trials stay."""
EPILOG = """examples:
  hpc-rl sweep grpo.yaml actor.optimizer.lr=1e-6,3e-6 seed=1..4
  hpc-rl sweep grpo.yaml actor.optimizer.lr=1e-6,3e-6 gconfig.temperature=1.0,0.8 --zip
  hpc-rl sweep grpo.yaml --list points.txt --max_running 4 --stop_early 20
  hpc-rl sweep --report first

a.b=V1,V2 and a.b=1..4 vary; values in brackets or quotes, and --a.b V, are the same in all trials. The sweep
has the name trial_name (--name NAME), and each trial is named after its options. Means are over trials that
differ in `seed` alone."""


def make_parser() -> CommandParser:
    made = CommandParser(ABOUT, EPILOG)
    made.add_config()
    points = made.add_mutually_exclusive_group()
    together = "take the values together, not in all combinations"
    points.add_argument("--zip", action="store_true", help=together)
    lines = "a trial per line, as `a.b=1 c=2`; `-` reads the input"
    points.add_argument("--list", metavar="FILE", help=lines)
    running = "most trials that run at once (default: no limit on Slurm, 1 on this machine)"
    made.add_argument("--max_running", type=Count, metavar="N", help=running)
    metric = "metric to compare by (default: the held-out measure, else reward or loss)"
    made.add_argument("--metric", metavar="NAME", help=metric)
    early = "from this step on, stop trials whose best value is below the median of the others (median rule)"
    made.add_argument("--stop_early", type=Count, metavar="STEP", help=early)
    about = made.add_mutually_exclusive_group()
    about.add_argument("--report", metavar="SWEEP", help="show the results of a sweep")
    about.add_argument("--cancel", metavar="SWEEP", help="cancel all trials of a sweep")
    about.add_argument("--dry_run", action="store_true", help="list the trials; write and submit nothing")
    made.add_json("the trials, or the report")
    return made


def main(args: Namespace) -> int:
    if args.report:
        return _report(args.report, args.json)
    if args.cancel:
        return _cancel(args.cancel, args.json)
    command = ["hpc-rl", *args.argv]
    plan = make_plan(args, command)
    if args.dry_run:
        rows = _list_rows(plan)
        text = [f"{row['trial']}  {row['options']}" for row in rows]
        print_result(args.json, rows, [*text, "nothing was written or submitted"])
        return ExitCode.DONE
    return _advance(plan, command, args.json)


def make_plan(args: Namespace, command: list[str]) -> SweepPlan:
    """Return the sweep that the arguments mean. Raises ConfigError, TrialBusy."""
    sources = collect_sources(args)
    shared, varied = sweep_points.split_options(sources.overrides)
    points = sweep_points.pair_values(varied) if args.zip else sweep_points.make_grid(varied)
    if args.list:
        if varied:
            several = f"can't be combined with several values of {', '.join(varied)}"
            raise ConfigError(f"--list {several}: give one value, or remove --list.")
        points = sweep_points.parse_list(_load_list(args.list), args.list)
    sources = ConfigSources("sweep", sources.files, shared, sources.presets, sources.cluster)
    name = load_config(sources).config.trial_name
    trials = sweep_points.name_trials(name, points)
    return plan_sweep(
        sources,
        trials,
        name,
        metric=args.metric or "",
        max_running=args.max_running,
        stop_from=args.stop_early,
        command=command,
    )


def _load_list(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).expanduser().read_text()
    except OSError as error:
        raise ConfigError(f"--list {name} can't be read: {error.strerror}") from error


def _list_rows(plan: SweepPlan) -> list[dict[str, str]]:
    return [
        {
            "trial": one.name,
            "dir": str(plan.sweep.trial(one.name).dir),
            "options": " ".join(f"{name}={value}" for name, value in one.options.items()),
        }
        for one in plan.record.trials
    ]


def _advance(plan: SweepPlan, command: list[str], as_json: bool) -> int:
    """Submit the trials; on this machine stay until the last one is submitted and over."""
    submitted: list[str] = []
    while True:
        done = advance_sweep(plan, command)
        submitted += done.submitted
        if not as_json:
            print("\n".join(_describe_round(plan, done)), flush=True)
        if plan.scheduler == "slurm" or not (done.num_waiting or done.num_live):
            break
        _wait_for_change(plan, done)
    report = f"{find_program_name()} sweep --report {plan.sweep}"
    if as_json:
        print_json({"sweep": str(plan.sweep), "dir": str(plan.sweep.dir), "submitted": submitted,
                    "array": done.array or None, "trials": _list_rows(plan)})  # fmt: skip
    else:
        print(f"next       {report}")
    return ExitCode.DONE


def _wait_for_change(plan: SweepPlan, done: Advance) -> None:
    """Wait until fewer trials of this machine run."""
    while len(list_live(plan)) >= done.num_live:
        time.sleep(POLL_S)


def _describe_round(plan: SweepPlan, done: Advance) -> list[str]:
    if done.num_dropped:
        return [f"sweep      {plan.sweep}: cancelled; {_count(done.num_dropped)} not submitted"]
    if not done.submitted:
        return [f"sweep      {plan.sweep}: {_count(done.num_live)} running, {done.num_waiting} waiting"]
    limit = f", at most {plan.max_running} at once" if plan.max_running else ""
    how = f"job array {done.array}" if done.array else plan.scheduler
    return [
        *(f"note: {note}" for note in done.notes),
        f"sweep      {plan.sweep}: {_count(len(plan.trials))}{limit}",
        f"submitted  {', '.join(done.submitted)} ({how})",
    ]


def _count(number: int) -> str:
    return "1 trial" if number == 1 else f"{number} trials"


def _report(name: str, as_json: bool) -> int:
    sweep, record = find_sweep(name)
    report = make_sweep_report(sweep, record, load_statuses(sweep, record))
    print_result(as_json, report.to_json(), map(flatten_line, format_report(report)))
    return ExitCode.DONE


def format_report(report: SweepReport) -> list[str]:
    """Return a report as lines for a terminal."""
    better = "lower" if report.lower_is_better else "higher"
    lines = [f"sweep {report.name}: {report.num_over} of {_count(len(report.trials))} over; "
             f"{report.metric}, {better} is better", ""]  # fmt: skip
    head = ["options", "trials", "mean", "deviation"]
    cells = [
        [
            " ".join(f"{name}={value}" for name, value in group.options.items()) or "(all)",
            f"{len(group.values)} of {len(group.trials)}",
            _format_value(group.mean),
            _format_value(group.deviation),
        ]
        for group in report.groups
    ]
    lines += [*align_columns([head, *cells]), ""]
    rows = [
        [one.name, str(one.step), _format_value(one.value), describe_state(one.state, one.reason)]
        for one in report.trials
    ]
    lines += align_columns([["trial", "step", report.metric, "state"], *rows])
    if (best := report.best_trial) and (group := report.best_group):
        words = " ".join(f"{name}={value}" for name, value in group.options.items())
        of_group = f"{words}: mean {_format_value(group.mean)} over {len(group.values)}; " if words else ""
        so_far = "" if report.num_over == len(report.trials) else " so far"
        lines += ["", f"best{so_far}  {of_group}trial {best.name} with {_format_value(best.value)}"]
    return lines


def _format_value(value: float | None) -> str:
    return "" if value is None else format_number(value)


def _cancel(name: str, as_json: bool) -> int:
    sweep, record = find_sweep(name)
    done = cancel_sweep(sweep, record)
    lines = [line for trial, jobs in done.items() for line in describe_outcomes(sweep.trial(trial), jobs)]
    if dropped := [one.name for one in record.trials if not done.get(one.name)]:
        lines.append(f"{', '.join(dropped)}: not submitted; the sweep submits no more trials.")
    cancelled = [
        trial for trial, jobs in done.items() if any(one.outcome is not CancelOutcome.OVER for one in jobs)
    ]
    print_result(as_json, cancelled, lines)
    return ExitCode.DONE
