"""Every row of the tables in supervise/failure_policy.py, as the job script follows it with a supervisor of a few lines."""

import signal
import subprocess
from pathlib import Path

import pytest
from job_scripts import RUN_JOB, write_programs
from patience import extend, wait_until

from hpc_rl.core.errors import ExitCode, StopCause
from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial
from hpc_rl.supervise.job_policy import (
    AFTER_EXIT,
    AFTER_OTHER_EXIT,
    AFTER_SIGNAL,
    AFTER_STOP,
    ScriptAction,
)

SUPERVISOR = (
    f"#!/bin/bash\n{RUN_JOB}"
    + """
echo start >>"$HERE/starts"
if [[ -e $HERE/waits ]]; then sleep 60 & touch "$HERE/waiting"; wait; fi
code=$(head -n 1 "$HERE/code")
number=$(wc -l <"$HERE/starts")
if grep -qx "$number" "$HERE/progress" 2>/dev/null; then mkdir "$HERE/exp/one/recover/gen-0000000$number"; fi
if [[ $code == KILL ]]; then kill -s KILL $$; fi
exit "$code"
"""
)
SCONTROL = """#!/bin/bash
echo "$*" >>"$HERE/calls"
if [[ $2 == job ]]; then cat "$HERE/reason"; fi
"""


@pytest.fixture
def job(written, job_environ, tmp_path):
    """`job("auto", code="75")`: the process of the batch script of job 7."""

    def start(mode: str = "auto", code: str = "0", reason: str = "None") -> subprocess.Popen[bytes]:
        write_programs(tmp_path, {"python": SUPERVISOR, "scontrol": SCONTROL})
        (tmp_path / "code").write_text(f"{code}\n")
        (tmp_path / "reason").write_text(f" Reason={reason} ")
        argv = ["bash", written("slurm", tmp_path / "python", mode=mode)]
        started.append(subprocess.Popen(argv, env=job_environ, stderr=subprocess.DEVNULL))
        return started[-1]

    started: list[subprocess.Popen[bytes]] = []
    yield start
    for process in started:
        process.kill()
        process.wait()


def last(tmp_path: Path) -> dict:
    return JsonLines(Trial(tmp_path / "exp" / "one").job_state("7")).poll()[-1]


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text().split())


@pytest.mark.parametrize(
    "code", sorted(set(ExitCode) - {ExitCode.KILLED_BY_PERSON, ExitCode.KILLED_BY_SYSTEM})
)
def test_each_exit_code_is_followed_as_the_table_says(job, tmp_path, code):
    rule = AFTER_EXIT.get(code, AFTER_OTHER_EXIT)
    assert job(code=str(int(code))).wait(extend(60)) == code and starts(tmp_path) == 1
    again = rule.action is ScriptAction.START_AGAIN
    assert (tmp_path / "calls").exists() == again
    assert last(tmp_path)["event"] == ("requeued" if again else "ended")
    assert again or (last(tmp_path)["reason"], last(tmp_path)["cancelled"]) == (rule.reason, False)


@pytest.mark.parametrize(
    ("progress", "num_starts"),
    [([], 4), ([1], 4), ([2], 5), ([3, 6, 9], 12)],  # recover.retries is 3
    ids=str,
)
def test_kills_of_the_supervisor_count_until_there_is_a_new_checkpoint(job, tmp_path, progress, num_starts):
    assert AFTER_SIGNAL.action is ScriptAction.RESTART_SUPERVISOR
    (tmp_path / "progress").write_text("".join(f"{start}\n" for start in progress))
    # one of before counts as none
    (tmp_path / "exp" / "one" / "recover" / "gen-00000100").mkdir(parents=True)
    assert job(code="KILL").wait(extend(60)) == 137 and starts(tmp_path) == num_starts
    assert last(tmp_path)["reason"] == AFTER_SIGNAL.reason


def test_nothing_is_started_again_where_the_mode_is_disabled(job, tmp_path):
    assert job(mode="disabled", code="75").wait(extend(60)) == 75
    assert last(tmp_path)["reason"] == f"{AFTER_EXIT[ExitCode.STOPPED].reason}, and recover.mode is disabled"


@pytest.mark.parametrize("cause", AFTER_STOP)
def test_each_stop_that_the_script_knows_of_comes_before_the_exit_code(job, tmp_path, cause):
    (tmp_path / "waits").touch()
    process = job(code="75", reason="TimeLimit" if cause is StopCause.TIME_LIMIT else "None")
    wait_until((tmp_path / "waiting").exists)
    if cause is StopCause.CANCELLED:
        Trial(tmp_path / "exp" / "one").cancel_intent("7").write_text("{}")
    process.send_signal(signal.SIGTERM)
    process.wait(extend(60))
    rule, end = AFTER_STOP[cause], last(tmp_path)
    assert end["cause"] == cause
    if rule.action is ScriptAction.START_AGAIN:
        assert end["event"] == "requeued" and "requeue 7" in (tmp_path / "calls").read_text()
    else:
        assert (end["event"], end["reason"], end["cancelled"]) == ("ended", rule.reason, True)
        assert "requeue" not in "".join(path.read_text() for path in tmp_path.glob("calls"))
