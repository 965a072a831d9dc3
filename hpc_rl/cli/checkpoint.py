"""`hpc-rl checkpoint`: list, verify and request checkpoints of a trial, convert from and to Hugging Face.

What needs torch is run by `python -m hpc_rl.tools.convert`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import Found
from hpc_rl.checkpoint.retention import best, hold
from hpc_rl.checkpoint.start_facts import seals_of, trimmed
from hpc_rl.cli import list as listing
from hpc_rl.cli.options import (
    Action,
    CommandParser,
    Count,
    Namespace,
    Seconds,
    columns,
    print_result,
    require_torch,
)
from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.rules.consistency import METRICS
from hpc_rl.core.errors import CannotWrite, ConfigError, ExitCode, NothingToResume, TrialStateError
from hpc_rl.core.records import TrialState
from hpc_rl.core.trial import Trial, fsync_dir, read_json, write_json
from hpc_rl.datasets.rows import fingerprint_in_passing
from hpc_rl.status.formatting import one_line
from hpc_rl.status.scheduler_view import TrialWatch
from hpc_rl.trials import (
    submission,
    trial_index,
)
from hpc_rl.trials.first_start import check_end, sound_steps
from hpc_rl.trials.lock import TrialLock

POLL_S = 0.5  # of the folder with the checkpoints
RENEW_EVERY_S = 60.0  # of the lock, while the process with torch works
EPILOG = """A checkpoint is the state after one step, in <trial>/recover; `hpc-rl recover` resumes it.
To get weights for other uses, use `export`; the trial's own exports are in <trial>/exports.

  hpc-rl checkpoint list my-trial
  hpc-rl checkpoint verify my-trial --step 120
  hpc-rl checkpoint now my-trial
  hpc-rl checkpoint export my-trial --to model-120 --step 120
  hpc-rl checkpoint import my-trial path/to/model --step 0"""


@contextlib.contextmanager
def _cleanup_at_sigterm() -> Iterator[None]:
    """Make a SIGTERM unwind like a Ctrl-C, so that holds and half an export are removed."""

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleanup
        raise SystemExit(ExitCode.KILLED_BY_SYSTEM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser(about: str, epilog: str, default: str = "") -> CommandParser:
    made = CommandParser(about, epilog)
    made.add_trial(default)
    return made


def _list_parser() -> CommandParser:
    made = _parser(
        "the checkpoints of a trial, newest first: step, lineage, size, metric, whether it looks sound",
        "Sizes and the manifest are checked; `verify` reads the content as well.",
    )
    made.add_argument("--metric", help="metric to show (default: what the trainer evaluates, as eval_reward)")
    made.add_json("the list")
    return made


def _list(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    rows = [_row(one) for one in generation.scan(trial)]
    set_aside = sorted(path.name for path in (trial.recover / "set-aside").glob("*"))
    usual = dict.fromkeys(name for names in METRICS.values() for name in names)
    metric = args.metric or next((name for row in rows for name in usual if name in row["metrics"]), "")
    lines = _table(rows, metric) if rows else [_none_yet(trial)]
    lines += [f"set aside: {trial.recover / 'set-aside' / name}" for name in set_aside]
    value = {"trial": str(trial), "checkpoints": rows, "set_aside": set_aside}
    print_result(args.json, value, map(one_line, lines))
    return 0


def _none_yet(trial: Trial) -> str:
    return f"{trial} has no checkpoint yet"


def _row(one: Found) -> dict[str, Any]:
    made, written_at = one.manifest, None
    with contextlib.suppress(OSError):
        written_at = (one.path / generation.MANIFEST_NAME).stat().st_mtime
    return {
        "step": one.step,
        "path": str(one.path),
        "problem": one.problem,
        "sound": not one.problem,
        **{name: getattr(made, name, None) for name in ("lineage", "submission", "num_ranks")},
        "bytes": sum(file.size for file in made.files) if made else None,
        "metrics": one.metrics,
        "versions": made.versions if made else {},
        "time": written_at,
    }


def _table(rows: list[dict[str, Any]], metric: str) -> list[str]:
    cells = [["step", "lineage", "ranks", "size", "saved", metric, "state"]]
    for row in rows:
        numbers = ["" if row[name] is None else str(row[name]) for name in ("step", "lineage", "num_ranks")]
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f} MB"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if row["time"] else ""
        value = f"{row['metrics'][metric]:.4g}" if metric in row["metrics"] else "-"
        cells.append([*numbers, size, when, value, row["problem"] or "sound"])
    return columns(cells, str.rjust)


def _verify_parser() -> CommandParser:
    made = _parser(
        "read every byte of the checkpoints and report what was damaged; exit code 1 if anything was",
        "Only reads: damaged checkpoints are set aside by the trainer's next start.",
    )
    made.add_argument("--step", type=Count, help="only the checkpoint of this step (default: all)")
    made.add_json("the results")
    return made


@_cleanup_at_sigterm()
def _verify(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    found = [_chosen(trial, args.step)] if args.step is not None else generation.scan(trial)
    results: list[dict[str, Any]] = [
        {"step": one.step, "path": str(one.path), "problems": _problems(trial, one)} for one in found
    ]
    lines = [
        f"checkpoint {result['step']}: {problem}"
        for result in results
        for problem in result["problems"] or ["every file is as it was written"]
    ]
    print_result(args.json, results, lines or [_none_yet(trial)])
    return 1 if any(result["problems"] for result in results) else 0


def _problems(trial: Trial, one: Found) -> list[str]:
    if one.manifest is None:
        return [one.problem]
    try:
        with hold(trial, one.step, "verify") as folder:
            return generation.damages(folder, one.manifest.files)
    except TrialStateError as error:
        return [str(error)]


def _now_parser() -> CommandParser:
    made = _parser(
        "ask a running trial to save after its current step, and wait until the checkpoint is whole",
        "Training continues meanwhile. Exit code 75 where it was not saved in time.",
        default="the one that runs",
    )
    wait = "for the checkpoint (default: 600)"
    made.add_argument("--wait_s", type=Seconds, default=600.0, metavar="SECONDS", help=wait)
    made.add_json("step and path")
    return made


@_cleanup_at_sigterm()
def _now(args: Namespace) -> int:
    trial = listing.trial_named(args.trial)
    watch = TrialWatch(trial)
    status = watch.poll()
    if status.state is not TrialState.RUNNING:
        raise TrialStateError(f"{trial} is {status.state}: only a trial that runs can save a checkpoint.")
    if status.plan.get("recover_mode") == "disabled":
        raise TrialStateError(f"{trial} saves no checkpoints: its recover.mode is disabled.")
    least = max([status.step, *(one.step + 1 for one in generation.scan(trial))])
    request, end = {"id": uuid.uuid4().hex}, time.monotonic() + args.wait_s
    try:
        write_json(trial.save_intent, request)
        while not status.over and time.monotonic() < end:
            status = watch.poll()  # before the scan: a save may be the last that a trial does
            if found := [one for one in generation.scan(trial) if one.step >= least and not one.problem]:
                value = {"step": found[0].step, "path": str(found[0].path)}
                print_result(args.json, value, [f"checkpoint {found[0].step}  {found[0].path}"])
                return ExitCode.DONE
            time.sleep(POLL_S)
    except OSError as error:
        raise CannotWrite(f"{trial.save_intent} can't be written: {error.strerror or error}") from error
    finally:
        if read_json(trial.save_intent) == request:
            trial.save_intent.unlink(missing_ok=True)
    if status.over:
        raise TrialStateError(f"{trial} is {status.state} now, and saved no checkpoint {least} or later.")
    print(f"hpc-rl: not saved within {args.wait_s:g} s; the step may take longer (--wait_s)", file=sys.stderr)
    return ExitCode.BUSY


def _export_parser() -> CommandParser:
    made = _parser(
        "write the weights of a checkpoint in Hugging Face format; needs torch, no GPU",
        "The folder can be given to servers, to transformers and as `actor.path`.",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument("--step", type=Count, help="step of the checkpoint (default: the newest)")
    best_help = "the checkpoint with the largest METRIC, as eval_reward"
    which.add_argument("--best", metavar="METRIC", help=best_help)
    to_help = "folder to write (default: <trial>/exports/checkpoint-<step>)"
    made.add_argument("--to", type=Path, metavar="FOLDER", help=to_help)
    made.add_json("its path")
    return made


@_cleanup_at_sigterm()
def _export(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    one = _chosen(trial, args.step, args.best)
    if one.problem:
        raise TrialStateError(f"checkpoint {one.step} of {trial} is damaged: {one.problem}. {_others(trial)}")
    there = (args.to or trial.exports / f"checkpoint-{one.step:08d}").expanduser().absolute()
    # Held from now on: while torch is imported, a fast trial makes and removes many checkpoints.
    with hold(trial, one.step, f"export to {there}"):
        code = _export_to(there, trial, one.step)
    if code == 0:
        value = {"trial": str(trial), "step": one.step, "path": str(there)}
        print_result(args.json, value, [f"checkpoint {one.step} of {trial}: weights written to {there}"])
    return code


def _export_to(there: Path, trial: Trial, step: int) -> int:
    """Write an export under a temporary name, then rename it to a new one. Raises CannotWrite."""
    temporary = there.parent / f".{there.name}.{uuid.uuid4().hex[:12]}.tmp"  # `/` has no name
    try:
        if os.path.lexists(there):
            raise FileExistsError
        temporary.mkdir(parents=True)
        code = run_converter("export", trial, step, "--to", str(temporary))
        if code == 0:
            os.rename(temporary, there)
            fsync_dir(there.parent)
        return code
    except OSError as error:
        if os.path.lexists(there):
            problem = "exists and is not overwritten: give another folder by --to, or remove it"
        else:
            problem = f"can't be written: {error.strerror or error}; give another folder by --to"
        raise CannotWrite(f"{there} {problem}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _import_parser() -> CommandParser:
    made = _parser(
        "make a checkpoint of a Hugging Face model, for a trial to start from; needs torch, no GPU",
        """The trial must exist and must not be running; one from `hpc-rl render` is named by its path.
