"""A task of a server array on a real Slurm speaks for itself alone; its supervisor is a script that waits for
its end.
"""

import datetime
import re
import sys
from pathlib import Path

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial
from hpc_rl.plan.plan import make_plan
from hpc_rl.supervise.deadline import JobEndTime
from hpc_rl.trials.submission import render_to

pytestmark = pytest.mark.timeout(300)
SUPERVISOR = f"""#!{sys.executable} -S
import os, signal, sys, time
if sys.argv[2] != "hpc_rl.roles.supervisor":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
open(options["--trial_dir"] + "/up." + options["--attempt"], "w").close()
time.sleep(300)
"""


@pytest.fixture
def trial(tmp_path: Path, monkeypatch) -> Trial:
    python = tmp_path / "python"
    python.write_text(SUPERVISOR)
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    options = [
        "experiment_name=e",
        "trial_name=t",
        "train_dataset.path=/t",
        "actor.path=/m",
        "cluster.n_gpus_per_node=0",
    ]
    options += [
        "cluster.n_nodes=3",
        "allocation_mode=embedded:d2+fsdp:d1",
        "launcher.type=slurm",
        "launcher.slurm.layout=jobs",
    ]
    options += [
        "train_dataset.batch_size=8",
        "recover.mode=auto",
        f"cluster.fileroot={tmp_path}",
        "launcher.slurm.time=30",
    ]
    loaded = check(load([], options), files=False)
    plan = make_plan(loaded.config, loaded.explicit, interpreter=str(python), scheduler="slurm")
    return render_to(loaded, plan, command=["hpc-rl", "render"]).trial


def test_its_requeue_leaves_the_other_tasks_alone(cluster, trial, until, monkeypatch):
    array = cluster.run("sbatch", "--parsable", str(trial.scripts / "servers.sbatch")).strip()
    until(lambda: all((trial.dir / f"up.{array}_{task}.0").exists() for task in (0, 1)))
    raw = dict(line.split() for line in cluster.run("squeue", "-h", "-j", array, "-o", "%A %i").splitlines())
    first = raw[array]  # the task whose SLURM_JOB_ID is the array's own id
    [other] = set(raw.values()) - {first}

    cluster.run("scontrol", "update", f"jobid={first}", "TimeLimit=20")
    for raw_id, task in raw.items():
        for name, value in {
            "JOB_ID": raw_id,
            "ARRAY_JOB_ID": array,
            "ARRAY_TASK_ID": task.partition("_")[2],
        }.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        shown = cluster.run("scontrol", "show", "job", "-o", task)
        end_time = JobEndTime()()
        assert end_time is not None and abs(end_time - end_of(shown)) < 1, (
            "of its own, not of the whole array"
        )

    cluster.run("scancel", "--batch", "--signal=USR1", first)
    until(
        lambda: (
            [event["event"] for event in JsonLines(trial.job_state(first)).poll()] == ["started", "requeued"]
        ),
        60,
    )
    until(lambda: cluster.hurry() or (trial.dir / f"up.{first}.1").exists(), 120)
    assert [event["event"] for event in JsonLines(trial.job_state(other)).poll()] == ["started"]
    assert "Restarts=0" in cluster.run("scontrol", "show", "job", "-o", other)
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", "-o", first)


def end_of(shown: str) -> float:
    """When a job ends by its own record, Unix seconds."""
    return datetime.datetime.fromisoformat(re.search(r"EndTime=(\S+)", shown)[1]).timestamp()
