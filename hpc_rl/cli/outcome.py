"""The shared part of `submit`, `render`, `recover` and `fork`: options, the submission, and its report."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from hpc_rl.cli.follow import follow_trial
from hpc_rl.cli.options import CommandParser, Namespace, print_json
from hpc_rl.cli.start_text import (
    describe_continuation,
    format_change_json,
    format_continuation_json,
    list_changes,
)
from hpc_rl.core.trial import Trial
from hpc_rl.trials import submission, trial_index
from hpc_rl.trials.checklist import Planned
from hpc_rl.trials.first_start import Recovery
from hpc_rl.trials.prepare import ConfigSources, fetch_from_hub
from hpc_rl.trials.submission import Submission
from hpc_rl.trials.surrounding_job import is_inside

NO_CHECK = "do not compare the request with the cluster (one sinfo)"
EPILOG = """examples:
  hpc-rl submit grpo.yaml --dry_run
  hpc-rl submit grpo.yaml -N 4 -p gpu -t 24:00:00 actor.optimizer.lr=1e-6
"""


def add_outcome(parser: CommandParser, no_check: str = NO_CHECK) -> None:
    """Declare the options of a command that submits: the check, and the form of its report."""
    parser.add_flag("--no_check", help=no_check)
    parser.add_flag("-f", "--follow", help="show the trial live until it is over, and end with its exit code")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print job id, paths and notes as JSON")
    how.add_argument("--parsable", action="store_true", help="print the job id only")


def add_config_and_print(parser: CommandParser) -> None:
    """Declare the configuration of submit and render, and --print_config."""
    parser.add_config()
    text = "print the resolved configuration with the origin of each value, and stop"
    # The library writes `--print_config=`.
    parser.add_argument("--print_config", nargs="?", const="", metavar="yaml", help=text)


def collect_sources(args: Namespace) -> ConfigSources:
    """Return the configuration that the arguments of a command name.

    With --fetch, it has the paths of fetched models and data sets; a line on standard error names each.
    Raises ConfigError.
    """
    sources = ConfigSources(args.argv[0], args.config, args.overrides, args.preset, args.cluster)
    if not args.get("fetch"):
        return sources
    sources, fetched = fetch_from_hub(sources)
    for one in fetched:
        at = f"{one.named.name} at commit {one.commit}"
        print(f"fetched    {one.named.option}: {at}, in {one.path}", file=sys.stderr)
    return sources


def add_fetch(parser: CommandParser) -> None:
    """Declare --fetch."""
    text = "download models and data sets that are named as OWNER/NAME[@REVISION], and use their commit"
    parser.add_flag("--fetch", help=text)


def submit_and_report(
    planned: Planned,
    args: Namespace,
    trial: Trial,
    recovery: Recovery | None = None,
    options: Sequence[str] = (),
    is_checked: bool = False,
) -> int:
    """Submit a trial and print the report; with --follow show it until it is over. Returns the exit code.

    `options` are sbatch's; `is_checked` if `check_submittable` was called just before.
    """
    done = submission.submit(
        planned.loaded,
        planned.plan,
        command=["hpc-rl", *args.argv],
        trial=trial,
        recovery=recovery,
        avoid=planned.avoid,
        options=options,
        is_checked=is_checked,
    )
    if args.json:
        print_json(format_submission_json(done, planned))
    elif args.parsable:
        print(done.job_id)
    else:
        if done.scheduler == "slurm" and is_inside(os.environ):
            job = f"job {os.environ['SLURM_JOB_ID']}"
            print(f"note: this submitted a new job. To use the {job} around you, run `hpc-rl run`.")
        see, *more = trial_index.list_commands(done.trial, "status", "logs --follow", "cancel")
        following = [f"next       {see}", *(f"           {command}" for command in more)]
        print("\n".join([*describe_submission(done, planned), *following]))
    sys.stdout.flush()
    return follow_trial(done.trial) if args.follow else 0


def describe_submission(done: Submission, planned: Planned) -> list[str]:
    """Return the changes, and the paths and jobs of a submission, as lines."""
    lines = [*planned.note_lines(done.notes_before), *list_changes(done.start.changes)]
    if done.job_id:
        lines += describe_continuation(done.continuation)
    if done.job_id and done.allocation_was not in ("", planned.plan.allocation):
        change = f"{done.allocation_was} -> {planned.plan.allocation}"
        lines.append(f"changed    allocation: {change}  (safe: the state is resharded)")
    if done.dropped:  # no batch or checkpoint used them
        names = ", ".join(path.name for path in done.dropped)
        lines.append(f"dropped    unused rollouts from an earlier configuration ({names})")
    lines += [f"trial      {done.trial}", f"directory  {done.trial.dir}"]
    lines += [f"job        {done.job_id} ({done.scheduler})"] if done.job_id else []
    lines += [f"servers    {done.server_job_id}"] if done.server_job_id else []
    start = done.start
    if start.step is not None:
        state = "which was read and is sound" if done.job_id else "if it verifies"
        unread = start.unread if done.job_id else ()
        state += f"; checked while it is loaded: {', '.join(unread)}" if unread else ""
        origin = f"from checkpoint {start.step}, {state}"
        lines.append(f"start      {origin}; a fresh start needs another trial_name")
    return [*lines, f"script     {done.script}"]


def format_submission_json(done: Submission, planned: Planned) -> dict[str, Any]:
    return {
        "trial": str(done.trial),
        "dir": str(done.trial.dir),
        "job_id": done.job_id or None,
        "server_job_id": done.server_job_id or None,
        "scheduler": done.scheduler,
        "script": str(done.script),
        "output": str(done.trial.job_output(done.job_id)) if done.job_id else None,
        "allocation": planned.plan.allocation,
        "notes": [str(note) for note in planned.notes],
        "changes": [format_change_json(change) for change in done.start.changes],
        **format_continuation_json(done.continuation),
    }
