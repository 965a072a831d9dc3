"""The Slurm scheduler and the rendered batch script against a real Slurm; the supervisor is a script of few
lines.
"""

import json
import os
import random
import re
import shutil
import signal
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from toy_plans import sft_plan

from hpc_rl.config.load.load import Loaded
from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.errors import SchedulerError, TrialBusy
from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial
from hpc_rl.schedulers.base import JobSpec, State
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.trials.submission import submit

pytestmark = pytest.mark.timeout(300)

# Start number n does line n of `acts` (the last line again and again) and notes signals.
FAKE_PYTHON = f"""#!{sys.executable} -S
import os, signal, sys, time
if sys.argv[2] != "hpc_rl.roles.supervisor":
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
log = open(options["--trial_dir"] + "/fake.log", "a", buffering=1)
def stop(number, frame):
    print(signal.Signals(number).name, file=log)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
open(options["--trial_dir"] + "/fake.pid", "w").write(str(os.getpid()))
print("start", options["--attempt"], file=log)
acts = open(options["--trial_dir"] + "/acts").read().split()
n = sum(line.startswith("start") for line in open(log.name))
act = acts[min(n, len(acts)) - 1]
print("act", act, file=log)
if act == "hang":
    time.sleep(300)
elif act == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(act))
"""


@dataclass
class Job:
    """A submitted trial whose supervisor is the fake."""

    trial: Trial
    id: str
    scheduler: SlurmScheduler

    @property
    def state(self) -> State:
        return self.scheduler.query_states([self.id])[self.id].state

    @property
    def log(self) -> list[str]:
        path = self.trial.dir / "fake.log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def starts(self) -> list[str]:
        return [line.split()[1] for line in self.log if line.startswith("start")]

    @property
    def events(self) -> list[str]:
        return [event["event"] for event in JsonLines(self.trial.job_state(self.id)).poll()]

    @property
    def end(self) -> dict:
        return JsonLines(self.trial.job_state(self.id)).poll()[-1]


