"""The quickstart: toy models and a task, short SFT trials and a GRPO trial, submitted by `hpc-rl submit`.

Started as `hpc-rl quickstart`; METHODS lists the models and trials of each method. Further arguments are
passed to the `hpc-rl submit` of the GRPO trial. An interrupt stops the running trial, with its state saved.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hpc_rl.core.errors import CannotWrite, ConfigError, ExitCode, HpcRlError, RoleFailed
from hpc_rl.core.trial import Trial, load_json, write_json
from hpc_rl.examples.methods import METHODS, Method
from hpc_rl.render.jinja_environment import find_template_root
from hpc_rl.stats import read
from hpc_rl.status.curve import make_learning_curve
from hpc_rl.status.follow import follow
from hpc_rl.status.formatting import find_program_name, quote_path
from hpc_rl.trials import trial_index
from hpc_rl.trials.cancellation import cancel

DIRECTORY = "quickstart/"  # prefix of the paths in the configurations: the default of --dir


def main() -> int:
    parser = argparse.ArgumentParser(prog="hpc-rl quickstart", description=__doc__, allow_abbrev=False)
    parser.add_argument("--method", choices=METHODS, required=True, help="training method")
    parser.add_argument("--dir", type=Path, required=True, help="directory for models, task and trials")
    parser.add_argument("--seed", type=int, required=True, help="seed of models, task and training")
    only = "only make the models and the task, and warm the models up"
    parser.add_argument("--only_prepare", action="store_true", help=only)
    args, overrides = parser.parse_known_args()
    # A SIGTERM is handled like an interrupt: the trial must not be left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_quickstart(METHODS[args.method], args.dir.absolute(), args.seed, args.only_prepare, overrides)
    except KeyboardInterrupt:
        print("hpc-rl quickstart: interrupted", file=sys.stderr)
        return ExitCode.KILLED_BY_PERSON
    except HpcRlError as error:
        print(f"hpc-rl quickstart: {error}", file=sys.stderr)
        return error.exit_code
    except subprocess.CalledProcessError as error:  # the trial has already printed the reason
        return error.returncode
    return 0


def run_quickstart(method: Method, here: Path, seed: int, only_prepare: bool, overrides: list[str]) -> None:
    started = time.monotonic()
    prepare(method, here, seed)
    if only_prepare:
        print(f"ready: {here}\nnext:  {make_submit_line(method, here)}")
        return
    places = ("--launcher", "launcher.", "--n_nodes", "--cluster", "cluster.")
    elsewhere = any(word.startswith(places) for word in overrides)
    last = 2 + len(method.warm_ups)
    print(f"{last}/{last}  {method.says}", flush=True)
    trial = train(
        here, method.config, seed, overrides if elsewhere else ["--launcher.type=local", *overrides]
    )
    show(method, here, trial, time.monotonic() - started)


def prepare(method: Method, here: Path, seed: int) -> None:
    """Make the task, the base model and the warm models; reuse files of an earlier call with this seed."""
    home = here / method.folder
    record_path = home / "prepared.json"
    record = load_json(record_path)
    last = 2 + len(method.warm_ups)
    if record == {"seed": seed, "ready": True}:
        print(f"1/{last}  models and task exist in {home}, warmed up", flush=True)
        return
    folders = ("task", "base", *(warm_up.model for warm_up in method.warm_ups))  # folders that it may replace
    foreign = [name for name in folders if (home / name).exists()] if record is None else []
    if foreign:
        raise ConfigError(
            f"{home / foreign[0]} exists and was not made by quickstart: give another directory with --dir."
        )
    try:
        home.mkdir(parents=True, exist_ok=True)
        write_json(record_path, {"seed": seed, "ready": False})
        print(f"1/{last}  a toy in {home}: {method.toy}", flush=True)
        for name in folders:
            shutil.rmtree(home / name, ignore_errors=True)
        method.make(home, seed)
    except OSError as error:
        why = error.strerror or error
        raise CannotWrite(f"{here} can't be written: {why}. Give another directory with --dir.") from error
    for number, warm_up in enumerate(method.warm_ups, 2):
        print(f"{number}/{last}  {warm_up.says}", flush=True)
        trial = train(here, warm_up.config, seed, ["--launcher.type=local"])
        shutil.copytree(trial.exports / "final", home / warm_up.model)
    write_json(record_path, {"seed": seed, "ready": True})


def train(here: Path, kind: str, seed: int, overrides: list[str]) -> Trial:
    """Submit a trial and follow it to its end. Raises CalledProcessError, RoleFailed, SystemExit."""
    name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = get_config_path(f"quickstart/{kind}")
    command = [sys.executable, "-m", "hpc_rl.cli", "submit", "--json", "--config", str(config)]
    command += [f"trial_name={name}", f"seed={seed}", *list_overrides(here, config), *overrides]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    trial = Trial(Path(answer["dir"]))
    known_as = trial_index.format_name(trial)
    print(f"     trial {known_as}: {answer['allocation']} as job {answer['job_id']}", flush=True)
    try:
        code = follow(trial)
    except KeyboardInterrupt:
        cancel(trial)
        note = "interrupted; the trial saves its state and stops. To resume it:"
        print(f"\nhpc-rl quickstart: {note}", *trial_index.list_commands(trial, "recover"), file=sys.stderr)
        raise SystemExit(int(ExitCode.KILLED_BY_PERSON)) from None
    if code:
        [see] = trial_index.list_commands(trial, "status")
        raise RoleFailed(f"trial {trial} failed with exit code {code}; `{see}` shows why")
    return trial


def list_overrides(here: Path, config: Path) -> list[str]:
    """Return overrides that move a configuration's paths from the default directory to `here`."""
    return [
        f"{option}={here / value.removeprefix(DIRECTORY)}"
        for option, value in find_texts(yaml.safe_load(config.read_text()))
        if value.startswith(DIRECTORY)
    ]


