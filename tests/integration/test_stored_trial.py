"""Trials of an earlier version: status tells their story, recover continues them, a queued job requeues."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import xxhash
from toy_trials import hpc_rl, logs_of

from hpc_rl.errors import StopCause
from hpc_rl.records import EventKind, JobEvent, read_events, read_job_state, read_lineages
from hpc_rl.stats.read import read
from hpc_rl.trial import Trial, account, read_json

pytestmark = pytest.mark.timeout(300)
STORED = Path(__file__).parents[1] / "fixtures" / "trial_34bf276" / "trials.tar.gz"
BINARY = (".zip", ".safetensors", ".ledger", ".seal")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A directory of submission with both trials in it."""
    with tarfile.open(STORED) as tar:
        tar.extractall(tmp_path, filter="data")
    trials = tmp_path / "runs" / account() / "stored"
    trials.parent.mkdir(parents=True)
    (tmp_path / "trials").rename(trials)
    python = Path(sys.executable)
    paths = {"TRIALS": trials, "ROOT": tmp_path, "PYTHON": python, "BIN": python.parent, "CODE": tmp_path}
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.suffix not in BINARY:
            text = path.read_text()
            for name, value in paths.items():
                text = text.replace(f"@{name}@", str(value))
            path.write_text(text)
    for manifest in trials.glob("*/recover/*/manifest.json"):
        update_checksums(manifest)
    for name in ("finished", "stopped"):
        Trial(trials / name).make_secret()
    return tmp_path


def update_checksums(manifest: Path) -> None:
    """As 34bf276 wrote them: of each file, and of the manifest without its own."""
    data = json.loads(manifest.read_text())
    del data["xxh3"]
    for file in data["files"]:
        path = manifest.parent / file["name"]
        if path.exists():
            content = path.read_bytes()
            file |= {"size": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}
    data["xxh3"] = xxhash.xxh3_128_hexdigest(json.dumps(data, sort_keys=True).encode())
    manifest.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")


def trial_of(folder: Path, name: str) -> Trial:
    return Trial(folder / "runs" / account() / "stored" / name)


def status_of(folder: Path, trial: Trial) -> dict:
    return json.loads(hpc_rl("status", trial.dir, "--json", cwd=folder).stdout)


def test_status_tells_the_story_of_a_finished_trial(folder):
    trial = trial_of(folder, "finished")
    found = status_of(folder, trial)
    assert (found["state"], found["step"], found["total_steps"]) == ("done", 24, 24)
    assert [job["event"] for job in found["jobs"]] == ["ended"] * 3
    assert [attempt["state"] for attempt in found["attempts"]] == ["cancelled", "stopped", "done"]
    first = found["attempts"][0]
    trainer = next(role for role in first["roles"] if role["role"] == "trainer")
    assert trainer["incarnation"] == 2, "once killed, once with its supervisor"
    text = hpc_rl("status", trial.dir, cwd=folder).stdout
    assert "step 24 of 24" in text and "SIGKILL" in text and "cancelled" in text
    causes = [
        event.cause
        for attempt in found["attempts"]
        for event in read_events(trial.attempt(attempt["id"]))
        if event.kind is EventKind.STOPPING
    ]
    assert causes == [StopCause.CANCELLED, StopCause.PREEMPTION]


def test_recover_continues_a_stored_trial_to_its_end(folder):
    trial = trial_of(folder, "stopped")
    assert "step 14 of 24" in hpc_rl("status", trial.dir, cwd=folder).stdout
    explained = hpc_rl("recover", trial.dir, "--explain", cwd=folder).stdout
    assert "14" in explained
    assert [job.stem for job in trial.jobs.glob("*.json")] == [read_lineages(trial)[0].submission]
    hpc_rl("recover", trial.dir, cwd=folder)
    until_over(folder, trial)
    newest = read_lineages(trial)[-1]
    assert (newest.from_step, newest.from_lineage) == (14, 1)
    assert read_json(trial.exports / "final" / "hpc_rl.json")["version"] == f"{newest.lineage}.24"
    assert [row["step"] for row in read(trial).steps] == list(range(1, 25))
    assert list(trial.weights.iterdir()) == [], "done: what was published for servers is not kept"
    assert " freed" in hpc_rl("status", trial.dir, cwd=folder).stdout
    hpc_rl("recover", trial.dir, "total_train_steps=25", cwd=folder)  # published anew from the checkpoint
    until_over(folder, trial)
    assert read_json(trial.exports / "final" / "hpc_rl.json")["step"] == 25


def test_a_requeued_job_of_the_earlier_version_continues_with_its_own_code(folder):
    trial = trial_of(folder, "stopped")
    [job] = trial.jobs.glob("*.json")
    script = trial.scripts / "local.sh"
    text = script.read_text()
    assert "restart=0" in text
    script.write_text(text.replace("restart=0", "restart=1", 1))  # as it is once it has recorded a requeue
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = ["bash", str(script), job.stem]
    done = subprocess.run(
        command, cwd=folder, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr + logs_of(trial)
    last = read_job_state(trial, job.stem)[-1]
    assert (last.event, last.code, last.restart) == (JobEvent.ENDED, 0, 1)
    newest = read_lineages(trial)[-1]
    assert (newest.from_step, newest.attempt) == (14, f"{job.stem}.1")
    found = status_of(folder, trial)
    assert (found["state"], found["step"]) == ("done", 24)
    assert [attempt["state"] for attempt in found["attempts"]] == ["stopped", "done"]


def until_over(folder: Path, trial: Trial) -> None:
    hpc_rl("logs", trial.dir, "--follow", cwd=folder, timeout_s=240, check=False)
    assert trial.done.exists(), logs_of(trial)
