"""How the batch script continues: Slurm's programs and the supervisor note their calls, and wait
where the test says so. A cancel must count whenever it comes."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from job_scripts import RUN_JOB, write_programs
from patience import extend, wait_until

from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial

PROGRAM = """#!/bin/bash
{first}
echo "{name} $*" >>"$HERE/calls"
if [[ -e $HERE/waits && "{name} $*" == $(cat "$HERE/waits") ]]; then while [[ ! -e $HERE/go ]]; do read -rt 0.05 <> <(:); done; fi
{does}
"""
DOES = {
    "sinfo": "printf 'n%d\\n' 1 2 3 4",
    "scancel": "",
    "scontrol": 'case $1 in hostnames | show) if [[ $2 == job ]]; then cat "$HERE/reason"; else echo "$3"; fi ;; '
    'requeue) exit "$(cat "$HERE/refuses")" ;; esac',
    "python": 'if [[ $* == *roles.submit_again* ]]; then cat "$HERE/next" && [[ -s $HERE/next ]]; else exit "$(cat "$HERE/code")"; fi',
}


@dataclass
class Script:
    """The batch script of job 7, which its supervisor ends with code 75."""

    here: Path
    trial: Trial
    environ: dict[str, str]
    written: Callable[..., Path]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, waits: str = "", refuses: bool = False, reason: str = "None", next_job: str = "8", **slurm
    ) -> subprocess.Popen[bytes]:
        first = {"python": RUN_JOB}
        texts = {name: PROGRAM.format(first=first.get(name, ""), name=name, does=DOES[name]) for name in DOES}
        write_programs(self.here, texts)
        answers = {
            "code": "75",
            "refuses": str(int(refuses)),
            "reason": f" Reason={reason} ",
            "next": next_job,
        }
        answers |= {"waits": f"*{waits}*"} if waits else {}
        for name, text in answers.items():
            (self.here / name).write_text(text)
        script = self.written("slurm", self.here / "python", **slurm)
        (self.trial.jobs / "7.exclude").write_text("n9")
        env = self.environ | {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_PARTITION": "main"}
        with (self.here / "said").open("wb") as said:
            own = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said, "start_new_session": True}
            self.processes.append(subprocess.Popen(["bash", str(script)], env=env, **own))
        return self.processes[-1]

    def called(self, words: str) -> list[str]:
        calls = self.here / "calls"
        return [line for line in calls.read_text().splitlines() if words in line] if calls.exists() else []

    def wait_for_call(self, words: str) -> None:
        wait_until(lambda: self.called(words), said=self.said)

    def tell_to_end_in(self, process: subprocess.Popen[bytes], words: str) -> None:
        """Send TERM to every process, like Slurm, during that call."""
        self.wait_for_call(words)
        os.killpg(process.pid, signal.SIGTERM)
        (self.here / "go").touch()
        process.wait(extend(60))

    def last(self) -> dict:
        return JsonLines(self.trial.job_state("7")).poll()[-1]

    def said(self) -> str:
        return (self.here / "said").read_text()


@pytest.fixture
def job(written, job_environ, trial, tmp_path) -> Iterator[Script]:
    made = Script(tmp_path, trial, job_environ, written)
    yield made
    (tmp_path / "go").touch()
    for process in made.processes:
        process.kill()
        process.wait()


def test_a_cancel_while_the_nodes_are_counted_ends_it(job):
    job.tell_to_end_in(job.start(waits="sinfo"), "sinfo")
    assert not job.called("scontrol requeue") and not job.called("roles.submit_again"), job.said()
    end = job.last()
    assert (end["event"], end["reason"], end["cancelled"]) == ("ended", "stopped by a signal", True)


def test_the_time_limit_at_that_moment_does_not(job):
    job.tell_to_end_in(job.start(waits="sinfo", reason="TimeLimit"), "sinfo")
    assert job.called("scontrol requeue") == ["scontrol requeue 7"], job.said()
    assert job.last()["event"] == "requeued", job.said()


def test_a_cancel_while_the_successor_is_submitted_takes_it_back(job):
    job.tell_to_end_in(job.start(waits="roles.submit_again", continue_by="successor"), "roles.submit_again")
    assert job.called("scancel") == ["scancel 8"], job.said()
    assert (job.last()["event"], job.last()["reason"]) == ("ended", "stopped by a signal")


def test_a_wish_to_cancel_that_came_meanwhile_is_obeyed(job):
    process = job.start(waits="sinfo")
    job.wait_for_call("sinfo")
    job.trial.cancel_intent("7").write_text("{}")
    (job.here / "go").touch()
    process.wait(extend(60))
    assert not job.called("scontrol requeue") and job.last()["reason"] == "cancelled by the user", job.said()


def test_the_term_of_its_own_requeue_disturbs_nothing(job):
    process = job.start(waits="scontrol requeue")
    job.tell_to_end_in(process, "scontrol requeue")
    assert job.last()["event"] == "requeued" and process.returncode == 75, job.said()
    assert job.called("scontrol update") == ["scontrol update jobid=7 ExcNodeList=n9"]


def test_where_requeue_is_refused_the_nodes_are_counted_once(job):
    job.start(refuses=True).wait(extend(60))
    assert job.last()["successor"] == "8" and len(job.called("sinfo")) == 1, job.said()
    assert "--exclude n9 " in job.called("roles.submit_again")[0]


def test_where_neither_is_taken_it_is_told(job):
    job.start(refuses=True, next_job="").wait(extend(60))
    assert "neither a requeue nor a successor" in job.last()["reason"], job.said()
    assert not job.last()["cancelled"]
