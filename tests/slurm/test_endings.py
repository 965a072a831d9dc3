"""How a job can end, on a real Slurm with the rendered script, the real supervisor and roles of a few lines:
each end follows the table of failures, and the story of the trial says in words what happened.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from cluster import Cluster, speak_to
from supervised import HERE, unit
from toy_plans import sft_plan

from hpc_rl.config.load.load import Loaded
from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.errors import TrialBusy
from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial, load_json, write_json
from hpc_rl.schedulers.base import JobSpec, State
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.schedulers.submitit import SubmititScheduler
from hpc_rl.status.scheduler_view import query
from hpc_rl.status.trial_status import TrialStatus, load_status
from hpc_rl.supervise import bad_nodes
from hpc_rl.trials.cancellation import CancelOutcome, cancel
from hpc_rl.trials.submission import check_idle, submit

pytestmark = pytest.mark.timeout(400)
UNITS = [unit("server", nodes=(0,)), unit("trainer", nodes=(1,))]


@dataclass
class Job:
    """A submitted trial with fake roles."""

    cluster: Cluster
    trial: Trial
    id: str
    scheduler: SlurmScheduler

    @property
    def state(self) -> State:
        return self.scheduler.query_states([self.id])[self.id].state

    @property
    def story(self) -> TrialStatus:
        return load_status(self.trial, self.scheduler.query_states([self.id])[self.id])

    def events(self, event: str, restart: int = 0) -> list[dict]:
        rows = JsonLines(self.trial.attempt(f"{self.id}.{restart}").events).poll()
        return [row for row in rows if row["event"] == event]

    def ended(self, restart: int = 0) -> dict | None:
        return load_json(self.trial.attempt(f"{self.id}.{restart}").ended)

    def is_up(self, restart: int = 0) -> bool:
        """Every role has said so itself."""
        folder = self.trial.attempt(f"{self.id}.{restart}").processes
        return {"server", "trainer"} <= {path.name.split("-")[0] for path in folder.glob("*.json")}

    def shown(self) -> str:
        return self.cluster.run("scontrol", "show", "job", "-o", self.id)

    def hurry(self) -> bool:
        """Spare a requeued job Slurm's two minutes; true once it has started again."""
        self.cluster.hurry(self.id)
        return any(
            event["event"] == "started" and event["restart"] == 1
            for event in JsonLines(self.trial.job_state(self.id)).poll()
        )

    def said(self) -> str:
        return (self.trial.jobs / f"{self.id}.out").read_text()[-5000:]


class _WithScript:
    """Puts what the fake roles do into the trial directory before the job can start."""

    name = "slurm"

    def __init__(self, inner: SlurmScheduler, trial: Trial, script: dict) -> None:
        self.inner, self.trial, self.script = inner, trial, script

    def submit(self, spec: JobSpec) -> str:
        write_json(self.trial.dir / "script.json", {"total": 3, "server": ["serve"], **self.script})
        return self.inner.submit(spec)


@pytest.fixture
def start(cluster, tmp_path, monkeypatch) -> Callable[..., Job]:
    return lambda **script: submit_to(cluster, tmp_path, monkeypatch, script)


def submit_to(
    cluster: Cluster,
    folder: Path,
    monkeypatch,
    script: dict,
    slurm: dict | None = None,
    hooks: dict | None = None,
) -> Job:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.chdir(HERE)  # the roles import the fakes from the directory of the submission
    data = {
        "experiment_name": "exp",
        "trial_name": "one",
        "cluster": {"fileroot": str(folder)},
        "train_dataset": {"path": str(HERE)},
        "model": {"path": str(HERE)},
        "recover": {"mode": "auto"},
        "launcher": {"type": "slurm", "slurm": slurm or {}, "hooks": hooks or {}},
    }
    plan = sft_plan(UNITS, sys.executable, n_nodes=2, cpus_per_node=4, mem_mb_per_node=1000)
    trial = Trial.of(folder, "me", "exp", "one")
    scheduler = SlurmScheduler(retry_wait_s=0.1)
    ours = _WithScript(scheduler, trial, script)
    through_submitit = _WithScript(SubmititScheduler(), trial, script)
    monkeypatch.setattr("hpc_rl.trials.submission.SubmititScheduler", lambda: through_submitit)
    made = submit(
        Loaded(from_dict(data), {}), plan, command=["hpc-rl", "submit"], trial=trial, scheduler=ours
    )
    return Job(cluster, trial, made.job_id, scheduler)


TELL = '#!/bin/bash\necho "$HPC_RL_HOOK of $HPC_RL_ATTEMPT" >>"$HPC_RL_TRIAL_DIR"/told\n'


