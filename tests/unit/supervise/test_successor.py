"""A successor is submitted exactly once, whatever dies in between, and never for a cancelled submission."""

import pytest

from hpc_rl.core.errors import TrialBusy
from hpc_rl.core.records import find_newest_job
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.schedulers.base import JobSpec, JobState, State
from hpc_rl.status.submitted_jobs import load_jobs
from hpc_rl.supervise.successor import submit_successor
from hpc_rl.trials.cancellation import cancel


class FakeSlurm:
    """Knows the jobs that were submitted, by tag."""

    name = "slurm"

    def __init__(self) -> None:
        self.jobs: dict[str, JobSpec] = {}
        self.cancelled: list[str] = []
        self.after_submit = lambda: None

    def find(self, spec: JobSpec) -> str | None:
        return next((job_id for job_id, one in self.jobs.items() if one.tag == spec.tag), None)

    def submit(self, spec: JobSpec) -> str:
        job_id = str(200 + len(self.jobs))
        self.jobs[job_id] = spec
        self.after_submit()
        return job_id

    def cancel(self, *job_ids: str) -> None:
        self.cancelled += job_ids


@pytest.fixture
def trial(trial) -> Trial:
    write_json(trial.job("100"), {"job_id": "100", "scheduler": "slurm", "time": 1.0, "tag": "t"})
    return trial


def call(trial: Trial, slurm: FakeSlurm, restart: int = 1, after: str = "100", **more) -> str:
    script = trial.scripts / "trial.sbatch"
    return submit_successor(
        trial, "100", restart, after=after, name="hpc-rl.exp.one", script=script, scheduler=slurm, **more
    )


def test_a_successor_depends_on_the_job_that_it_continues(trial):
    slurm = FakeSlurm()
    assert call(trial, slurm) == "200"
    spec = slurm.jobs["200"]
    assert (spec.arguments, spec.tag) == (("100", "1"), "hpc-rl:exp/one:100.1")
    assert spec.options == ("--dependency=afterany:100", "--comment=hpc-rl:exp/one:100.1")
    assert find_newest_job(trial, "100") == "200"
    assert call(trial, slurm, restart=2, after="200") == "201"
    assert "--dependency=afterany:200" in slurm.jobs["201"].options
    [job] = load_jobs(trial)
    assert (job.job_id, job.native_id) == ("100", "201"), "one submission, however many jobs it takes"


def test_it_keeps_the_users_comment_and_carries_its_own_tag(trial):
    slurm = FakeSlurm()
    write_json(trial.config_json, {"launcher": {"slurm": {"comment": "project:42 urgent"}}})
    call(trial, slurm)
    assert "--comment=hpc-rl:exp/one:100.1 project:42 urgent" in slurm.jobs["200"].options


def test_again_gives_the_same_job_also_after_a_crash_between_submission_and_record(trial):
    slurm = FakeSlurm()
    assert [call(trial, slurm) for _ in range(3)] == ["200"] * 3
    trial.successor("100", 1).unlink()
    assert call(trial, slurm) == "200"
    assert len(slurm.jobs) == 1 and find_newest_job(trial, "100") == "200"


def test_of_two_that_submit_at_once_one_job_stays(trial):
    slurm, other = FakeSlurm(), FakeSlurm()
    slurm.after_submit = lambda: call(trial, other)
    other.jobs["199"] = JobSpec("x", trial.scripts, "another")
    assert call(trial, slurm) == "201"
    assert slurm.cancelled == ["200"]


def test_never_after_a_cancel(trial):
    slurm = FakeSlurm()
    write_json(trial.cancel_intent("100"), {})
    with pytest.raises(TrialBusy, match="cancelled by its user"):
        call(trial, slurm)
    assert not slurm.jobs


def test_a_cancel_while_it_is_submitted_takes_it_back(trial):
    slurm = FakeSlurm()
    slurm.after_submit = lambda: write_json(trial.cancel_intent("100"), {})
    with pytest.raises(TrialBusy):
        call(trial, slurm)
    assert slurm.cancelled == ["200"]


def test_a_task_of_an_array_goes_on_alone(trial):
    slurm = FakeSlurm()
    of_task = {"options": ("--array=3",), "arguments": ("100",), "script": trial.scripts / "servers.sbatch"}
    submit_successor(trial, "150_3", 2, after="153", name="n", scheduler=slurm, **of_task)
    spec = slurm.jobs["200"]
    assert (spec.options[-1], spec.arguments) == ("--array=3", ("150_3", "2", "100"))
    assert [job.job_id for job in load_jobs(trial)] == ["100"]


def test_cancel_reaches_the_newest_job_and_the_servers(trial, monkeypatch):
    slurm = FakeSlurm()
    call(trial, slurm)
    servers = {"kind": "servers", "serves": "100", "num_tasks": 2, "scheduler": "slurm", "time": 2.0}
    write_json(trial.job("150"), servers)
    trial.successor("150_1", 1).write_text('{"job_id": "300"}')
    slurm.query_states = lambda ids, **_: {job: JobState(job, State.PENDING) for job in ids}
    monkeypatch.setattr("hpc_rl.trials.cancellation.make_job_scheduler", lambda *_: slurm)
    done = cancel(trial)
    assert set(slurm.cancelled) == {"200", "150", "300"}
    assert [item.job.job_id for item in done] == ["150", "100"]
    assert trial.cancel_intent("100").exists()