The optimizer starts afresh, and the schedule at --step.
To start a new trial from such weights, set actor.path (or model.path) to the folder instead.""",
    )
    source = "Hugging Face model: config.json and safetensors of the trial's architecture"
    made.add_argument("folder", type=Path, help=source)
    made.add_argument("--step", type=Count, default=0, help="step of the checkpoint (default: 0)")
    return made


@_cleanup_at_sigterm()
def _import(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    source = args.folder.expanduser().absolute()
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} is not a Hugging Face model: config.json is missing")
    # Locked until it is committed: a start in between would not know of it.
    with TrialLock(trial, "given an imported checkpoint") as lock:
        submission.check_idle(trial)
        _check_step(trial, args.step)
        _check_end(trial, args.step)
        code = run_converter("import", trial, args.step, "--source", str(source), meanwhile=lock.renew)
    if code == 0:
        [resume] = trial_index.commands(trial, "recover")
        print(f"{source} is checkpoint {args.step} of {trial}; to resume it, run: {resume}")
    return code


def _check_step(trial: Trial, step: int) -> None:
    """Raise TrialStateError where a start would not resume from an imported checkpoint of this step."""
    sound = sound_steps(trial)  # a start skips damaged ones
    cut, gone = seals_of(trial), trimmed(trial)
    first = max([gone, *(one + 1 for one in sound)])
    last = max(cut, default=gone or None)
    if first <= step and (last is None or step <= last):
        return
    if last is None:
        advice = f"Import as step {first} or later, or into another trial."
    elif first <= last:
        advice = f"Import as a step from {first} to {last}, or into another trial."
    else:
        advice = "Import into another trial, or set actor.path of a new one to the folder."
    if sound and sound[0] >= step:
        raise TrialStateError(
            f"{trial} has checkpoint {sound[0]}, which would be taken instead of one of step {step}. {advice}"
        )
    assert last is not None  # without batches, only a checkpoint can be in the way
    kept = f"only contains batches {gone + 1} to {last}"
    if gone >= last:
        kept = f"contains no batch, those up to {gone} were trimmed"
    raise TrialStateError(f"{trial} cannot resume from step {step}: the batch log {kept}. {advice}")


def _check_end(trial: Trial, step: int) -> None:
    """Raise ConfigError where the trial ends before this step: `recover` would refuse it."""
    config = read_json(trial.config_json)
    if not isinstance(config, dict):
        fix = "`hpc-rl render` of the same configuration restores it"
        raise ConfigError(f"{trial.config_json} is missing or damaged; {fix}")
    loaded = from_dict(config)
    check_end(step, trial, loaded, fingerprint_in_passing(loaded.train_dataset.path).get("rows"))


def _chosen(trial: Trial, step: int | None = None, metric: str | None = None) -> Found:
    """Return the checkpoint of a step, the best one, or the newest sound one. Raises NothingToResume."""
    found = generation.scan(trial)
    if metric is not None:
        steps = best([one for one in found if not one.problem], metric)
        if not steps:
            raise NothingToResume(f"no sound checkpoint of {trial} has a metric {metric!r}. {_others(trial)}")
        step = steps[0]
    for one in found:
        if one.step == step or (step is None and not one.problem):
            return one
    wanted = "sound checkpoint" if step is None else f"checkpoint {step}"
    raise NothingToResume(f"{trial} has no {wanted}. {_others(trial)}")


def _others(trial: Trial) -> str:
    sound = [str(one.step) for one in generation.scan(trial) if not one.problem]
    return f"Sound ones: {', '.join(sound)}." if sound else "There is no sound one."


def run_converter(
    action: str, trial: Trial, step: int, *rest: str, meanwhile: Callable[[], object] = lambda: None
) -> int:
    """Run the process with torch and return its exit code; it is killed when this process exits."""
    require_torch(f"checkpoint {action} reads a model")
    where = ["--trial_dir", str(trial.dir), "--step", str(step)]
    command = [sys.executable, "-m", "hpc_rl.tools.convert", action, *where, *rest]
    sys.stdout.flush()
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(RENEW_EVERY_S)
                    return code if code >= 0 else ExitCode.FAILED
                meanwhile()
        finally:  # a Ctrl-C
            process.kill()
            process.wait()


def parser() -> CommandParser:
    return CommandParser("The checkpoints of a trial.", EPILOG)


ACTIONS = {
    "list": Action(_list_parser, _list),
    "verify": Action(_verify_parser, _verify),
    "now": Action(_now_parser, _now),
    "export": Action(_export_parser, _export),
    "import": Action(_import_parser, _import),
}
