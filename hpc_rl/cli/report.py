"""`hpc-rl report <trial>…`: results of trials, their use of time, and the ends of their attempts."""

import time
from pathlib import Path

from hpc_rl.cli import list as listing
from hpc_rl.cli.options import CommandParser, Namespace, align_columns, print_json
from hpc_rl.core.errors import CannotWrite, ExitCode
from hpc_rl.core.trial import Trial, write_atomic
from hpc_rl.status.comparison import make_headline
from hpc_rl.status.formatting import flatten_line
from hpc_rl.status.scheduler_view import load_current_status
from hpc_rl.status.trial_report import (
    TrialReport,
    find_differences,
    list_facts,
    make_attempt_rows,
    make_fact_rows,
    make_goodput_rows,
    make_report,
)
from hpc_rl.trials import trial_index

DESCRIPTION = """Summarize trials: options that differ, rewards, goodput (the use of each second of each
GPU), attempts and why they ended. --html writes one page with curves and completions."""


def make_parser() -> CommandParser:
    made = CommandParser(DESCRIPTION)
    made.add_trials("the one that runs, else the newest")
    made.add_argument("--html", metavar="FILE", help="write one self-contained page instead")
    made.add_json("facts, goodput and attempts")
    return made


def main(args: Namespace) -> int:
    trials = find_named_trials(args.trial)
    now = time.time()
    names = make_unique_names(trials)
    reports = [
        make_report(name, load_current_status(one), now) for name, one in zip(names, trials, strict=True)
    ]
    if args.html:
        from hpc_rl.status.report_page import make_page  # importing plotly takes time

        path = Path(args.html).expanduser().absolute()
        try:
            write_atomic(path, make_page(reports, now))
        except OSError as error:
            raise CannotWrite(f"{path} can't be written: {error.strerror or error}") from error
        print(f"written: {path}")
    elif args.json:
        print_json([make_json(report) for report in reports])
    else:
        print("\n".join(flatten_line(line) for line in format_text(reports)))
    return ExitCode.DONE


def find_named_trials(names: list[str]) -> list[Trial]:
    """Return the trials that a command names, else the one that it is about without a name."""
    return trial_index.resolve_all(names) if names else [listing.find_trial(None)]


def make_unique_names(trials: list[Trial]) -> list[str]:
    """Return a short name for each trial that tells it from the others."""
    for shorten in (lambda trial: trial.name, str):
        names = [shorten(trial) for trial in trials]
        if len(set(names)) == len(names):
            return names
    return [str(trial.dir) for trial in trials]


def make_json(report: TrialReport) -> dict[str, object]:
    """Return a report for programs; times in seconds, of devices in device-seconds."""
    use, told = report.goodput, report.status.to_json()
    return {
        "trial": str(report.status.trial),
        "dir": str(report.status.trial.dir),
        "state": report.status.state,
        "step": report.status.step,
        "held_out": report.status.history.held_out[1],
        "facts": list_facts(report),
        **{name: told[name] for name in ("rejected_prompts", "held_out_rows", "idle_steps")},
        "allocation_s": use.allocation_s,
        "queued_s": use.queued_s,
        "buckets": {str(bucket): seconds for bucket, seconds in use.buckets.items()},
        "attempts": [
            {
                "id": one.id,
                "start": one.start,
                "end": one.end,
                "devices": one.num_devices,
                "waited_s": one.waited_s,
            }
            for one in use.attempts
        ],
    }


def format_text(reports: list[TrialReport]) -> list[str]:
    """Return a report as lines for a terminal."""
    header = [["", *(report.name for report in reports)]] if len(reports) > 1 else []
    lines = []
    if len(reports) > 1 and (found := find_differences(reports)):
        head = ["option that differs", *(report.name for report in reports)]
        lines += [*align_columns([head, *([name, *cells] for name, cells in found)]), ""]
    if headline := make_headline(reports):
        lines += [headline, ""]
    lines += align_columns([*header, *([name, *cells] for name, cells in make_fact_rows(reports))])
    if rows := make_goodput_rows(reports):
        lines += [
            "",
            *align_columns(
                [["goodput", *(report.name for report in reports)], *([str(b), *c] for b, c in rows)]
            ),
        ]
    for report in (one for one in reports if one.goodput.attempts):
        head = [f"attempts of {report.name}", "state", "started", "held", "waited", "steps", "cause"]
        lines += ["", *align_columns([head, *make_attempt_rows(report)])]
    return [line.rstrip() for line in lines]
