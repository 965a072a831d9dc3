"""`hpc-rl checkpoint`: list, verify and request checkpoints of a trial, convert from and to Hugging Face.

What needs torch is run by `python -m hpc_rl.tools.convert`.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.cli import export
from hpc_rl.cli import list as listing
from hpc_rl.cli.export import clean_up_at_sigterm
from hpc_rl.cli.options import (
    Action,
    CommandParser,
    Count,
    Namespace,
    Seconds,
    align_columns,
    print_result,
)
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.status.formatting import flatten_line, format_size
from hpc_rl.trials import (
    conversion,
    published_weights,
    trial_index,
)
from hpc_rl.trials.checkpoints import (
    check_import_source,
    choose_checkpoint,
    claim_for_import,
    find_damages,
    find_usual_metric,
    make_row,
    request_checkpoint,
)

EPILOG = """A checkpoint is the state after one step, in <trial>/recover; `hpc-rl recover` resumes it.
To get weights for other uses, use `hpc-rl export`; `export` here is the same. The trial's own exports are in
<trial>/exports. With `weights.history_gb` a trial also keeps published weights of steps without a checkpoint.

  hpc-rl checkpoint list my-trial
  hpc-rl checkpoint verify my-trial --step 120
  hpc-rl checkpoint now my-trial
  hpc-rl checkpoint export my-trial --to model-120 --step 120
  hpc-rl checkpoint export my-trial --version 0.137
  hpc-rl checkpoint import my-trial path/to/model --step 0"""


def _make_parser(about: str, epilog: str, default: str = "") -> CommandParser:
    made = CommandParser(about, epilog)
    made.add_trial(default)
    return made


def _make_list_parser() -> CommandParser:
    made = _make_parser(
        "the checkpoints of a trial, newest first: step, lineage, size, metric, whether it looks sound",
        """Sizes and the manifest are checked; `verify` reads the content as well.
The last line shows the steps whose weights `export` can rebuild from published weights.""",
    )
    made.add_metrics("--metric", help="metric to show (default: of evaluations, such as eval_reward)")
    made.add_json("the list")
    return made


def _list_checkpoints(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    rows = [make_row(one) for one in generation.scan(trial)]
    set_aside = sorted(path.name for path in (trial.recover / "set-aside").glob("*"))
    metric = args.metric or find_usual_metric(rows)
    lines = _format_table(rows, metric) if rows else [_describe_none(trial)]
    lines += [f"set aside: {trial.recover / 'set-aside' / name}" for name in set_aside]
    versions = published_weights.list_versions(trial)
    lines += [_describe_weights(versions)] if versions else []
    weights = [_make_weights_row(index) for index in versions]
    value = {"trial": str(trial), "checkpoints": rows, "set_aside": set_aside, "weights": weights}
    print_result(args.json, value, map(flatten_line, lines))
    return 0


def _describe_weights(versions: Sequence[published_weights.VersionIndex]) -> str:
    steps = published_weights.format_steps(versions)
    noun = "steps" if len({index.version.step for index in versions}) > 1 else "step"
    size = format_size(sum(index.stored_bytes for index in versions))
    return f"weights of {noun} {steps} can be exported; {size}"


def _make_weights_row(index: published_weights.VersionIndex) -> dict[str, Any]:
    at = index.version
    return {"step": at.step, "lineage": at.lineage, "label": str(at), "bytes": index.stored_bytes}


def _describe_none(trial: Trial) -> str:
    return f"{trial} has no checkpoint yet"


def _format_table(rows: list[dict[str, Any]], metric: str) -> list[str]:
    cells = [["step", "lineage", "ranks", "size", "saved", metric, "state"]]
    for row in rows:
        numbers = ["" if row[name] is None else str(row[name]) for name in ("step", "lineage", "num_ranks")]
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f} MB"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if row["time"] else ""
        value = f"{row['metrics'][metric]:.4g}" if metric in row["metrics"] else "-"
        cells.append([*numbers, size, when, value, row["problem"] or "sound"])
    return align_columns(cells, str.rjust)


def _make_verify_parser() -> CommandParser:
    made = _make_parser(
        "read every byte of the checkpoints and report damaged files; exit code 1 if anything was",
        "Only reads: damaged checkpoints are set aside by the trainer's next start.",
    )
    made.add_argument("--step", type=Count, help="only the checkpoint of this step (default: all)")
    made.add_json("the results")
    return made


@clean_up_at_sigterm()
def _verify(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    found = [choose_checkpoint(trial, args.step)] if args.step is not None else generation.scan(trial)
    results: list[dict[str, Any]] = [
        {"step": one.step, "path": str(one.path), "problems": find_damages(trial, one)} for one in found
    ]
    lines = [
        f"checkpoint {result['step']}: {problem}"
        for result in results
        for problem in result["problems"] or ["every file is as it was written"]
    ]
    print_result(args.json, results, lines or [_describe_none(trial)])
    return 1 if any(result["problems"] for result in results) else 0


def _make_now_parser() -> CommandParser:
    made = _make_parser(
        "ask a running trial to save after its current step, and wait until the checkpoint is whole",
        "Training continues meanwhile. Exit code 75 if it was not saved in time.",
        default="the one that runs",
    )
    wait = "for the checkpoint (default: 600)"
    made.add_argument("--wait_s", type=Seconds, default=600.0, metavar="SECONDS", help=wait)
    made.add_json("step and path")
    return made


@clean_up_at_sigterm()
def _save_now(args: Namespace) -> int:
    trial = listing.find_trial(args.trial)
    checkpoint = request_checkpoint(trial, args.wait_s)
    if checkpoint is None:
        wait = f"{args.wait_s:g} s; the step may take longer (--wait_s)"
        print(f"hpc-rl: the trial saved no checkpoint within {wait}", file=sys.stderr)
        return ExitCode.BUSY
    value = {"step": checkpoint.step, "path": str(checkpoint.path)}
    print_result(args.json, value, [f"checkpoint {checkpoint.step}  {checkpoint.path}"])
    return ExitCode.DONE


def _make_import_parser() -> CommandParser:
    made = _make_parser(
        "make a checkpoint of a Hugging Face model, for a trial to start from; needs torch, no GPU",
        """The trial must exist and must not be running; one from `hpc-rl render` is named by its path.
The optimizer starts afresh, and the schedule at --step.
To start a new trial from such weights, set actor.path (or model.path) to the folder instead.""",
    )
    source = "Hugging Face model of the trial's architecture, or an adapter if the trial trains one"
    made.add_argument("folder", type=Path, help=source)
    made.add_argument("--step", type=Count, default=0, help="step of the checkpoint (default: 0)")
    return made


@clean_up_at_sigterm()
def _import(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    source = args.folder.expanduser().absolute()
    check_import_source(source)
    with claim_for_import(trial, args.step) as lock:
        code = conversion.convert("import", trial, args.step, "--source", str(source), meanwhile=lock.renew)
    if code == 0:
        [resume] = trial_index.list_commands(trial, "recover")
        print(f"{source} is checkpoint {args.step} of {trial}; to resume it, run: {resume}")
    return code


def make_parser() -> CommandParser:
    return CommandParser("The checkpoints of a trial.", EPILOG)


ACTIONS = {
    "list": Action(_make_list_parser, _list_checkpoints),
    "verify": Action(_make_verify_parser, _verify),
    "now": Action(_make_now_parser, _save_now),
    "export": Action(export.make_parser, export.main),
    "import": Action(_make_import_parser, _import),
}
