"""`hpc-rl checkpoint`: look at the generations of a trial, check them, and turn them into Hugging Face checkpoints or back.

What needs torch is handed to `python -m hpc_rl.app.convert`.
"""

from __future__ import annotations

import contextlib
import importlib.util
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

from hpc_rl.checkpoint import generation, manifest
from hpc_rl.checkpoint.generation import Found
from hpc_rl.checkpoint.retention import best, hold
from hpc_rl.checkpoint.start_facts import seals_of, trimmed
from hpc_rl.cli.options import (
    Action,
    ArgumentParser,
    Count,
    Namespace,
    add_json,
    add_trial,
    new_parser,
    print_json,
)
from hpc_rl.config.loading.stored import from_dict
from hpc_rl.config.rules.consistency import METRICS
from hpc_rl.datasets.rows import fingerprint_in_passing
from hpc_rl.errors import CannotWrite, ConfigError, ExitCode, NothingToResume, TrialStateError
from hpc_rl.submit import submission as submission
from hpc_rl.submit import trial_index
from hpc_rl.submit.first_start import check_end, sound_steps
from hpc_rl.submit.lock import TrialLock
from hpc_rl.trial import Trial, fsync_dir, read_json

MEANWHILE_S = 60.0  # between signs of life while the half with torch works
HELP = {
    "list": "the generations of a trial, newest first: step, lineage, size, metric, whether it looks sound",
    "verify": "read every byte of the generations and name what is not as it was written; exit code 1 if anything is not",
    "export": "write the weights of a generation in Hugging Face format; needs torch, no GPU",
    "import": "make a generation of a Hugging Face checkpoint, for a trial to start from; needs torch, no GPU",
}
EPILOG = """A generation is the state of training after one step, in <trial>/recover: what `hpc-rl recover` goes on from.
For weights to take away use `export`; the trial's own exports are in <trial>/exports.

  hpc-rl checkpoint list my-trial
  hpc-rl checkpoint verify my-trial --step 120
  hpc-rl checkpoint export my-trial --to model-120 --step 120
  hpc-rl checkpoint import my-trial path/to/model --step 0"""


@contextlib.contextmanager
def _tidy_at_sigterm() -> Iterator[None]:
    """Holds and half an export are removed on the way out, as at a Ctrl-C."""

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the removing is not cut short
        raise SystemExit(ExitCode.KILLED_BY_SYSTEM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _list_parser() -> ArgumentParser:
    made = new_parser(
        HELP["list"],
        "Sizes and the manifest are checked; `verify` reads the content as well.",
    )
    add_trial(made)
    made.add_argument("--metric", help="number to show (default: what the trainer evaluates, as eval_reward)")
    add_json(made, "the list")
    return made


def _list(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    found = generation.scan(trial)
    set_aside = sorted(path.name for path in (trial.recover / "set-aside").glob("*"))
    if args.json:
        print_json({"trial": str(trial), "generations": [_row(one) for one in found], "set_aside": set_aside})
        return 0
    usual = dict.fromkeys(name for names in METRICS.values() for name in names)
    metric = args.metric or next((name for one in found for name in usual if name in one.metrics), "")
    print("\n".join(_table(found, metric)) if found else f"{trial} has no generation yet")
    for name in set_aside:
        print(f"set aside: {trial.recover / 'set-aside' / name}")
    return 0


def _row(one: Found) -> dict[str, Any]:
    made = one.manifest
    return {
        "step": one.step,
        "path": str(one.path),
        "problem": one.problem,
        "sound": not one.problem,
        "lineage": made.lineage if made else None,
        "submission": made.submission if made else None,
        "num_ranks": made.num_ranks if made else None,
        "bytes": sum(file.size for file in made.files) if made else None,
        "metrics": one.metrics,
        "versions": made.versions if made else {},
        "time": _written_at(one),
    }


def _written_at(one: Found) -> float | None:
    try:
        return (one.path / manifest.NAME).stat().st_mtime
    except OSError:
        return None


def _table(found: list[Found], metric: str) -> list[str]:
    cells = [["step", "lineage", "ranks", "size", "saved", metric or "metric", "state"]]
    for one in found:
        made, at = one.manifest, _written_at(one)
        size = f"{sum(file.size for file in made.files) / 1e6:.1f} MB" if made else ""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""
        value = f"{one.metrics[metric]:.4g}" if metric in one.metrics else "-"
        who = [str(made.lineage), str(made.num_ranks)] if made else ["", ""]
        cells.append([str(one.step), *who, size, when, value, one.problem or "sound"])
    widths = [max(len(line[column]) for line in cells) for column in range(6)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[6]])
        for line in cells
    ]


