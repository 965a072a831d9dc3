"""`hpc-rl run`: a trial in the foreground of an allocation; and what else commands do about jobs of a trial."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from patience import extend
from toy_trials import ROOT, hpc_rl, logs_of, make_quickstart, status, trial_of

from hpc_rl.stats.read import load_history

pytestmark = pytest.mark.timeout(400)
CONFIG = "configs/grpo.yaml"
IN_README = re.search(r"^    (salloc .*) hpc-rl (run .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
assert IN_README
SALLOC = tuple(IN_README[1].split())


@pytest.fixture
def clone(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    make_quickstart(tmp_path)
    return tmp_path


def below_salloc(clone, *argv, salloc: Sequence[str] = SALLOC) -> subprocess.Popen[str]:
    """`salloc … hpc-rl run …`; the pid of hpc-rl comes first in its output."""
    command = [*salloc, "-Q", "bash", "-c", 'echo $$; exec "$@"', "run"]
    return subprocess.Popen(
        [*command, sys.executable, "-m", "hpc_rl.cli", *argv],
        cwd=clone,
        env=os.environ | {"XDG_STATE_HOME": str(clone / "state"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_nodes_of_an_allocation_train_and_what_does_not_fit_is_refused(cluster, clone):
    outside = hpc_rl("run", CONFIG, "trial_name=first", cwd=clone, check=False)
    assert outside.returncode == 64
    assert "salloc" in outside.stderr

    small = below_salloc(
        clone, "run", CONFIG, "trial_name=first", "--n_nodes=3", salloc=("salloc", "-N2", "-c2", "--mem=3000")
    )
    said, _ = small.communicate(timeout=extend(200))
    assert small.returncode == 64
    assert "it needs 3 nodes, and has 2" in said
    assert "CPUs on each node, and has 2" in said
    assert not trial_of(clone, "first").dir.exists()

    trains = below_salloc(clone, *IN_README[2].split(), "trial_name=first", "total_train_steps=3")
    said, _ = trains.communicate(timeout=extend(200))
    assert trains.returncode == 0, said + logs_of(trial_of(clone, "first"))
    assert "sums/first: done" in said
    trial = trial_of(clone, "first")
    hosts = {record.name: record.read_text() for record in trial.attempts.glob("*/processes/trainer-*.json")}
    assert any(re.search(r'"node": "n\d"', text) for text in hosts.values()), hosts
    plan = status(clone, "first", "--offline")
    assert [row["step"] for row in load_history(trial).steps] == [1, 2, 3]
    assert plan["state"] == "done"


@pytest.mark.soak
def test_a_ctrl_c_and_a_kill_save_and_recover_continues(cluster, clone, until):
    trial = trial_of(clone, "first")

    def run_until_step(step: int) -> tuple[subprocess.Popen[str], int]:
        started = below_salloc(clone, "run", CONFIG, "trial_name=first", "total_train_steps=400")
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        until(lambda: trial.dir.exists() and load_history(trial).last_step >= step, 120)
        return started, pid

    first, pid = run_until_step(3)
    os.kill(pid, signal.SIGINT)
    said, _ = first.communicate(timeout=extend(200))
    assert first.returncode == 75, said
    assert status(clone, "first")["state"] == "cancelled"
    stopped_at = load_history(trial).last_step

    second, pid = run_until_step(stopped_at + 3)
    os.kill(pid, signal.SIGKILL)
    second.communicate(timeout=extend(200))
    until(lambda: status(clone, "first")["state"] in ("stopped", "killed"))
    until(lambda: not cluster.run("squeue", "--noheader"))
    newest = status(clone, "first")["checkpoint"]
    assert newest >= stopped_at

    hpc_rl("recover", "first", f"total_train_steps={newest + 40}", cwd=clone)
    until(trial.done.exists, 200)
    steps = [row["step"] for row in load_history(trial).steps]
    assert steps == list(range(1, newest + 41)), "each step once"


@pytest.mark.soak
def test_a_cancel_from_elsewhere_ends_the_command_and_submit_tells_of_run(cluster, clone, until):
    trial = trial_of(clone, "first")
    running = below_salloc(clone, "run", CONFIG, "trial_name=first", "total_train_steps=400")
    until(lambda: trial.dir.exists() and load_history(trial).last_step >= 1, 120)
    again = hpc_rl("submit", CONFIG, "trial_name=first", cwd=clone, check=False)
    assert again.returncode == 69 or "is running" in again.stderr, again.stderr
    hpc_rl("cancel", "first", cwd=clone)
    running.communicate(timeout=extend(200))
    assert running.returncode == 75
    until(lambda: not cluster.run("squeue", "--noheader"))
    nested = below_salloc(clone, "submit", CONFIG, "trial_name=second", "total_train_steps=2")
    said, _ = nested.communicate(timeout=extend(200))
    assert nested.returncode == 0
    assert "this submitted a new job. To use the job" in said and "run `hpc-rl run`" in said
    deadline = time.monotonic() + extend(200)
    while not trial_of(clone, "second").done.exists():
        assert time.monotonic() < deadline, logs_of(trial_of(clone, "second"))
        time.sleep(0.5)


def test_a_job_after_another_waits_for_it_and_status_without_a_name_shows_what_runs(cluster, clone, until):
    first = cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300").strip()
    unknown = hpc_rl("submit", CONFIG, "trial_name=x", "--after", "77", cwd=clone, check=False)
    assert unknown.returncode == 64
    assert "knows no job 77" in unknown.stderr
    hpc_rl("submit", CONFIG, "trial_name=one", "--after", first, cwd=clone)
    alone = hpc_rl("status", cwd=clone)
    assert alone.stdout.startswith("sums/one   pending")
    assert "sums/one, which runs or waits" in alone.stderr
    hpc_rl("submit", CONFIG, "trial_name=two", "--after_ok", "one", cwd=clone)
    waits = dict(line.split() for line in cluster.run("squeue", "-h", "-o", "%j %E").splitlines())
    one = trial_of(clone, "one")
    job = next(one.jobs.glob("*.json")).stem
    assert f"afterany:{first}" in waits[one.job_name]
    assert f"afterok:{job}" in waits[trial_of(clone, "two").job_name]

    several = hpc_rl("status", cwd=clone).stdout
    assert re.search(r"^sums/one +pending", several, re.MULTILINE)
    assert re.search(r"^sums/two +pending", several, re.MULTILINE)
    refused = hpc_rl("logs", cwd=clone, check=False)
    assert refused.returncode == 64
    hpc_rl("cancel", "two", cwd=clone)
    hpc_rl("cancel", "one", cwd=clone)
    until(lambda: not cluster.run("squeue", "-h", "-o", "%j", "-n", one.job_name))
    failed = hpc_rl("submit", CONFIG, "trial_name=three", "--after_ok", "one", cwd=clone, check=False)
    assert failed.returncode == 64
    assert "ended without success" in failed.stderr
