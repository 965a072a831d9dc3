"""Trials with servers alone, for the tests on this machine and on Slurm."""

import json
from collections import Counter
from pathlib import Path

from patience import extend
from toy_trials import ROOT, hpc_rl, logs_of, make_toy, trial_of

from hpc_rl.core.trial import Trial
from hpc_rl.rollout.batch_log.replay import load_state

NUM_PROMPTS = 40
# counts its calls, and waits after some of them, so that a test can interrupt it
REWARD = """
import os
import time

def count(prompt, completion, **columns):
    with open({calls!r}, "a+") as file:
        file.seek(0)
        while len(file.readlines()) >= 24 and not os.path.exists({go!r}):
            time.sleep(0.05)
            file.seek(0)
        file.write(prompt + "\\n")
    return float(len(set(completion)))
"""
OPTIONS = {
    "experiment_name": "sums",
    "cluster.fileroot": "quickstart/runs",
    "cluster.n_gpus_per_node": 0,
    "gconfig.max_new_tokens": 6,
    "rollout.reward_fn": "slow:count",
    "recover.mode": "auto",
    "launcher.inference_server_cpus_per_gpu": 1,
    "launcher.inference_server_mem_per_gpu": 2048,
    "launcher.rollout_cpus": 1,
    "launcher.rollout_mem_mb": 2048,
    "rollout.max_concurrent_rollouts": 4,
    "rollout.reward_timeout_s": 600,
}


def make_folder(folder: Path, waits: bool = False) -> Path:
    """Make a model, prompts and a reward of the user's; return the folder for commands.

    With `waits` the reward waits after 24 calls for the file `go`.
    """
    make_toy(folder / "quickstart", "base")
    task = folder / "quickstart" / "task"
    rows = (task / "train.jsonl").read_text().splitlines()
    by_prompt = {json.loads(row)["prompt"]: row for row in rows}
    (folder / "prompts.jsonl").write_text("\n".join([*by_prompt.values()][:NUM_PROMPTS]) + "\n")
    go = folder / "go"
    (folder / "slow.py").write_text(REWARD.format(calls=str(folder / "calls"), go=str(go)))
    if not waits:
        go.touch()
    return folder


def list_arguments(**more: object) -> list[str]:
    """Return the options of a trial as words of a command line; `__` stands for a dot."""
    own = {name.replace("__", "."): value for name, value in more.items()}
    return [f"{name}={value}" for name, value in (OPTIONS | own).items()]


def list_prompts(folder: Path) -> list[str]:
    return [json.loads(row)["prompt"] for row in (folder / "prompts.jsonl").read_text().splitlines()]


def list_finished(trial: Trial) -> list[int]:
    """Return the indexes of the prompts whose results are on disk."""
    return sorted(load_state(trial.rollout).ready)


def count_calls(folder: Path) -> list[int]:
    """Return how often the trial called the reward for each prompt."""
    calls = Counter((folder / "calls").read_text().splitlines())
    first, *others = (calls[prompt] for prompt in list_prompts(folder))
    return [first - 1, *others]  # a submission tries the reward with the first row


def load_completions(trial: Trial) -> list[dict]:
    rows = (trial.results / "completions.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


def list_backend_options(backend: str, python: str) -> list[str]:
    """Return the options of a real SGLang or vLLM on a CPU."""
    from vllm_servers import TEST_ENVIRONMENT

    shim = {"PYTHONPATH": str(ROOT / "tests/sglang/shim"), "OMP_NUM_THREADS": "1"}
    env = {"sglang": shim, "vllm": TEST_ENVIRONMENT}[backend]
    sizes = {
        "sglang": ["sglang.max_total_tokens=16384", "sglang.context_length=64"],
        "vllm": ["vllm.kv_cache_memory_bytes=67108864", "vllm.max_model_len=64"],
    }
    words = ",".join(f"{name}={value}" for name, value in env.items())
    return [
        f"launcher.inference_server_python={python}",
        f"launcher.inference_server_env_vars={words}",
        "launcher.inference_server_mem_per_gpu=4096",
        *sizes[backend],
    ]


def generate_by_servers(folder: Path, backend: str, python: str, *overrides: str) -> None:
    """Generate with a backend and check the results."""
    from conformance import make_model  # at the top it would be imported before pytest rewrites its asserts

    make_folder(folder)
    make_model(folder / "larger", 1)  # the toy's is too small for some
    own = [f"allocation_mode={backend}:d1", f"launcher.inference_server_python={python}", *overrides]
    own += ["train_dataset.path=prompts.jsonl", "gconfig.n_samples=2", "launcher.type=local"]
    own.append(f"rollout.setup_timeout={extend(600):.0f}")
    words = ("generate", "larger", *list_arguments(), *own, "--follow")
    done = hpc_rl(*words, cwd=folder, timeout_s=500, check=False)
    trial = trial_of(folder, "larger-generate")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{logs_of(trial)}"
    expected = [(index, sample) for index in range(NUM_PROMPTS) for sample in range(2)]
    assert [(row["index"], row["sample"]) for row in load_completions(trial)] == expected
