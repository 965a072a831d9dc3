"""How many calls of Slurm's commands it costs to watch many trials: counted by wrappers on the PATH, on the
real Slurm.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import extend
from toy_trials import hpc_rl

from hpc_rl.core.trial import Trial, write_json
from hpc_rl.trials import trial_index

NUM_TRIALS = 20
COUNTED = ("squeue", "sacct", "scontrol", "sinfo")


@pytest.fixture
def counted(cluster, tmp_path, monkeypatch):
    """Wrappers before the PATH; gives the calls made in so many seconds from the first one."""
    folder, log = tmp_path / "wrappers", tmp_path / "calls"
    folder.mkdir()
    log.touch()
    for name in COUNTED:
        real = shutil.which(name)
        assert real
        (folder / name).write_text(
            f'#!/bin/bash\necho "$EPOCHSECONDS {name} $*" >>{shlex.quote(str(log))}\nexec {shlex.quote(real)} "$@"\n'
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def calls(seconds: float) -> list[str]:
        made = [line.partition(" ") for line in log.read_text().splitlines()]
        return [call for when, _, call in made if int(when) < int(made[0][0]) + seconds]

    return calls


@pytest.fixture
def trials(cluster, counted, tmp_path) -> list[Trial]:
    """Trials whose jobs run or wait; their directories hold what submit leaves."""
    made = []
    for number in range(NUM_TRIALS):
        trial = Trial(tmp_path / "runs" / "user" / "many" / f"t{number}")
        trial.make_dirs()
        write_json(trial.plan_json, {"trainer": "grpo", "n_nodes": 1, "recover_mode": "auto"})
        job_id = cluster.run(
            "sbatch", "--parsable", "-o", "/dev/null", f"-J{trial}", "--wrap", "sleep 600"
        ).strip()
        write_json(trial.job(job_id), {"job_id": job_id, "scheduler": "slurm", "time": time.time()})
        trial_index.record_trial(trial)
        made.append(trial)
    return made


def watch(trials: list[Trial], folder: Path, duration_s: float) -> None:
    """Five followers for so long, and somebody who looks at one trial after the other.

    One looks before all others: while nobody has ever asked, of two who look at once both may ask, on the two
    sides of a half minute by the clock.
    """
    hpc_rl("status", trials[0].dir, cwd=folder)
    followers = []
    for number, trial in enumerate(trials[:5]):
        command = ["status", "--follow"] if number % 2 else ["logs", "--follow"]
        with (folder / f"follower-{number}").open("w") as output:
            argv = [sys.executable, "-m", "hpc_rl.cli", command[0], str(trial.dir), command[1]]
            followers.append(
                subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            )
    deadline = time.monotonic() + duration_s
    try:
        number = 0
        while time.monotonic() < deadline:
            said = hpc_rl("status", trials[number % NUM_TRIALS].dir, cwd=folder)
            assert said.stdout.split()[1] in ("pending", "running"), said.stdout
            assert not said.stderr
            number += 1
        said = hpc_rl("list", cwd=folder).stdout
        assert said.count("  running  ") == NUM_TRIALS, said
        assert all(process.poll() is None for process in followers), "a follower gave up"
    finally:
        for process in followers:
            process.terminate()
        for process in followers:
            process.wait(extend(30))


@pytest.mark.timeout(240)
def test_half_a_minute_of_watching_costs_at_most_two_calls(trials, counted, tmp_path):
    watch(trials, tmp_path, 30)
    assert 1 <= len(counted(30)) <= 2, counted(30)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_three_minutes_of_watching_cost_at_most_twelve_calls(trials, counted, tmp_path):
    watch(trials, tmp_path, 180)
    assert 4 <= len(counted(180)) <= 12, counted(180)