@pytest.fixture
def start(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    root = tmp_path / "a $(touch pwned) 'b' ü"
    python = root / "python"

    def start(*acts: str, mode: str = "auto", slurm: dict | None = None, n_nodes: int = 2) -> Job:
        data = {
            "experiment_name": "exp",
            "trial_name": "one",
            "cluster": {"fileroot": str(root)},
            "train_dataset": {"path": "/data"},
            "model": {"path": "/model"},
            "recover": {"mode": mode},
            "launcher": {"type": "slurm", "slurm": {"comment": 'it\'s "mine" # \\ü', **(slurm or {})}},
        }
        config = from_dict(data)
        plan = sft_plan([], str(python), n_nodes=n_nodes, recover_mode=mode)
        trial = Trial.of(root, "me", "exp", "one")
        root.mkdir(exist_ok=True)
        python.write_text(FAKE_PYTHON)
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        scheduler = SlurmScheduler(retry_wait_s=0.1)
        ours = _WithActs(scheduler, trial, acts)
        made = submit(Loaded(config, {}), plan, command=["hpc-rl", "submit"], trial=trial, scheduler=ours)
        return Job(trial, made.job_id, scheduler)

    yield start
    assert not list(tmp_path.rglob("pwned")) and not Path("pwned").exists()


class _WithActs:
    """Puts the fake's script into the trial directory before the job can start."""

    name = "slurm"

    def __init__(self, inner: SlurmScheduler, trial: Trial, acts: tuple[str, ...]) -> None:
        self.inner, self.trial, self.acts = inner, trial, acts

    def submit(self, spec: JobSpec) -> str:
        (self.trial.dir / "acts").write_text("\n".join(self.acts) + "\n")
        return self.inner.submit(spec)


def rerun(cluster, job: Job, until) -> None:
    """Slurm makes a requeued job wait for two minutes; the test does not.

    Returns when the job has started again.
    """

    def again() -> bool:
        cluster.hurry(job.id)
        return any(not start.endswith(".0") for start in job.starts)

    until(again, 180)


def batch_node(cluster, job: Job) -> str:
    return re.search(r"BatchHost=(\S+)", cluster.run("scontrol", "show", "job", job.id))[1]


def test_a_finished_job_is_done(start, until):
    job = start("0")
    until(lambda: job.state is State.DONE)
    assert job.events == ["started", "ended"] and job.end["reason"] == "done"
    assert job.starts == [f"{job.id}.0"]
    assert "done" in (job.trial.jobs / f"{job.id}.out").read_text()
    assert json.loads(job.trial.job(job.id).read_text())["scheduler"] == "slurm"


def test_slurm_reads_the_directives_as_they_were_meant(cluster, start, until):
    job = start("hang", slurm={"time": "0:30:00", "extra_args": ["--nice=7"]})
    until(lambda: job.starts)
    shown = cluster.run("scontrol", "show", "job", job.id)
    for words in (
        "NumNodes=2",
        "MinMemoryNode=500M",
        "TimeLimit=00:30:00",
        "Nice=7",
        "Requeue=1",
        f"WorkDir={os.getcwd()}",
        f"StdOut={job.trial.jobs}/{job.id}.out",
        "JobName=hpc-rl.exp.one",
    ):
        assert words in shown
    assert re.search(r"\b(OverSubscribe=OK|Exclusive=NO)\b", shown), "not of its own: 22.05, then 26.05"
    assert 'it\'s "mine" # \\ü' in cluster.run("squeue", "-h", "-j", job.id, "-o", "%k")
    seen = job.scheduler.query_states([job.id, "1"])
    assert seen[job.id].state is State.RUNNING and seen[job.id].nodes and seen["1"].state is State.UNKNOWN
    assert 1500 < job.scheduler.end_time(job.id) - time.time() <= 1800


def test_a_killed_supervisor_starts_again_in_place(start, until):
    job = start("die", "die", "0")
    until(lambda: job.state is State.DONE)
    assert job.starts == [f"{job.id}.0"] * 3
    assert job.events == ["started", "supervisor_killed", "supervisor_killed", "ended"]


def test_a_supervisor_that_is_always_killed_ends_the_job(start, until):
    job = start("die")
    until(lambda: job.state is State.FAILED)
    assert len(job.starts) == 4 and job.end["code"] == 137  # recover.retries is 3


def test_a_stopped_trial_is_requeued_and_goes_on(cluster, start, until):
    job = start("75", "0")
    rerun(cluster, job, until)
    until(lambda: job.state is State.DONE)
    assert job.starts == [f"{job.id}.0", f"{job.id}.1"]
    assert job.events == ["started", "requeued", "started", "ended"]


def test_disabled_is_not_requeued(start, until):
    job = start("75", mode="disabled")
    until(lambda: job.state is State.FAILED)
    assert job.events == ["started", "ended"] and job.end["code"] == 75


def test_a_bad_configuration_is_not_requeued(start, until):
    job = start("78")
    until(lambda: job.state is State.FAILED)
    assert job.end["code"] == 78


def test_a_nudge_stops_the_supervisor_and_the_job_comes_back(cluster, start, until):
    job = start("hang", "0")
    until(lambda: "act hang" in job.log)
    job.scheduler.nudge(job.id)
    rerun(cluster, job, until)
    until(lambda: job.state is State.DONE)
    assert "SIGUSR1" in job.log and len(job.starts) == 2


def test_a_cancelled_trial_stays_dead(start, until):
    job = start("hang")
    until(lambda: "act hang" in job.log)
    job.trial.cancel_intent(job.id).write_text("{}")
    job.scheduler.nudge(job.id)
    until(lambda: not job.state.alive)
    assert job.end["reason"] == "cancelled by the user" and job.end["code"] == 75 and len(job.starts) == 1


def test_scancel_stays_dead(cluster, start, until):
    job = start("hang")
    until(lambda: "act hang" in job.log)
    cluster.run("scancel", job.id)
    until(lambda: not job.state.alive)
    assert job.state is State.CANCELLED and "SIGTERM" in job.log
    assert job.end["cancelled"] and len(job.starts) == 1
    job.scheduler.cancel(job.id)  # of an ended job: no error


def test_a_waiting_job_can_be_cancelled(start, until):
    job = start("0", slurm={"extra_args": ["--hold"]})
    assert job.state is State.PENDING
    job.scheduler.cancel(job.id)
    until(lambda: job.state is State.CANCELLED)
    assert job.starts == []


def test_a_requeue_by_an_administrator_counts_as_a_restart(cluster, start, until):
    job = start("hang", "0")
    until(lambda: "act hang" in job.log)
    cluster.run("scontrol", "requeue", job.id)
    rerun(cluster, job, until)
    until(lambda: job.state is State.DONE)
    assert job.starts == [f"{job.id}.0", f"{job.id}.1"]


def test_a_running_trial_is_not_submitted_twice(start, until):
    job = start("hang")
    until(lambda: job.starts)
    with pytest.raises(TrialBusy, match=f"as job {job.id}"):
        start("0")


def test_a_refusal_is_told_in_sbatch_own_words_and_leaves_nothing(start, tmp_path):
    with pytest.raises(SchedulerError, match="invalid partition"):
        start("0", slurm={"partition": "nowhere"})
    assert not list(tmp_path.rglob("exp"))


def test_the_script_runs_by_plain_sbatch(cluster, start, until):
    first = start("0")
    until(lambda: first.state is State.DONE)
    job_id = cluster.run("sbatch", "--parsable", str(first.trial.scripts / "trial.sbatch")).strip()
    again = Job(first.trial, job_id, first.scheduler)
    until(lambda: again.state is State.DONE)
    assert again.starts[-1] == f"{job_id}.0"
    assert json.loads(first.trial.job(job_id).read_text())["scheduler"] == "slurm"


def test_a_lost_answer_is_looked_up_before_anything_is_submitted_again(
    cluster, start, until, tmp_path, monkeypatch
):
    """sbatch submits, then says that its socket timed out."""
    real = shutil.which("sbatch")
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    lines = [
        "#!/bin/bash",
        f'{real} "$@" >/dev/null',
        "echo 'sbatch: error: Socket timed out' >&2",
        "exit 1",
    ]
    fake.write_text("\n".join(lines) + "\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    job = start("0")
    until(lambda: job.state is State.DONE)
    assert (
        len(cluster.run("squeue", "-h", "-t", "all", "-n", "hpc-rl.exp.one", "-o", "%i %k").splitlines()) >= 1
    )
    assert [path.stem for path in job.trial.jobs.glob("*.json")] == [job.id]


def test_the_death_of_a_watch_with_the_first_node_brings_the_job_back(cluster, start, until, monkeypatch):
    """--no-kill alone would leave the job running without its batch script until the time limit."""
    monkeypatch.setenv("HPC_RL_WATCH_S", "1")
    job = start("hang", "0", n_nodes=3)
    until(lambda: len(list(job.trial.names.glob("watch/*"))) == 2 and not helpers_of(cluster, job))
    first, [near, far] = (
        batch_node(cluster, job),
        [watches(cluster, job)[f"watch-{number}"] for number in (0, 1)],
    )
    assert len({first, near, far}) == 3
    for node in (first, near):
        cluster.kill_node(node)
    until(lambda: job.scheduler.query_states([job.id])[job.id].native == "PENDING", 120)
    cluster.up()
    rerun(cluster, job, until)
    until(lambda: job.state is State.DONE)
    assert job.events == ["started", "first_node_lost", "started", "ended"]
    assert job.starts == [f"{job.id}.0", f"{job.id}.1"]


@pytest.mark.one_host("the processes of a node are found by the files that they hold")
@pytest.mark.parametrize(
    "first",
    ["srun", *(pytest.param(name, marks=pytest.mark.soak) for name in ("slurmstepd", "slurm_script"))],
)
def test_a_first_node_whose_processes_die_one_by_one_brings_the_job_back(
    cluster, start, until, monkeypatch, first
):
    """The helper of an srun ends its step; a slurmstepd that lives reports that the script was killed."""
    monkeypatch.setenv("HPC_RL_WATCH_S", "1")
    job = start("hang", "0", n_nodes=3)
    until(lambda: len(list(job.trial.names.glob("watch/*"))) == 2 and not helpers_of(cluster, job))
    cluster.kill_processes(batch_node(cluster, job), random.Random(1), first=first)
    until(lambda: job.scheduler.query_states([job.id])[job.id].native == "PENDING", 120)
    cluster.up()
    rerun(cluster, job, until)
    until(lambda: job.state is State.DONE)
    begun, lost, *later = (event for event in job.events if event != "supervisor_killed")
    assert (begun, later) == ("started", ["started", "ended"])
    assert lost in {"slurmstepd": ["first_node_lost"], "slurm_script": ["script_killed"]}.get(
        first, ["first_node_lost", "script_killed"]
    )
    assert list(dict.fromkeys(job.starts)) == [f"{job.id}.0", f"{job.id}.1"]


def helpers_of(cluster, job: Job) -> list[int]:
    """Return the processes of srun on the first node whose parent is an srun."""
    node = batch_node(cluster, job)
    sruns = {pid: parent for pid, name, parent in cluster.processes(node) if name == "srun"}
    return [pid for pid, parent in sruns.items() if parent in sruns]


def watches(cluster, job: Job) -> dict[str, str]:
    """Node of each step that watches the first node."""
    lines = cluster.run("squeue", "-h", "-s", "-j", job.id, "-o", "%j %N").splitlines()
    return dict(line.split() for line in lines if line.startswith("watch"))


def test_the_death_of_another_node_leaves_the_job_alone(cluster, start, until):
    job = start("hang")
    until(lambda: "act hang" in job.log)
    [other] = {"n1", "n2"} - {batch_node(cluster, job)}
    cluster.kill_node(other)
    until(lambda: job.scheduler.query_states([job.id])[job.id].nodes != "n[1-2]")
    assert job.state is State.RUNNING and job.events == ["started"]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_time_limit_of_a_stopped_supervisor_requeues_the_job(cluster, start, until):
    """No clean exit at all: the script asks Slurm why the TERM came, and requeues before it is killed
    itself.
    """
    job = start("hang", "0", slurm={"time": "0:01:00"})
    until(lambda: "act hang" in job.log)
    os.kill(json.loads((job.trial.dir / "fake.pid").read_text()), signal.SIGSTOP)
    until(lambda: "requeued" in job.events, 240)
    rerun(cluster, job, until)
    until(lambda: job.state is State.DONE)
    assert job.starts == [f"{job.id}.0", f"{job.id}.1"] and "SIGTERM" not in job.log
    assert job.events == ["started", "requeued", "started", "ended"]
    requeued = next(
        event for event in JsonLines(job.trial.job_state(job.id)).poll() if event["event"] == "requeued"
    )
    # Slurm's CONT before the TERM may let the supervisor follow the early signal after all
    assert requeued.get("reason") == "the time limit" or requeued.get("code") == 75


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_cancel_in_the_last_minute_is_no_time_limit(cluster, start, until):
    job = start("hang", "0", slurm={"time": "0:01:00"})
    until(lambda: "act hang" in job.log)
    time.sleep(50)
    cluster.run("scancel", job.id)
    until(lambda: not job.state.alive)
    time.sleep(60)
    assert not job.state.alive and job.starts == [f"{job.id}.0"]
