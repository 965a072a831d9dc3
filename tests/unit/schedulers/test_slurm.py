"""The Slurm scheduler with fake Slurm programs: states, lost answers, accounting, environment."""

import os
from pathlib import Path

import pytest
from job_scripts import write_programs

from hpc_rl.core.errors import SchedulerError
from hpc_rl.schedulers import make_scheduler, pick, slurm
from hpc_rl.schedulers.base import JobSpec, State
from hpc_rl.schedulers.slurm import SlurmScheduler, clean_environment

SPEC = JobSpec("name", Path("/x y/script"), "the:tag")


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """`programs(sbatch="bash text", …)`; `programs.calls()` are the commands that were given, `.names()` their
    programs.
    """
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    calls = tmp_path / "calls"

    def make(**texts: str) -> None:
        for name, text in texts.items():
            note = f'echo "{name} $*" >>"{calls}"\nn=$(grep -c "^{name} " "{calls}")'
            write_programs(tmp_path, {name: f"#!/bin/bash\n{note}\n{text}\n"})

    make.calls = lambda: calls.read_text().splitlines()
    make.names = lambda: [call.split()[0] for call in make.calls()]
    return make


TIMED_OUT = "echo 'Socket timed out on send/recv operation' >&2; exit 1"
NO_ANSWER = "echo 'Unable to contact slurm controller' >&2; exit 1"


@pytest.fixture
def scheduler():
    return SlurmScheduler(retry_wait_s=0)


def test_the_id_is_found_below_a_banner(programs, scheduler):
    programs(sbatch="echo Welcome to job 7; echo; echo '123;cluster'")
    assert scheduler.submit(SPEC) == "123"
    assert programs.calls() == ["sbatch --parsable /x y/script"]


def test_a_refusal_is_told_once_in_its_own_words(programs, scheduler):
    programs(sbatch="echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(SchedulerError, match="invalid partition"):
        scheduler.submit(SPEC)
    assert len(programs.calls()) == 1


@pytest.mark.parametrize(
    ("sbatch", "squeue", "job_id", "calls"),
    [
        (TIMED_OUT, "echo '8|the:tag2'; echo '9|the:tag mine'", "9", ["sbatch", "squeue"]),
        (f"if ((n == 1)); then {NO_ANSWER}; fi; echo 5", "", "5", ["sbatch", "squeue", "sbatch"]),
        (TIMED_OUT, "if ((n == 3)); then echo '9|the:tag'; fi", "9", ["sbatch", "squeue"] * 3),
    ],
    ids=["found by its tag", "submitted again where it is not there", "looked up after the last one too"],
)
def test_a_job_whose_answer_was_lost(programs, scheduler, sbatch, squeue, job_id, calls):
    programs(sbatch=sbatch, squeue=squeue)
    assert scheduler.submit(SPEC) == job_id
    assert programs.names() == calls


def test_a_silent_controller_is_given_up(programs, scheduler, monkeypatch):
    monkeypatch.setattr(slurm, "SUBMIT_TIMEOUT_S", 0.1)
    programs(sbatch="exec sleep 5", squeue="")
    with pytest.raises(SchedulerError, match="did not answer within"):
        scheduler.submit(SPEC)


def test_nothing_is_submitted_again_before_squeue_has_answered(programs, scheduler):
    down = TIMED_OUT.replace("Socket", "slurm_load_jobs error: Socket")
    programs(sbatch=TIMED_OUT, squeue=f"if ((n < 3)); then {down}; fi; echo '9|the:tag'")
    assert scheduler.submit(SPEC) == "9"
    assert programs.names() == ["sbatch", "squeue", "squeue", "squeue"]
    programs(squeue=down)
    told = r"may have accepted the job: squeue: .* check: squeue --me -n name"
    with pytest.raises(SchedulerError, match=told):
        scheduler.submit(SPEC)
    assert programs.names().count("sbatch") == 2


def test_one_question_for_all_and_accounting_only_for_the_forgotten(programs, scheduler):
    programs(
        squeue="echo '1|RUNNING|None|2026-01-01T00:00:00+0000|n[1-2]'; echo '2|PENDING|Priority|N/A|'",
        sacct="echo '3|NODE_FAIL|None|2026-01-01T00:00:00|n1'; echo '3|CANCELLED by 0|None|Unknown|n1'",
    )
    states = scheduler.query_states(["1", "2", "3", "4"])
    expected = [State.RUNNING, State.PENDING, State.CANCELLED, State.UNKNOWN]
    assert [states[job].state for job in "1234"] == expected
    assert (states["1"].end_time, states["1"].nodes) == (1767225600, "n[1-2]")
    assert states["2"].reason == "Priority"
    assert programs.names() == ["squeue", "sacct"] and "-j 3,4" in programs.calls()[1]


def test_it_works_without_accounting_and_for_a_forgotten_job(programs, scheduler):
    programs(
        squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        sacct="echo 'Slurm accounting storage is disabled' >&2; exit 1",
    )
    assert scheduler.query_states(["1"])["1"].state is State.UNKNOWN
    assert scheduler.query_states([]) == {}


def test_a_controller_that_is_down_is_an_error_not_a_state(programs, scheduler):
    programs(squeue=NO_ANSWER)
    told = r"no Slurm controller answers it .Unable to contact.*hpc-rl doctor"
    with pytest.raises(SchedulerError, match=told):
        scheduler.query_states(["1"])


def test_an_sbatch_without_a_cluster_names_this_machine(programs, scheduler):
    said = "sbatch: error: DNS SRV lookup failed\\nsbatch: fatal: Could not establish a configuration source"
    programs(sbatch=f"echo -e '{said}' >&2; exit 1")
    with pytest.raises(SchedulerError, match="no Slurm controller") as caught:
        scheduler.submit(SPEC)
    assert "(fatal: Could not" in str(caught.value) and "launcher.type=local" in str(caught.value)


def test_the_search_for_a_job_outlives_a_short_outage(programs, scheduler):
    programs(squeue=f"if ((n < 3)); then {NO_ANSWER}; fi; echo '9|the:tag'")
    assert scheduler.find(SPEC) == "9" and len(programs.calls()) == 3


def test_nothing_of_a_surrounding_job_is_passed_on(programs, scheduler, monkeypatch, caplog):
    monkeypatch.setenv("SBATCH_GRES", "wrong")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    programs(sbatch='echo "${SBATCH_GRES-0}${SLURM_NTASKS-0}1"')
    assert scheduler.submit(SPEC) == "001"
    assert "SBATCH_GRES" in caplog.text


def test_which_cluster_and_how_to_authenticate_is_passed_on():
    kept = {"SLURM_CONF": "a", "SLURM_JWT": "token", "SLURM_CLUSTERS": "other", "HOME": "d"}
    assert clean_environment(kept | {"SLURM_X": "b", "PMIX_Y": "c"}) == kept


def test_the_time_format_of_our_queries_does_not_reach_jobs(programs, scheduler):
    programs(sbatch='echo "1${SLURM_TIME_FORMAT+2}"', squeue='echo "$SLURM_TIME_FORMAT" >&2; exit 1')
    assert scheduler.submit(SPEC) == "1"
    with pytest.raises(SchedulerError, match="%Y-%m-%d"):
        scheduler.query_states(["1"])


def test_without_slurm_the_message_says_so(scheduler, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="not on the PATH"):
        scheduler.cancel("1")
    assert pick("auto") == "local" and pick("slurm") == "slurm"


def test_an_unknown_scheduler_is_named(fake_trial):
    with pytest.raises(SchedulerError, match="'pbs'"):
        make_scheduler("pbs", fake_trial.trial)
