"""The local scheduler with the real runner script; the supervisor is a script of few lines."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from job_scripts import RUN_JOB_IN_PYTHON, make_stamp, sft_config, write_programs
from patience import extend, wait_until
from toy_plans import sft_plan

from hpc_rl.core.errors import SchedulerError
from hpc_rl.core.files import JsonLines
from hpc_rl.core.proc import find_start_ticks
from hpc_rl.core.trial import Trial
from hpc_rl.render.scripts import choose_script_name, render
from hpc_rl.schedulers import make_scheduler
from hpc_rl.schedulers.base import JobSpec, State
from hpc_rl.schedulers.local import LocalScheduler

pytestmark = pytest.mark.waits

# a supervisor without CPU time for so long is killed; one that starts needs less
HANG_S = extend(0.4)
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
        time.sleep({4 * HANG_S})
        os.close(os.open(fifo, os.O_WRONLY))
        os._exit(0)
    os.posix_spawn("/bin/true", ["true"], dict(), file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
    sys.exit(0)
elif act == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(act))
"""


class Job:
    """A local job with a fake supervisor."""

    def __init__(self, root: Path, acts: list[str], mode: str = "auto", grace_s: int = 30) -> None:
        self.trial = Trial(root / "a $(touch pwned) 'b' \"c\" ü\\" / "exp" / "one")
        self.trial.make_dirs()
        (self.trial.dir / "acts").write_text("\n".join(acts))
        write_programs(self.trial.dir, {"python": FAKE_PYTHON})
        plan = sft_plan([], str(self.trial.dir / "python"), recover_mode=mode)
        stamp = make_stamp(root, command=["x\ny"], start_mode=mode)
        write_programs(self.trial.scripts, render(sft_config(), plan, self.trial, stamp, "local"))
        name = choose_script_name("local")
        self.scheduler = LocalScheduler(self.trial, grace_s)
        self.id = self.scheduler.submit(JobSpec("job", self.trial.scripts / name, "t"))

    @property
    def state(self) -> State:
        return self.scheduler.query_states([self.id])[self.id].state

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

    def until(self, condition) -> None:
        out = self.trial.jobs / f"{self.id}.out"
        wait_until(condition, said=lambda: (self.state, self.log, out.read_text()))

    def until_it_runs(self) -> int:
        """Return the process id of the supervisor."""
        self.until(lambda: self.starts)
        return int(self.log[0][2])

    def until_it_ended(self) -> None:
        self.until(lambda: not self.state.alive)

    @property
    def runner_pid(self) -> int:
        return JsonLines(self.trial.job_state(self.id)).poll()[0]["pid"]


@pytest.fixture
def start(tmp_path):
    jobs: list[Job] = []

    def start(*acts: str, **options) -> Job:
        jobs.append(Job(tmp_path, list(acts), **options))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.state is State.RUNNING:
            os.killpg(job.runner_pid, signal.SIGKILL)
    assert not list(tmp_path.rglob("pwned"))


AGAIN = ["started", "requeued"]


@pytest.mark.parametrize(
    ("acts", "mode", "state", "starts", "events", "code"),
    [
        (["0"], "auto", State.DONE, 1, ["started", "ended"], 0),
        (["75", "75", "0"], "auto", State.DONE, 3, [*AGAIN, *AGAIN, "started", "ended"], 0),
        (["75"], "disabled", State.FAILED, 1, ["started", "ended"], 75),
        (["78"], "auto", State.FAILED, 1, ["started", "ended"], 78),
        (["70"], "auto", State.FAILED, 1, ["started", "ended"], 70),
    ],
    ids=["done", "stopped starts again", "stopped, disabled", "bad configuration", "failed"],
)
def test_what_is_started_again_and_what_is_not(start, acts, mode, state, starts, events, code):
    job = start(*acts, mode=mode)
    job.until_it_ended()
    assert (job.state, job.events, job.end["code"]) == (state, events, code)
    assert job.starts == [f".{number}" for number in range(starts)]
    assert job.id.startswith("local-") and (job.trial.jobs / f"{job.id}.json").exists()


def test_a_killed_supervisor_starts_again_in_place_recover_retries_times(start):
    job = start("die")
    job.until_it_ended()
    assert job.state is State.FAILED and job.starts == [".0"] * 4 and job.end["code"] == 137


def test_cancel_stays_dead(start):
    job = start("hang")
    job.until_it_runs()
    assert job.state is State.RUNNING
    job.scheduler.cancel(job.id)
    job.until_it_ended()
    assert job.state is State.CANCELLED and ["SIGTERM"] in job.log
    assert job.starts == [".0"] and job.end["code"] == 75
    job.scheduler.cancel(job.id)
    job.scheduler.nudge(job.id)


