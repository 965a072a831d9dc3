"""The local scheduler with the real runner script; the supervisor is a script of few lines."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from job_scripts import RUN_JOB_IN_PYTHON
from patience import extend
from toy_plans import sft_plan

from hpc_rl.config.load.stored import from_dict
from hpc_rl.core.errors import SchedulerError
from hpc_rl.core.files import JsonLines
from hpc_rl.core.proc import start_ticks
from hpc_rl.core.trial import Trial
from hpc_rl.render.scripts import Stamp, render, script_name
from hpc_rl.schedulers import make_scheduler
from hpc_rl.schedulers.base import JobSpec, State
from hpc_rl.schedulers.local import LocalScheduler

# Start number n does line n of `acts` (the last line again and again) and notes signals.
FAKE_PYTHON = f"""#!{sys.executable} -S
{RUN_JOB_IN_PYTHON}
import os, signal, sys, time
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
log = open(options["--trial_dir"] + "/fake.log", "a", buffering=1)
def stop(number, frame):
    print(signal.Signals(number).name, file=log)
    sys.exit(75)
acts = open(options["--trial_dir"] + "/acts").read().split()
n = sum(line.startswith("start") for line in open(log.name)) + 1
act = acts[min(n, len(acts)) - 1]
if act != "deaf":
    signal.signal(signal.SIGTERM, stop)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
print("start", options["--attempt"], os.getpid(), file=log)
if act in ("hang", "deaf"):
    time.sleep(100)
