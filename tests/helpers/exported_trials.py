"""An exported model on a server of another project, started by the command that `hpc-rl export` prints."""

import json
import os
import shlex
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from patience import extend, wait_until
from toy_trials import hpc_rl, trial_of

from hpc_rl.core.trial import Trial
from hpc_rl.stats.kept_samples import load_samples

NUM_STEPS = 3
NUM_PROMPTS = 16


def train_and_export(here: Path) -> tuple[Trial, dict]:
    """Train the quickstart's task for some steps; return the trial, and what `export --json` told."""
    from conformance import make_model  # at the top it would be imported before pytest rewrites its asserts

    hpc_rl("quickstart", "--only_prepare", cwd=here, timeout_s=600)
    make_model(here / "quickstart/warm", 1)  # the quickstart's heads are too small for vLLM on a CPU
    words = ["trial_name=handed", "cluster.fileroot=quickstart/runs", "launcher.type=local"]
    words += [f"total_train_steps={NUM_STEPS}", "actor.path=quickstart/warm", "gconfig.max_new_tokens=12"]
    words += ["evaluator.freq_steps=1", f"evaluator.keep_samples={NUM_PROMPTS}"]
    words += ["eval_gconfig.greedy=true", "recover.freq_steps=1"]
    config = Path(__file__).resolve().parents[2] / "configs/grpo.yaml"
    hpc_rl("submit", config, *words, "--follow", cwd=here, timeout_s=600)
    said = hpc_rl("export", "handed", "--to", "handed", "--json", cwd=here, timeout_s=300)
    return trial_of(here, "handed"), json.loads(said.stdout)


def load_greedy(trial: Trial) -> dict[str, str]:
    """Return the greedy completion of each held-out prompt by the trial's server, at the last step."""
    found = [one for one in load_samples(trial) if one.evaluation and one.step == NUM_STEPS]
    assert len(found) == NUM_PROMPTS
    return {one.prompt: one.completion.removesuffix("<eos>") for one in found}


def check_served(
    here: Path,
    told: dict,
    backend: str,
    python: str,
    expected: dict[str, str],
    extra: list[str],
    env: Mapping[str, str],
) -> None:
    """Start a server by the printed command and its options for a CPU; it must make the same greedy tokens."""
    words = shlex.split(told["serve"][backend])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words[words.index("--port") + 1] = str(port)
    program = {"sglang": [python], "vllm": [python, str(Path(python).with_name("vllm"))]}[backend]
    own = {"PATH": f"{Path(python).parent}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/")}
    log = here / f"{backend}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*program, *words[1:], *extra], cwd=here, env={**own, "HF_HUB_OFFLINE": "1", **env},
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1"
    try:
        wait_until(lambda: _is_up(url, process, log), 600, lambda: log.read_text()[-3000:])
        made = {prompt: _complete(url, told["path"], prompt) for prompt in expected}
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(extend(60))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(extend(60))
    assert made == expected


def _is_up(url: str, process: subprocess.Popen, log: Path) -> bool:
    if process.poll() is not None:
        pytest.fail(f"the server ended with code {process.returncode}: {log.read_text()[-3000:]}")
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False


def _complete(url: str, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12}
    body["skip_special_tokens"] = False  # a model that was hardly trained makes some
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=extend(120)) as response:
        return json.load(response)["choices"][0]["text"].removesuffix("<eos>")
