"""How the batch script continues: Slurm's programs and the supervisor note their calls, and wait
where the test says so. A cancel must count whenever it comes."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from job_scripts import RUN_JOB

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
    texts: object
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self,
        waits: str = "",
        refuses: bool = False,
        reason: str = " Reason=None ",
        next_job: str = "8",
        **slurm,
    ) -> subprocess.Popen[bytes]:
        programs = self.here / "bin"
        programs.mkdir()
        for name, does in DOES.items():
            (programs / name).write_text(
                PROGRAM.format(first=RUN_JOB if name == "python" else "", name=name, does=does)
            )
            (programs / name).chmod(0o755)
        answers = {"code": "75", "refuses": str(int(refuses)), "reason": reason, "next": next_job}
        for name, text in answers.items():
            (self.here / name).write_text(text)
        if waits:
            (self.here / "waits").write_text(f"*{waits}*")
        self.trial.make_dirs()
        (self.trial.jobs / "7.exclude").write_text("n9")
        texts = self.texts("slurm", python=str(programs / "python"), workdir=self.here, **slurm)
        self.trial.scripts.mkdir(exist_ok=True)
        for name, text in texts.items():
            (self.trial.scripts / name).write_text(text)
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        env |= {"HERE": str(self.here), "PATH": f"{programs}:{os.environ['PATH']}"}
        env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_PARTITION": "main"}
        with (self.here / "said").open("wb") as said:
            self.processes.append(
                subprocess.Popen(
                    ["bash", str(self.trial.scripts / "trial.sbatch")],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            )
        return self.processes[-1]

    def called(self, words: str) -> list[str]:
        calls = self.here / "calls"
        return [line for line in calls.read_text().splitlines() if words in line] if calls.exists() else []

    def wait_for_call(self, words: str) -> None:
        deadline = time.monotonic() + 60
        while not self.called(words):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def tell_to_end_in(self, process: subprocess.Popen[bytes], words: str) -> None:
        """TERM to every process, as Slurm sends it, while that call is being made."""
        self.wait_for_call(words)
        os.killpg(process.pid, signal.SIGTERM)
        (self.here / "go").touch()
        process.wait(60)

    def last(self) -> dict:
        return JsonLines(self.trial.job_state("7")).poll()[-1]

    def said(self) -> str:
        return (self.here / "said").read_text()


@pytest.fixture
def job(scripts, tmp_path) -> Iterator[Script]:
    made = Script(tmp_path, Trial(tmp_path / "exp" / "one"), scripts)
    yield made
    (tmp_path / "go").touch()
    for process in made.processes:
        process.kill()
        process.wait()


def test_a_cancel_while_the_nodes_are_counted_ends_it(job):
    job.tell_to_end_in(job.start(waits="sinfo"), "sinfo")
    assert not job.called("scontrol requeue") and not job.called("roles.submit_again"), job.said()
    assert (job.last()["event"], job.last()["reason"], job.last()["cancelled"]) == (
        "ended",
        "stopped by a signal",
        True,
    )


def test_the_time_limit_at_that_moment_does_not(job):
    job.tell_to_end_in(job.start(waits="sinfo", reason=" Reason=TimeLimit "), "sinfo")
    assert job.called("scontrol requeue") == ["scontrol requeue 7"] and job.last()["event"] == "requeued", (
        job.said()
    )


def test_a_cancel_while_the_successor_is_submitted_takes_it_back(job):
    job.tell_to_end_in(job.start(waits="roles.submit_again", continue_by="successor"), "roles.submit_again")
    assert job.called("scancel") == ["scancel 8"], job.said()
    assert (job.last()["event"], job.last()["reason"]) == ("ended", "stopped by a signal")


def test_a_wish_to_cancel_that_came_meanwhile_is_obeyed(job):
    process = job.start(waits="sinfo")
    job.wait_for_call("sinfo")
    job.trial.cancel_intent("7").write_text("{}")
    (job.here / "go").touch()
    process.wait(60)
    assert not job.called("scontrol requeue") and job.last()["reason"] == "cancelled by the user", job.said()


def test_the_term_of_its_own_requeue_disturbs_nothing(job):
    process = job.start(waits="scontrol requeue")
    job.tell_to_end_in(process, "scontrol requeue")
    assert job.last()["event"] == "requeued" and process.returncode == 75, job.said()
    assert job.called("scontrol update") == ["scontrol update jobid=7 ExcNodeList=n9"]


def test_where_requeue_is_refused_the_nodes_are_counted_once(job):
    job.start(refuses=True).wait(60)
    assert job.last()["successor"] == "8" and len(job.called("sinfo")) == 1, job.said()
    assert "--exclude n9 " in job.called("roles.submit_again")[0]


def test_where_neither_is_taken_it_is_told(job):
    job.start(refuses=True, next_job="").wait(60)
    assert "neither a requeue nor a successor" in job.last()["reason"] and not job.last()["cancelled"], (
        job.said()
    )
