"""A sweep on a real Slurm: one job array, a preemption in the middle, and means over seeds."""

import json
from pathlib import Path

import pytest
from toy_trials import ROOT, hpc_rl, logs_of, make_toy, trial_of

from hpc_rl.core.records import EventKind, load_events
from hpc_rl.core.trial import Trial
from hpc_rl.stats.read import load_history
from hpc_rl.status.submitted_jobs import load_jobs

PREEMPTS = ["-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"]
# a callback of the user's: at step 3 training waits for a file, and the end of each start is counted
CODE = """
import os
import time

class Waits:
    def on_step(self, event):
        while event.step == 3 and not os.path.exists({go!r}) and not event.is_check:
            time.sleep(0.05)

    def on_end(self, event):
        if not event.is_check:
            with open(os.path.join(event.trial_dir, "ends"), "a") as file:
                file.write(f"{{event.step}} {{event.is_done}}\\n")
"""
OPTIONS = (
    *("experiment_name=sums", "trial_name=toy", "total_train_steps=6", "recover.freq_steps=1"),
    *("valid_dataset.path=quickstart/task/sft.jsonl", "evaluator.freq_steps=3", "callbacks=[waits:Waits]"),
)


@pytest.fixture
def folder(tmp_path) -> Path:
    make_toy(tmp_path / "quickstart", "base")
    (tmp_path / "waits.py").write_text(CODE.format(go=str(tmp_path / "go")))
    return tmp_path


def sweep(folder: Path, *words: str) -> dict:
    command = ["sweep", str(ROOT / "configs/quickstart/sft.yaml"), *OPTIONS, *words, "--json"]
    return json.loads(hpc_rl(*command, cwd=folder, timeout_s=600).stdout)


def report(folder: Path) -> dict:
    return json.loads(hpc_rl("sweep", "--report", "toy", "--json", cwd=folder).stdout)


def ends_of(trial: Trial) -> list[str]:
    path = trial.dir / "ends"
    return path.read_text().splitlines() if path.exists() else []


def is_stopping(trial: Trial) -> bool:
    """Return whether the supervisor of the first start was told to save and end."""
    assert not ends_of(trial)
    [attempt] = trial.attempts.iterdir()
    return any(event.kind is EventKind.STOPPING for event in load_events(trial.attempt(attempt.name)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rates", "seeds", "max_running"),
    [
        pytest.param("2e-3", 3, 2, id="3 trials"),
        pytest.param("1e-4,2e-3", 6, 4, id="12 trials", marks=[pytest.mark.soak, pytest.mark.timeout(2400)]),
    ],
)
def test_an_array_of_trials_resumes_after_a_preemption(cluster, folder, until, rates, seeds, max_running):
    words = [f"model.optimizer.lr={rates}", f"seed=1..{seeds}", "--max_running", str(max_running)]
    told = sweep(folder, *words)
    trials = [trial_of(folder, one["trial"]) for one in told["trials"]]
    assert len(trials) == len(rates.split(",")) * seeds
    assert {*cluster.run("squeue", "-h", "-o", "%F").split()} == {told["array"]}, "one job array"
    native = [load_jobs(trial)[0].native_id for trial in trials]
    assert native == [f"{told['array']}_{number}" for number in range(len(trials))]

    first = trials[:max_running]
    until(lambda: all(load_history(trial).last_step == 3 for trial in first), 300)
    waiting = hpc_rl("status", trials[-1].name, cwd=folder).stdout
    assert "pending" in waiting and "its job array already runs as many tasks as its limit allows" in waiting
    cluster.run("sbatch", *PREEMPTS)
    until(lambda: all(map(is_stopping, first)), 120)
    (folder / "go").touch()

    def is_done() -> bool:
        for job in native:
            cluster.hurry(job)
        return all(trial.done.exists() for trial in trials)

    until(is_done, 600)
    for trial in first:
        assert ends_of(trial)[-1] == "6 True", logs_of(trial)
        assert len(trial.list_attempts(load_jobs(trial)[0].job_id)) == 2, logs_of(trial)
        assert [row["step"] for row in load_history(trial).steps] == [*range(1, 7)]
    found = report(folder)
    assert found["num_over"] == len(trials) and found["metric"] == "held-out" and found["lower_is_better"]
    for group in found["groups"]:
        assert len(group["values"]) == seeds
        assert group["mean"] == pytest.approx(sum(group["values"]) / seeds)
        assert group["deviation"] > 0
    assert found["best_trial"] == min(found["trials"], key=lambda one: one["value"])["name"]
    if "," in rates:
        assert found["best_options"] == {"model.optimizer.lr": "2e-3"}
    assert sweep(folder, *words)["submitted"] == [], "nothing is left to do"
