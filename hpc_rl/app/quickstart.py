"""The quickstart: a toy model and task, a short SFT trial, a GRPO trial, and what was learnt. Everything by `hpc-rl submit`.

Started as `hpc-rl quickstart`. Further arguments go to the GRPO trial's `hpc-rl submit` as they stand.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from hpc_rl.errors import HpcRlError
from hpc_rl.examples import toy
from hpc_rl.examples.curve import learning_curve
from hpc_rl.render.roots import template_root
from hpc_rl.stats import read
from hpc_rl.trial import Trial, write_json


def main() -> int:
    parser = argparse.ArgumentParser(prog="hpc-rl quickstart", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--dir", type=Path, default=Path("quickstart"), help="where model, task and trials go (default: quickstart)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of model, task and training (default: 1)")
    parser.add_argument("--only_prepare", action="store_true", help="make the model and the task, warm the model up, then stop")
    args, overrides = parser.parse_known_args()
    here = args.dir.absolute()
    started = time.monotonic()
    try:
        prepare(here, args.seed)
        if args.only_prepare:
            print(f"\nready: {here}\nnext:  {submit_line(here)}")
            return 0
        trial = train(here, args.seed, overrides)
        show(here, trial, time.monotonic() - started)
    except subprocess.CalledProcessError as error:
        print(
            f"hpc-rl quickstart: `{' '.join(map(str, error.cmd[3:5]))} …` ended with exit code {error.returncode}",
            file=sys.stderr,
        )
        return error.returncode
    except (HpcRlError, OSError) as error:
        print(f"hpc-rl quickstart: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 70)
    return 0


def prepare(here: Path, seed: int) -> None:
    """Task, base model, and the warm model that an SFT trial makes of it. What an earlier call with this seed made is kept."""
    made = here / "prepared.json"
    if made.exists() and f'"seed": {seed}' in made.read_text():
        print(f"1/3  model and task are in {here} already")
        return
    for folder in ("task", "base", "warm"):
        shutil.rmtree(here / folder, ignore_errors=True)
    print(f"1/3  a toy in {here}: 1,000 sums of three digits (200 held out) and a Qwen3 of 131k parameters", flush=True)
    toy.make_task(here / "task", seed)
    toy.make_model(here / "base", seed)
    print("2/3  warming the model up: an SFT trial", flush=True)
    trial = submit(here, "sft", seed, ["--launcher.type=local"])
    shutil.copytree(trial.exports / "final", here / "warm")
    write_json(made, {"seed": seed})


def train(here: Path, seed: int, overrides: list[str]) -> Trial:
    """The GRPO trial; on this machine unless the overrides say otherwise."""
    print("3/3  asynchronous GRPO: an embedded server, a rollout service and a trainer", flush=True)
    elsewhere = any(word.startswith(("--launcher", "launcher.", "--n_nodes", "--cluster", "cluster.")) for word in overrides)
    return submit(here, "grpo", seed, [*([] if elsewhere else ["--launcher.type=local"]), *overrides])


def submit(here: Path, kind: str, seed: int, overrides: list[str]) -> Trial:
    """Run `hpc-rl submit --follow` from the directory above `here`. Raises CalledProcessError."""
    name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    fixed = [f"trial_name={name}", f"seed={seed}", f"cluster.fileroot={here / 'runs'}"]
    config = template_root() / "configs" / "quickstart" / f"{kind}.yaml"
    paths = {
        "sft": [f"model.path={here / 'base'}", f"train_dataset.path={here / 'task/sft.jsonl'}"],
        "grpo": [
            f"actor.path={here / 'warm'}",
            f"train_dataset.path={here / 'task/train.jsonl'}",
            f"valid_dataset.path={here / 'task/heldout.jsonl'}",
        ],
    }[kind]
    command = [sys.executable, "-m", "hpc_rl.cli", "submit", "--follow", "--config", str(config), *fixed, *paths, *overrides]
    subprocess.run(command, check=True)
    return Trial.of(here / "runs", os.environ.get("USER") or _login_name(), "quickstart", name)


def _login_name() -> str:
    import getpass

    return getpass.getuser()


def submit_line(here: Path) -> str:
    where = os.path.relpath(here)
    edits = "" if where == "quickstart" else f" actor.path={where}/warm train_dataset.path={where}/task/train.jsonl"
    return f"hpc-rl submit --config {os.path.relpath(template_root() / 'configs' / 'grpo.yaml')}{edits}"


def show(here: Path, trial: Trial, seconds: float) -> None:
    """The curve, where things are, what to type next, and the two numbers that matter."""
    history = read.read(trial)
    heldout = [(row["step"], row["eval_reward"]) for row in history.evaluations]
    train_points = [(row["step"], row["reward"]) for row in history.steps]
    print(f"\n{learning_curve(train_points, heldout)}\n")
    print(f"trial directory  {trial.dir}")
    print(f"trained model    {trial.exports / 'final'}")
    print(f"curves           tensorboard --logdir {trial.attempts}")
    print(f"next             hpc-rl status {trial}")
    print(f"                 {submit_line(here)}   # on Slurm: --n_nodes 4")
    print(f"time             {seconds:.0f} s, of which GRPO {history.steps[-1]['time'] - history.steps[0]['time']:.0f} s")
    print(f"held-out reward {heldout[0][1]:.2f} -> {heldout[-1][1]:.2f}")


if __name__ == "__main__":
    sys.exit(main())
