"""Servers without a trainer on a real Slurm: a preemption in the middle of a pass, and of an endpoint."""

import json
import urllib.request
from pathlib import Path

import pytest
from alone_trials import (
    NUM_PROMPTS,
    count_calls,
    list_arguments,
    list_backend_options,
    list_finished,
    load_completions,
    make_folder,
)
from cluster import Cluster
from other_pythons import python_of
from patience import extend
from toy_trials import hpc_rl, status, trial_of

from hpc_rl.core.trial import Trial

pytestmark = pytest.mark.timeout(900)
PREEMPTS = ["-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"]


REAL = [
    pytest.param("sglang", marks=[pytest.mark.soak, pytest.mark.sglang]),
    pytest.param("vllm", marks=[pytest.mark.soak, pytest.mark.vllm]),
]
READS = {
    "generate": ("train_dataset.path=prompts.jsonl", "gconfig.n_samples=2"),
    "evaluate": ("valid_dataset.path=prompts.jsonl", "eval_gconfig.n_samples=2"),
}


def submit(folder: Path, command: str, backend: str, *own: str) -> str:
    """Submit a trial on two nodes with a server on each, or on one with a real server; return its job."""
    words, model = [*list_arguments(), *own, "--json"], "quickstart/base"
    if backend == "embedded":
        words.append("--n_nodes=2")
    else:
        from conformance import make_model  # it imports torch

        make_model(folder / "base", 1)  # the toy's is too small for some
        words += [f"allocation_mode={backend}:d1", *list_backend_options(backend, python_of(backend))]
        model = "base"
    return json.loads(hpc_rl(command, model, *words, cwd=folder).stdout)["job_id"]


def is_preempted(cluster: Cluster, trial: Trial, job: str) -> bool:
    """Return whether the first start is over: by itself, or by SIGKILL where a real server ends too slowly."""
    state = cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").strip()
    return trial.attempt(f"{job}.0").ended.exists() or state == "PENDING"


@pytest.mark.parametrize(
    ("command", "backend"),
    [
        ("generate", "embedded"),
        *(pytest.param(command, one.values[0], marks=one.marks) for one in REAL for command in READS),
    ],
)
def test_a_pass_continues_after_a_preemption_without_duplicates(cluster, tmp_path, until, command, backend):
    folder = make_folder(tmp_path, waits=True)
    trial = trial_of(folder, f"base-{command}")
    job = submit(folder, command, backend, *READS[command])
    until(lambda: len(list_finished(trial)) >= 5, 400)
    cluster.run("sbatch", *PREEMPTS)
    until(lambda: is_preempted(cluster, trial, job), 120)
    before = list_finished(trial)
    (folder / "go").touch()

    def is_done() -> bool:
        cluster.hurry(job)
        return trial.done.exists()

    until(is_done, 500)
    rows, calls = load_completions(trial), count_calls(folder)
    expected = [(index, sample) for index in range(NUM_PROMPTS) for sample in range(2)]
    assert [(row["index"], row["sample"]) for row in rows] == expected
    assert {calls[index] for index in before} == {2}, "a finished prompt is not repeated"
    seen = status(folder, trial.name, "--offline")
    assert seen["scores"]["prompts"] == NUM_PROMPTS
    first, last = seen["attempts"]
    assert last["state"] == "done"
    if backend == "embedded":  # Slurm may kill others first, with the supervisor: KillWait is short here
        assert first["state"] == "stopped" and "finished prompts are saved" in first["cause"]


@pytest.mark.parametrize("backend", ["embedded", *REAL])
def test_an_endpoint_serves_again_after_a_preemption(cluster, tmp_path, until, backend):
    folder = make_folder(tmp_path)
    trial, job = trial_of(folder, "base-serve"), submit(folder, "serve", backend)

    def answers() -> bool:
        cluster.hurry(job)
        done = hpc_rl("env", "urls", "base-serve", "--json", cwd=folder, check=False)
        if done.returncode:
            return False
        urls = json.loads(done.stdout)
        body = json.dumps({"model": "any", "prompt": "1+1=", "max_tokens": 4}).encode()
        headers = {"Authorization": f"Bearer {urls['api_key']}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{urls['base_url']}/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=extend(120)) as answer:
                return bool(json.load(answer)["choices"][0]["text"])
        except OSError:  # it stops, or starts
            return False

    until(answers, 400)
    cluster.run("sbatch", *PREEMPTS)
    until(lambda: is_preempted(cluster, trial, job), 120)
    until(answers, 500)
    assert trial.attempt(f"{job}.1").dir.is_dir()
    hpc_rl("cancel", "base-serve", cwd=folder)
    until(lambda: not cluster.run("squeue", "--noheader", "--format=%i").strip(), 120)
    assert status(folder, "base-serve")["state"] == "cancelled"