def _verify_parser() -> ArgumentParser:
    made = new_parser(
        HELP["verify"],
        "Reads only: setting aside is what the trainer's next start does.",
    )
    add_trial(made)
    made.add_argument("--step", type=Count, help="only the generation of this step (default: all)")
    add_json(made, "what was found")
    return made


def _verify(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    found = [_chosen(trial, args.step)] if args.step is not None else generation.scan(trial)
    results = [{"step": one.step, "path": str(one.path), "problems": _problems(trial, one)} for one in found]
    if args.json:
        print_json(results)
    else:
        print(
            "\n".join(line for result in results for line in _verdict(result))
            or f"{trial} has no generation yet"
        )
    return 1 if any(result["problems"] for result in results) else 0


def _problems(trial: Trial, one: Found) -> list[str]:
    if one.manifest is None:
        return [one.problem]
    try:
        with hold(trial, one.step, "verify") as folder:
            return manifest.damages(folder, one.manifest.files)
    except TrialStateError as error:
        return [str(error)]


def _verdict(result: dict[str, Any]) -> list[str]:
    if not result["problems"]:
        return [f"generation {result['step']}: every file is as it was written"]
    return [f"generation {result['step']}: {problem}" for problem in result["problems"]]


def _export_parser() -> ArgumentParser:
    made = new_parser(
        HELP["export"],
        "The folder is what servers, transformers and `actor.path` read.",
    )
    add_trial(made)
    which = made.add_mutually_exclusive_group()
    which.add_argument("--step", type=Count, help="step of the generation (default: the newest)")
    which.add_argument(
        "--best", metavar="METRIC", help="the generation with the largest METRIC, as eval_reward"
    )
    made.add_argument(
        "--to", type=Path, metavar="FOLDER", help="where to (default: <trial>/exports/generation-<step>)"
    )
    add_json(made, "where it is")
    return made


def _export(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    one = _chosen(trial, args.step, args.best)
    if one.problem:
        raise TrialStateError(f"generation {one.step} of {trial} is damaged: {one.problem}. {_others(trial)}")
    there = (args.to or trial.exports / f"generation-{one.step:08d}").expanduser().absolute()
    with hold(
        trial, one.step, f"export to {there}"
    ):  # now: torch takes seconds, in which a fast trial makes many generations
        code = _export_to(there, trial, one.step)
    if code == 0 and args.json:
        print_json({"trial": str(trial), "step": one.step, "path": str(there)})
    elif code == 0:
        print(f"generation {one.step} of {trial}: weights written to {there}")
    return code


def _export_to(there: Path, trial: Trial, step: int) -> int:
    """The name comes last: nobody sees half of an export, and of two to one place the first stays. Raises CannotWrite."""
    temporary = there.parent / f".{there.name}.{uuid.uuid4().hex[:12]}.tmp"  # `/` has no name
    try:
        if os.path.lexists(there):
            raise FileExistsError
        temporary.mkdir(parents=True)
        code = _hand_over("export", trial, step, "--to", str(temporary))
        if code == 0:
            os.rename(temporary, there)
            fsync_dir(there.parent)
        return code
    except OSError as error:
        if os.path.lexists(there):
            raise CannotWrite(
                f"{there} exists and is not overwritten: give another folder by --to, or remove it"
            ) from error
        raise CannotWrite(
            f"{there} can't be written: {error.strerror or error}; give another folder by --to"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _import_parser() -> ArgumentParser:
    made = new_parser(
        HELP["import"],
        "The trial exists and does not run; one that was only rendered (`hpc-rl render`) is named by its path.\n"
        "The optimizer starts afresh; the schedule is that of --step.\n"
        "To only start a new trial from such weights, none of this is needed: set actor.path (or model.path) to the folder.",
    )
    add_trial(made)
    made.add_argument(
        "folder",
        type=Path,
        help="Hugging Face checkpoint: config.json and safetensors of the trial's architecture",
    )
    made.add_argument("--step", type=Count, default=0, help="step that the generation counts as (default: 0)")
    return made


def _import(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    source = args.folder.expanduser().absolute()
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} is not a Hugging Face checkpoint: config.json is missing")
    with TrialLock(
        trial, "given an imported generation"
    ) as claim:  # until it lies there: a start in between would not count on it
        submission.check_idle(trial)
        _check_step(trial, args.step)
        _check_end(trial, args.step)
        code = _hand_over("import", trial, args.step, "--source", str(source), meanwhile=claim.renew)
    if code == 0:
        print(
            f"{source} is generation {args.step} of {trial}; to go on from it: hpc-rl recover {trial_index.cli_name(trial)}"
        )
    return code


def _check_step(trial: Trial, step: int) -> None:
    """Raises TrialStateError where a start would not take an imported generation of this step, or could not go on from it."""
    sound, cut, gone = (
        sound_steps(trial),
        seals_of(trial),
        trimmed(trial),
    )  # a start passes damaged generations over
    first = max([gone, *(one + 1 for one in sound)])
    last = max(cut, default=gone or None)
    if first <= step and (last is None or step <= last):
        return
    if last is None:
        rest = f"Import as step {first} or later, or into another trial."
    elif first <= last:
        rest = f"Import as a step from {first} to {last}, or into another trial."
    else:
        rest = "Import into another trial, or set actor.path of a new one to the folder."
    if sound and sound[0] >= step:
        raise TrialStateError(
            f"{trial} has generation {sound[0]}, which would be taken instead of one of step {step}. {rest}"
        )
    assert last is not None  # with no batch cut, nothing but a generation is in the way
    kept = (
        f"batches {gone + 1} to {last} are there"
        if gone < last
        else f"no batch is there, those up to {gone} were trimmed"
    )
    raise TrialStateError(f"{trial} can't go on from step {step}: of the batch log {kept}. {rest}")


def _check_end(trial: Trial, step: int) -> None:
    """Raises ConfigError where the trial ends before this step: `recover` would refuse to go on from it."""
    config = read_json(trial.config_json)
    if not isinstance(config, dict):
        raise ConfigError(
            f"{trial.config_json} is missing or damaged; `hpc-rl render` of the same configuration writes it again"
        )
    loaded = from_dict(config)
    check_end(step, trial, loaded, fingerprint_in_passing(loaded.train_dataset.path).get("rows"))


def _chosen(trial: Trial, step: int | None = None, metric: str | None = None) -> Found:
    """The generation of a step, the best by a metric, or the newest sound one. Raises NothingToResume."""
    found = generation.scan(trial)
    if metric is not None:
        steps = best([one for one in found if not one.problem], metric)
        if not steps:
            raise NothingToResume(f"no sound generation of {trial} has a number {metric!r}. {_others(trial)}")
        step = steps[0]
    for one in found:
        if one.step == step or (step is None and not one.problem):
            return one
    raise NothingToResume(
        f"{trial} has no {'sound generation' if step is None else f'generation {step}'}. {_others(trial)}"
    )


def _others(trial: Trial) -> str:
    sound = [str(one.step) for one in generation.scan(trial) if not one.problem]
    return f"Sound ones: {', '.join(sound)}." if sound else "There is no sound one."


def _hand_over(
    action: str, trial: Trial, step: int, *rest: str, meanwhile: Callable[[], object] = lambda: None
) -> int:
    """Exit code of the half with torch. It ends when this process does: it must not outlive what is held for it here."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"checkpoint {action} reads a model, and torch is not installed: pip install 'hpc-rl[train]'"
        )
    command = [
        sys.executable,
        "-m",
        "hpc_rl.app.convert",
        action,
        "--trial_dir",
        str(trial.dir),
        "--step",
        str(step),
        *rest,
    ]
    sys.stdout.flush()
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(MEANWHILE_S)
                    return code if code >= 0 else ExitCode.FAILED
                meanwhile()
        finally:  # a Ctrl-C
            process.kill()
            process.wait()


def parser() -> ArgumentParser:
    """Return the parser of the command; its actions have their own."""
    return new_parser("The checkpoints of a trial.", EPILOG)


def _tidy(action: Callable[[Namespace], int]) -> Callable[[Namespace], int]:
    def run(args: Namespace) -> int:
        with _tidy_at_sigterm():
            return action(args)

    return run


ACTIONS = {
    "list": Action(HELP["list"], _list_parser, _tidy(_list)),
    "verify": Action(HELP["verify"], _verify_parser, _tidy(_verify)),
    "export": Action(HELP["export"], _export_parser, _tidy(_export)),
    "import": Action(HELP["import"], _import_parser, _tidy(_import)),
}