def find_texts(section: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the text options of a configuration, by dotted name."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from find_texts(value, f"{above}{name}.")
        elif isinstance(value, str):
            yield f"{above}{name}", value


def get_config_path(name: str) -> Path:
    return find_template_root() / "configs" / f"{name}.yaml"


def make_submit_line(method: Method, here: Path) -> str:
    """Return the command that trains the toy by the documented configuration, from the working directory."""
    config = get_config_path(method.documented)
    default = here == Path.cwd() / DIRECTORY
    edits = [] if default else [quote_path(Path(setting)) for setting in list_overrides(here, config)]
    return " ".join([find_program_name(), "submit", "--config", quote_path(config), *edits])


def show(method: Method, here: Path, trial: Trial, seconds: float) -> None:
    """Print the learning curve, the paths, the next commands, and the measure before and after."""
    history, measure = read.load_history(trial), method.measure
    words = measure.replace("_", " ")
    evaluated = f"eval_{measure}"
    heldout = [(row["step"], row[evaluated]) for row in history.evaluations if evaluated in row]
    train_points = [(row["step"], row[measure]) for row in history.steps if measure in row]
    if train_points:
        print(f"\n{make_learning_curve(train_points, heldout, words)}\n")
    print(f"trial directory  {trial.dir}")
    print(f"trained model    {trial.exports / 'final'}")
    print(f"curves           {find_program_name('tensorboard')} --logdir {quote_path(trial.tensorboard)}")
    print("next            ", *trial_index.list_commands(trial, "status"))
    print(f"                 {make_submit_line(method, here)}   # on Slurm: --n_nodes 4")
    grpo_s = history.steps[-1]["time"] - history.steps[0]["time"]
    print(f"time             {seconds:.0f} s (GRPO: {grpo_s:.0f} s)")
    if heldout:
        print(f"held-out {words} {heldout[0][1]:.2f} -> {heldout[-1][1]:.2f}")


if __name__ == "__main__":
    sys.exit(main())
