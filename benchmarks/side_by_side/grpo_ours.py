"""GRPO on the toy by `hpc-rl submit`, as a user would: supervisor, server, rollout workers and trainer count.

    python grpo_ours.py MODEL ROWS --steps N --lr LR --seed S [--until 0.8]

Prints JSON: for each step its CPU seconds, also by role, mean reward and tokens per completion. `run.py` calls
it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from cpu_of_tree import adopt_orphans, measure_cpu_s, measure_role_cpu_s
from side_arguments import parse_arguments

POLL_S = 0.02
HERE = Path(__file__).resolve().parent
REWARD = """
from toy import score_digits

def reward(prompt, completion, answer, **columns):
    return score_digits(completion, answer)
"""


def make_options(model: Path, rows: Path, steps: int, lr: float, seed: int) -> dict:
    """Return the configuration that is equal to the peer's."""
    return {
        "experiment_name": "side",
        "trial_name": "ours",
        "trainer": "grpo",
        "seed": seed,
        "total_train_steps": steps,
        "allocation_mode": "embedded:d1+fsdp:d1",
        "cluster": {"fileroot": "runs", "n_gpus_per_node": 0},
        "launcher": {"type": "local"},
        "actor": {
            "path": str(model),
            "dtype": "float32",
            "ppo_n_minibatches": 1,
            "eps_clip": 0.2,
            "kl_ctl": 0.0,
            "loss_aggregation": "sequence_mean",
            "gradient_checkpointing": False,
            "reward_norm": {"mean_level": "group", "std_level": "group", "std_unbiased": True, "eps": 1e-4},
            "optimizer": {
                "lr": lr, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
                "gradient_clipping": 1.0, "lr_scheduler_type": "constant", "warmup_steps_proportion": 0.0,
            },
        },
        "gconfig": {"n_samples": 8, "max_new_tokens": 32, "temperature": 1.0},
        "rollout": {"reward_fn": "digits:reward", "max_head_offpolicyness": 0},
        "train_dataset": {"path": str(rows), "batch_size": 8},
        "recover": {"mode": "disabled"},
    }  # fmt: skip


def run(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the steps of a trial. Raises RuntimeError if it fails."""
    (folder / "digits.py").write_text(REWARD)
    options = make_options(args.model.absolute(), args.rows.absolute(), args.steps, args.lr, args.seed)
    (folder / "grpo.yaml").write_text(yaml.safe_dump(options))
    path = os.pathsep.join([str(folder), str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": path}
    command = [sys.executable, "-m", "hpc_rl.cli"]
    log = (folder / "out").open("w")
    submit = subprocess.Popen(
        [*command, "submit", "grpo.yaml", "--follow"], cwd=folder, env=env, stdout=log, stderr=log
    )
    steps: list[dict[str, Any]] = []
    before_s, before_by_role = 0.0, dict[str, float]()
    while True:
        over = submit.poll() is not None
        found = sorted(folder.glob("runs/*/side/ours/attempts/*/metrics.*.jsonl"))
        rows = [json.loads(line) for path in found for line in path.read_text().splitlines(keepends=True)
                if line.endswith("\n")]  # fmt: skip
        new = rows[len(steps) :]
        if new:
            now_s, now_by_role = measure_cpu_s(keep=submit.pid), measure_role_cpu_s()
            by_role = {
                role: (now - before_by_role.get(role, 0.0)) / len(new) for role, now in now_by_role.items()
            }
            for row in new:  # seldom more than one; then they share the time
                cpu_s = (now_s - before_s) / len(new)
                tokens = row.get("completion_len", 0.0)
                steps.append({"cpu_s": cpu_s, "reward": row["reward"], "tokens": tokens, "by_role": by_role})
            before_s, before_by_role = now_s, now_by_role
        recent = [step["reward"] for step in steps[-5:]]
        reached = args.until is not None and len(recent) == 5 and sum(recent) / 5 >= args.until
        if over or reached:
            break
        time.sleep(POLL_S)
    if reached and submit.poll() is None:
        subprocess.run([*command, "cancel", "ours"], cwd=folder, env=env, stdout=log, stderr=log, check=False)
        submit.wait()
    if not steps or (len(steps) < args.steps and not reached):
        raise RuntimeError(
            f"the trial ended after {len(steps)} steps:\n{(folder / 'out').read_text()[-3000:]}"
        )
    return steps


def main() -> None:
    args = parse_arguments(__doc__)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="hpc-rl-side-") as folder:
        steps = run(args, Path(folder))
        while True:  # the runner of the trial writes until it ends
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