elif act == "waits":  # in state D, as a process whose file server has failed over: until the fifo is open
    fifo = options["--trial_dir"] + "/fifo"
    os.mkfifo(fifo)
    if os.fork() == 0:
        time.sleep(4)
        os.close(os.open(fifo, os.O_WRONLY))
        os._exit(0)
    os.posix_spawn("/bin/true", ["true"], dict(), file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
    sys.exit(0)
elif act == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(act))
"""


class Job:
    """A local job whose supervisor is the fake."""

    def __init__(self, root: Path, acts: list[str], mode: str = "auto", grace_s: int = 30) -> None:
        self.trial = Trial(root / "a $(touch pwned) 'b' \"c\" ü\\" / "exp" / "one")
        self.trial.make_dirs()
        (self.trial.dir / "acts").write_text("\n".join(acts))
        python = self.trial.dir / "python"
        python.write_text(FAKE_PYTHON)
        python.chmod(0o755)
        plan = sft_plan([], str(python), recover_mode=mode)
        config = from_dict(
            {
                "experiment_name": "exp",
                "trial_name": "one",
                "train_dataset": {"path": "/d"},
                "model": {"path": "/m"},
            }
        )
        stamp = Stamp(
            version="1",
            config_sha256="0",
            command=["x\ny"],
            tag="t",
            wheel="w.zip",
            workdir=root,
            start_mode=mode,
        )
        for name, text in render(config, plan, self.trial, stamp, "local").items():
            (self.trial.scripts / name).write_text(text)
        name = script_name("local")
        self.scheduler = LocalScheduler(self.trial, grace_s)
        self.id = self.scheduler.submit(JobSpec("job", self.trial.scripts / name, "t"))

    @property
    def state(self) -> State:
        return self.scheduler.states([self.id])[self.id].state

    @property
    def log(self) -> list[list[str]]:
        path = self.trial.dir / "fake.log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def starts(self) -> list[str]:
        return [words[1].removeprefix(self.id) for words in self.log if words[0] == "start"]

    @property
    def events(self) -> list[str]:
        return [event["event"] for event in JsonLines(self.trial.job_state(self.id)).poll()]

    @property
    def end(self) -> dict:
        return JsonLines(self.trial.job_state(self.id)).poll()[-1]

    def until(self, condition, timeout_s: float = 20) -> None:
        deadline = time.monotonic() + extend(timeout_s)
        while not condition():
            assert time.monotonic() < deadline, (
                self.state,
                self.log,
                (self.trial.jobs / f"{self.id}.out").read_text(),
            )
            time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    jobs: list[Job] = []

    def start(*acts: str, **options) -> Job:
        jobs.append(Job(tmp_path, list(acts), **options))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.state is State.RUNNING:
            pid = JsonLines(job.trial.job_state(job.id)).poll()[0]["pid"]
            os.killpg(pid, signal.SIGKILL)
    assert not list(tmp_path.rglob("pwned"))


def test_done(start):
    job = start("0")
    job.until(lambda: not job.state.alive)
    assert job.state is State.DONE and job.events == ["started", "ended"] and job.starts == [".0"]
    assert job.id.startswith("local-") and (job.trial.jobs / f"{job.id}.json").exists()


def test_stopped_starts_again_and_counts(start):
    job = start("75", "75", "0")
    job.until(lambda: job.state is State.DONE)
    assert job.starts == [".0", ".1", ".2"]
    assert job.events == ["started", "requeued", "started", "requeued", "started", "ended"]


def test_a_killed_supervisor_starts_again_in_place_recover_retries_times(start):
    job = start("die")
    job.until(lambda: not job.state.alive)
    assert job.state is State.FAILED and job.starts == [".0"] * 4 and job.end["code"] == 137


@pytest.mark.parametrize(("mode", "act"), [("disabled", "75"), ("auto", "78"), ("auto", "70")])
def test_what_is_not_started_again(start, mode, act):
    job = start(act, mode=mode)
    job.until(lambda: not job.state.alive)
    assert job.state is State.FAILED and job.starts == [".0"] and job.end["code"] == int(act)


def test_cancel_stays_dead(start):
    job = start("hang")
    job.until(lambda: job.starts)
    assert job.state is State.RUNNING
    job.scheduler.cancel(job.id)
    job.until(lambda: not job.state.alive)
    assert (
        job.state is State.CANCELLED
        and ["SIGTERM"] in job.log
        and job.starts == [".0"]
        and job.end["code"] == 75
    )
    job.scheduler.cancel(job.id)
    job.scheduler.nudge(job.id)


def test_what_does_not_hear_is_killed_after_the_grace(start):
    job = start("deaf", grace_s=1)
    job.until(lambda: job.starts)
    supervisor = int(job.log[0][2])
    job.scheduler.cancel(job.id)
    job.until(lambda: not job.state.alive)
    job.until(lambda: start_ticks(supervisor) is None)
    assert job.starts == [".0"] and job.events == ["started"]


def test_a_nudge_with_a_cancel_intent_stays_dead(start):
    job = start("hang")
    job.until(lambda: job.starts)
    job.trial.cancel_intent(job.id).write_text("{}")
    job.scheduler.nudge(job.id)
    job.until(lambda: not job.state.alive)
    assert (
        job.state is State.CANCELLED
        and ["SIGUSR1"] in job.log
        and job.end["reason"] == "cancelled by the user"
    )


def test_a_nudge_alone_is_a_restart(start):
    job = start("hang", "0")
    job.until(lambda: job.starts)
    job.scheduler.nudge(job.id)
    job.until(lambda: job.state is State.DONE)
    assert job.starts == [".0", ".1"]


def test_a_killed_runner_is_seen(start):
    job = start("hang")
    job.until(lambda: job.starts)
    os.killpg(JsonLines(job.trial.job_state(job.id)).poll()[0]["pid"], signal.SIGKILL)
    job.until(lambda: job.state is State.FAILED)


def test_a_supervisor_that_outlived_its_runner_is_seen_and_reached(start):
    job = start("hang")
    job.until(lambda: job.starts)
    supervisor = int(job.log[0][2])
    processes = job.trial.attempt(f"{job.id}.0").processes
    processes.mkdir(parents=True)
    mine = {"pid": supervisor, "start_ticks": start_ticks(supervisor), "host": os.uname().nodename}
    (processes / "supervisor-0.0-rank0.json").write_text(json.dumps(mine))
    os.kill(JsonLines(job.trial.job_state(job.id)).poll()[0]["pid"], signal.SIGKILL)
    job.until(lambda: job.scheduler.states([job.id])[job.id].native == "orphaned")
    assert job.state is State.RUNNING
    job.scheduler.nudge(job.id)
    job.until(lambda: job.state is State.FAILED)
    assert job.log[-1] == ["SIGUSR1"]


def test_a_later_process_with_the_same_pid_is_not_the_runner(fake_trial):
    event = {"host": os.uname().nodename, "pid": os.getpid(), "start_ticks": start_ticks(os.getpid()) - 1}
    fake_trial.script_said("local-1", "started", **event)
    scheduler = make_scheduler("local", fake_trial.trial)
    assert scheduler.states(["local-1"])["local-1"].state is State.FAILED
    scheduler.cancel("local-1")  # and this process lives on


def test_a_job_of_another_host_is_not_judged(fake_trial):
    fake_trial.script_said("local-1", "started", host="elsewhere", pid=1, start_ticks=1)
    scheduler = make_scheduler("local", fake_trial.trial)
    assert scheduler.states(["local-1", "local-2"])["local-1"].state is State.UNKNOWN
    with pytest.raises(SchedulerError, match="elsewhere"):
        scheduler.cancel("local-1")


@pytest.mark.parametrize(("listed", "state"), [("7", State.RUNNING), ("8", State.FAILED)])
def test_a_trial_that_run_holds_elsewhere_is_busy_as_long_as_its_slurm_job_lives(
    fake_trial, tmp_path, monkeypatch, listed, state
):
    for name, says in (
        ("squeue", f"echo '{listed}|RUNNING|None|N/A|n1|N/A'"),
        ("scontrol", ""),
        ("sacct", ""),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fake_trial.script_said("7-abc", "started", host="elsewhere", pid=1, start_ticks=1)
    scheduler = make_scheduler("allocation", fake_trial.trial)
    assert scheduler.states(["7-abc"])["7-abc"].state is state
    scheduler.nudge("7-abc")  # its supervisor reads the request
    if state is State.RUNNING:
        with pytest.raises(SchedulerError, match="elsewhere"):
            scheduler.cancel("7-abc")


def test_a_trial_that_run_holds_elsewhere_is_not_judged_without_slurm(fake_trial, tmp_path, monkeypatch):
    (tmp_path / "squeue").write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fake_trial.script_said("7-abc", "started", host="elsewhere", pid=1, start_ticks=1)
    with pytest.raises(SchedulerError, match="controller"):
        make_scheduler("allocation", fake_trial.trial).states(["7-abc"])


def test_a_supervisor_that_waits_for_a_device_is_left_alone(start, monkeypatch):
    monkeypatch.setenv("HPC_RL_SUPERVISOR_HANG_S", "1")
    job = start("waits")
    job.until(lambda: not job.state.alive, 60)
    assert job.state is State.DONE and job.events == ["started", "ended"]


def test_a_supervisor_that_is_idle_too_long_is_started_again(start, monkeypatch):
    monkeypatch.setenv("HPC_RL_SUPERVISOR_HANG_S", "1")
    job = start("hang", "0")
    job.until(lambda: not job.state.alive, 60)
    assert job.state is State.DONE and job.events == ["started", "supervisor_killed", "ended"]