def test_a_preempted_trial_comes_back_by_itself_and_saves_first(cluster, tmp_path, monkeypatch, until):
    job = submit_to(
        cluster, tmp_path, monkeypatch, {"trainer": ["serve", "train"]}, hooks={"on_preempt": TELL}
    )
    until(job.is_up)
    high = cluster.run(
        "sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"
    ).strip()
    until(lambda: job.scheduler.query_states([high])[high].state is State.DONE)
    until(
        lambda: (
            JsonLines(job.trial.job_state(job.id)).poll()[-1]["event"] == "ended"
            and job.state is State.PENDING
        ),
        60,
    )
    until(
        lambda: (
            load_status(job.trial, query(job.trial, newer_than=time.time() - 1).newest, time.time()).state
            == "pending"
        ),
        60,
    )
    with pytest.raises(TrialBusy, match=f"is pending as job {job.id}"):
        check_idle(job.trial)
    until(job.hurry, 180)
    until(lambda: job.state is State.DONE)
    story = job.story
    assert story.state == "done" and [one.state for one in story.attempts][-1] == "done", job.said()
    assert "SIGTERM" in story.attempts[0].cause and "preemption" in story.attempts[0].cause
    assert len(JsonLines(job.trial.job_state(job.id)).poll()) >= 3
    assert (job.trial.dir / "told").read_text() == f"on_preempt of {job.id}.0\n"


def test_a_trainer_whose_node_dies_goes_on_elsewhere(cluster, start, until):
    job = start(trainer=["serve", "train"])
    until(job.is_up)
    hosts = [f"n{number}" for number in range(1, 5) if f"n{number}" in expanded(cluster, job)]
    doomed = hosts[1]
    cluster.kill_node(doomed)
    until(lambda: job.ended() is not None)
    assert job.ended()["exit_code"] == 75 and "lost its node" in job.ended()["reason"], job.said()
    assert job.events("exited")[0]["class"] == "node"
    assert list(bad_nodes.find_bad_nodes(job.trial, time.time())) == [doomed]
    until(lambda: "ExcNodeList=(null)" not in job.shown())
    assert re.search(rf"ExcNodeList={doomed}\b", job.shown())
    until(job.hurry, 180)
    until(lambda: job.state is State.DONE)
    story = job.story
    assert story.state == "done" and doomed not in expanded(cluster, job)
    assert "other nodes are needed" in story.attempts[0].cause


def expanded(cluster: Cluster, job: Job) -> list[str]:
    return cluster.run(
        "scontrol", "show", "hostnames", job.scheduler.query_states([job.id])[job.id].nodes
    ).split()


def test_a_plain_scancel_stays_dead_and_is_told(cluster, start, until):
    job = start(trainer=["serve"])
    until(job.is_up)
    cluster.run("scancel", job.id)
    until(lambda: not job.state.alive)
    time.sleep(2)
    assert job.state is State.CANCELLED and "Restarts=0" in job.shown(), job.said()
    story = job.story
    assert story.state != "done" and story.over
    assert "SIGTERM from the scheduler: a cancel" in story.reason or "CANCELLED" in story.reason


def test_cancel_saves_first_where_submitit_submitted(cluster, tmp_path, monkeypatch, until):
    """The nudge of `hpc-rl cancel` goes to the batch shell, which is submitit's: it must neither die of it,
    nor start again.
    """
    pytest.importorskip("submitit")
    slurm = {"backend": "submitit", "time": "0:30:00"}
    job = submit_to(
        cluster, tmp_path, monkeypatch, {"trainer": ["save 8"]}, slurm
    )  # longer than Slurm waits after a TERM
    until(job.is_up)
    assert [one.outcome for one in cancel(job.trial)] == [CancelOutcome.DRAINING]
    until(lambda: not job.state.alive)
    assert [row["code"] for row in job.events("exited") if row["role"] == "trainer"] == [75], job.said()
    last = JsonLines(job.trial.job_state(job.id)).poll()[-1]
    assert (last["event"], last["reason"]) == ("ended", "cancelled by the user")
    assert "Restarts=0" in job.shown() and job.story.state == "cancelled"


@pytest.fixture
def memory_cluster(running_cluster, tmp_path_factory, monkeypatch) -> Iterator[Cluster]:
    """A cluster that measures the memory of steps, and kills those that use more than they have."""
    gather = "JobAcctGatherType=jobacct_gather/linux\nJobAcctGatherFrequency=task=1\nJobAcctGatherParams=OverMemoryKill\n"
    with Cluster.private(running_cluster.slurm, 2, extra_conf=gather, without=("JobAcctGather",)) as one:
        speak_to(one, monkeypatch)
        yield one


def test_a_step_killed_for_memory_says_so_though_the_job_does_not(
    memory_cluster, tmp_path, monkeypatch, until
):
    job = submit_to(memory_cluster, tmp_path, monkeypatch, {"trainer": ["eat"]})
    until(lambda: job.ended() is not None, 120)
    ends = [row for row in job.events("exited") if row["role"] == "trainer"]
    assert {row["class"] for row in ends} == {"out of memory"}, job.said()
    assert "exceeded" in ends[0]["reason"] and "memory limit" in ends[0]["reason"]
    until(lambda: not job.state.alive)
    assert "too much memory" in job.story.reason
    if memory_cluster.slurm.version >= (26,) and job.ended()["exit_code"] == 75:
        return  # this version may end the whole job with the step
    assert len(ends) == 2, job.said()
    assert job.ended()["exit_code"] == 70 and "give it more memory" in job.ended()["reason"]
    assert job.state is State.FAILED, "Slurm itself never says OUT_OF_MEMORY here"
    assert job.story.state == "failed"