def test_what_does_not_hear_is_killed_after_the_grace(start):
    job = start("deaf", grace_s=1)
    supervisor = job.until_it_runs()
    job.scheduler.cancel(job.id)
    job.until_it_ended()
    job.until(lambda: find_start_ticks(supervisor) is None)
    assert job.starts == [".0"] and job.events == ["started"]


def test_a_nudge_with_a_cancel_intent_stays_dead(start):
    job = start("hang")
    job.until_it_runs()
    job.trial.cancel_intent(job.id).write_text("{}")
    job.scheduler.nudge(job.id)
    job.until_it_ended()
    assert job.state is State.CANCELLED and ["SIGUSR1"] in job.log
    assert job.end["reason"] == "cancelled by the user"


def test_a_nudge_alone_is_a_restart(start):
    job = start("hang", "0")
    job.until_it_runs()
    job.scheduler.nudge(job.id)
    job.until(lambda: job.state is State.DONE)
    assert job.starts == [".0", ".1"]


def test_a_killed_runner_is_seen(start):
    job = start("hang")
    job.until_it_runs()
    os.killpg(job.runner_pid, signal.SIGKILL)
    job.until(lambda: job.state is State.FAILED)


def test_a_supervisor_that_outlived_its_runner_is_seen_and_reached(start):
    job = start("hang")
    supervisor = job.until_it_runs()
    processes = job.trial.attempt(f"{job.id}.0").processes
    processes.mkdir(parents=True)
    mine = {"pid": supervisor, "start_ticks": find_start_ticks(supervisor), "host": os.uname().nodename}
    (processes / "supervisor-0.0-rank0.json").write_text(json.dumps(mine))
    os.kill(job.runner_pid, signal.SIGKILL)
    job.until(lambda: job.scheduler.query_states([job.id])[job.id].native == "orphaned")
    assert job.state is State.RUNNING
    job.scheduler.nudge(job.id)
    job.until(lambda: job.state is State.FAILED)
    assert job.log[-1] == ["SIGUSR1"]


def test_a_later_process_with_the_same_pid_is_not_the_runner(fake_trial):
    event = {
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "start_ticks": find_start_ticks(os.getpid()) - 1,
    }
    fake_trial.script_said("local-1", "started", **event)
    scheduler = make_scheduler("local", fake_trial.trial)
    assert scheduler.query_states(["local-1"])["local-1"].state is State.FAILED
    scheduler.cancel("local-1")  # and this process lives on


def test_a_job_of_another_host_is_not_judged(fake_trial):
    fake_trial.script_said("local-1", "started", host="elsewhere", pid=1, start_ticks=1)
    scheduler = make_scheduler("local", fake_trial.trial)
    assert scheduler.query_states(["local-1", "local-2"])["local-1"].state is State.UNKNOWN
    with pytest.raises(SchedulerError, match="elsewhere"):
        scheduler.cancel("local-1")


@pytest.fixture
def elsewhere(fake_trial, tmp_path, monkeypatch):
    """`elsewhere(says)`: the scheduler of a trial that `run` holds on another host, where squeue says so."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fake_trial.script_said("7-abc", "started", host="elsewhere", pid=1, start_ticks=1)

    def make(says: str):
        programs = {"squeue": says, "scontrol": "", "sacct": ""}
        write_programs(tmp_path, {name: f"#!/bin/bash\n{text}\n" for name, text in programs.items()})
        return make_scheduler("allocation", fake_trial.trial)

    return make


@pytest.mark.parametrize(("listed", "state"), [("7", State.RUNNING), ("8", State.FAILED)])
def test_a_trial_that_run_holds_elsewhere_is_busy_as_long_as_its_slurm_job_lives(elsewhere, listed, state):
    scheduler = elsewhere(f"echo '{listed}|RUNNING|None|N/A|n1|N/A'")
    assert scheduler.query_states(["7-abc"])["7-abc"].state is state
    scheduler.nudge("7-abc")  # its supervisor reads the request
    if state is State.RUNNING:
        with pytest.raises(SchedulerError, match="elsewhere"):
            scheduler.cancel("7-abc")


def test_a_trial_that_run_holds_elsewhere_is_not_judged_without_slurm(elsewhere):
    scheduler = elsewhere("echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SchedulerError, match="controller"):
        scheduler.query_states(["7-abc"])


@pytest.mark.parametrize(
    ("acts", "between"),
    [(["waits"], []), (["hang", "0"], ["supervisor_killed"])],
    ids=["waits for a device", "is idle"],
)
def test_a_supervisor_that_does_nothing_is_started_again_unless_a_device_is_waited_for(
    start, monkeypatch, acts, between
):
    monkeypatch.setenv("HPC_RL_SUPERVISOR_HANG_S", str(HANG_S))
    job = start(*acts)
    job.until_it_ended()
    assert job.state is State.DONE and job.events == ["started", *between, "ended"]
