"""The quickstart: a toy model and task, a short SFT trial and a GRPO trial, submitted by `hpc-rl submit`.

Started as `hpc-rl quickstart`. Further arguments are passed to the `hpc-rl submit` of the GRPO trial. An
interrupt stops the running trial, with its state saved.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hpc_rl.errors import CannotWrite, ConfigError, ExitCode, HpcRlError, RoleFailed
from hpc_rl.examples import toy
from hpc_rl.examples.curve import learning_curve
from hpc_rl.render.jinja_environment import template_root
from hpc_rl.stats import read
from hpc_rl.status.follow import follow
from hpc_rl.status.formatting import program_name, shell_path
from hpc_rl.submit import trial_index
from hpc_rl.submit.cancellation import cancel
from hpc_rl.trial import Trial, read_json, write_json

MADE = ("task", "base", "warm")  # folders that it makes, and may replace


def main() -> int:
    parser = argparse.ArgumentParser(prog="hpc-rl quickstart", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dir", type=Path, required=True, help="directory for model, task and trials")
    parser.add_argument("--seed", type=int, required=True, help="seed of model, task and training")
    only = "only make the model and the task, and warm the model up"
    parser.add_argument("--only_prepare", action="store_true", help=only)
    args, overrides = parser.parse_known_args()
    # A SIGTERM is handled like an interrupt: the trial must not be left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(args.dir.absolute(), args.seed, args.only_prepare, overrides)
    except KeyboardInterrupt:
        print("hpc-rl quickstart: interrupted", file=sys.stderr)
        return ExitCode.KILLED_BY_PERSON
    except HpcRlError as error:
        print(f"hpc-rl quickstart: {error}", file=sys.stderr)
        return error.exit_code
    except subprocess.CalledProcessError as error:  # it printed the reason
        return error.returncode
    return 0


def run(here: Path, seed: int, only_prepare: bool, overrides: list[str]) -> None:
    started = time.monotonic()
    prepare(here, seed)
    if only_prepare:
        print(f"ready: {here}\nnext:  {submit_line(here)}")
        return
    places = ("--launcher", "launcher.", "--n_nodes", "--cluster", "cluster.")
    elsewhere = any(word.startswith(places) for word in overrides)
    print("3/3  asynchronous GRPO: generation servers, a rollout service and a trainer", flush=True)
    trial = train(here, "grpo", seed, overrides if elsewhere else ["--launcher.type=local", *overrides])
    show(here, trial, time.monotonic() - started)


def prepare(here: Path, seed: int) -> None:
    """Make the task, the base model and the warm model; keep those of an earlier call with this seed."""
    made = here / "prepared.json"
    found = read_json(made)
    if found == {"seed": seed, "ready": True}:
        print(f"1/3  model and task exist in {here}\n2/3  the model is warmed up already", flush=True)
        return
    foreign = [name for name in MADE if (here / name).exists()] if found is None else []
    if foreign:
        raise ConfigError(
            f"{here / foreign[0]} exists and was not made by quickstart: give another directory with --dir."
        )
    try:
        here.mkdir(parents=True, exist_ok=True)
        write_json(made, {"seed": seed, "ready": False})
        toys = "1,000 sums of three digits (200 held out) and a Qwen3 of 131k parameters"
        print(f"1/3  a toy in {here}: {toys}", flush=True)
        for name in MADE:
            shutil.rmtree(here / name, ignore_errors=True)
        toy.make_task(here / "task", seed)
        toy.make_model(here / "base", seed)
    except OSError as error:
        why = error.strerror or error
        raise CannotWrite(f"{here} can't be written: {why}. Give another directory with --dir.") from error
    print("2/3  warming the model up: an SFT trial", flush=True)
    trial = train(here, "sft", seed, ["--launcher.type=local"])
    shutil.copytree(trial.exports / "final", here / "warm")
    write_json(made, {"seed": seed, "ready": True})


def train(here: Path, kind: str, seed: int, overrides: list[str]) -> Trial:
    """Submit a trial and follow it to its end. Raises CalledProcessError, RoleFailed, SystemExit."""
    name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = config_of(f"quickstart/{kind}")
    command = [sys.executable, "-m", "hpc_rl.cli", "submit", "--json", "--config", str(config)]
    command += [f"trial_name={name}", f"seed={seed}", *settings(here, kind), *overrides]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    made: dict[str, Any] = json.loads(done.stdout)
    trial = Trial(Path(made["dir"]))
    known_as = trial_index.cli_name(trial)
    print(f"     trial {known_as}: {made['allocation']} as job {made['job_id']}", flush=True)
    try:
        code = follow(trial)
    except KeyboardInterrupt:
        cancel(trial)
        note = "interrupted; the trial saves its state and stops. To resume it:"
        print(f"\nhpc-rl quickstart: {note}", *trial_index.commands(trial, "recover"), file=sys.stderr)
        raise SystemExit(int(ExitCode.KILLED_BY_PERSON)) from None
    if code:
        [see] = trial_index.commands(trial, "status")
        raise RoleFailed(f"trial {trial} exited with code {code}; see {see}")
    return trial


def settings(here: Path, kind: str) -> list[str]:
    """Return the paths of model and data, as overrides of a configuration."""
    paths = {"cluster.fileroot": "runs"}
    if kind == "sft":
        paths |= {"model.path": "base", "train_dataset.path": "task/sft.jsonl"}
    else:
        paths |= {"actor.path": "warm", "train_dataset.path": "task/train.jsonl"}
        paths |= {"valid_dataset.path": "task/heldout.jsonl"}
    return [f"{option}={here / path}" for option, path in paths.items()]


def config_of(name: str) -> Path:
    return template_root() / "configs" / f"{name}.yaml"


def submit_line(here: Path) -> str:
    """Return the command that trains the toy by the documented configuration, from the working directory."""
    default = here == Path.cwd() / "quickstart"
    edits = [] if default else [shell_path(Path(setting)) for setting in settings(here, "grpo")]
    return " ".join([program_name(), "submit", "--config", shell_path(config_of("grpo")), *edits])


def show(here: Path, trial: Trial, seconds: float) -> None:
    """Print the learning curve, the paths, the next commands, and the rewards before and after."""
    history = read.read(trial)
    heldout = [(row["step"], row["eval_reward"]) for row in history.evaluations]
    train_points = [(row["step"], row["reward"]) for row in history.steps]
    print(f"\n{learning_curve(train_points, heldout)}\n")
    print(f"trial directory  {trial.dir}")
    print(f"trained model    {trial.exports / 'final'}")
    print(f"curves           {program_name('tensorboard')} --logdir {shell_path(trial.attempts)}")
    print("next            ", *trial_index.commands(trial, "status"))
    print(f"                 {submit_line(here)}   # on Slurm: --n_nodes 4")
    grpo_s = history.steps[-1]["time"] - history.steps[0]["time"]
    print(f"time             {seconds:.0f} s, of which GRPO {grpo_s:.0f} s")
    if heldout:
        print(f"held-out reward {heldout[0][1]:.2f} -> {heldout[-1][1]:.2f}")


if __name__ == "__main__":
    sys.exit(main())
