"""Decisions of a job script, and the imports of its program."""

import subprocess
import sys
from pathlib import Path

import pytest
from job_scripts import ROOT, JobRun

from hpc_rl.core.trial import Trial
from hpc_rl.supervise.job_policy import (
    Facts,
    JobSettings,
    choose_excluded,
    compute_environment_changes,
    decide_requeue,
    name_job,
    parse_words,
)

WORDS = ["trial_dir=/t", "python=/p", "workdir=/w", "scheduler=slurm", "script_name=trial.sbatch"]
WORDS += ["attempts=attempts", "recover_mode=auto", "recover_retries=3", "start_mode=auto"]
SLURM = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


def settings(**values) -> JobSettings:
    return parse_words([*WORDS, "--"])[0]._replace(**values)


def test_the_words_of_a_script_become_settings():
    found, arguments = parse_words(
        [*WORDS, "hook_limit_s=2.5", "new_batches=1", "pre_job=a b", "exclude=", "--", "7", "--", "x=y"]
    )
    assert (found.recover_retries, found.hook_limit_s, found.new_batches) == (3, 2.5, True)
    assert (found.pre_job, found.exclude, found.on_preempt) == (("a", "b"), "", ())
    assert arguments == ["7", "--", "x=y"]
    with pytest.raises(ValueError, match="'retires=3' is not a setting"):
        parse_words([*WORDS, "retires=3", "--"])


@pytest.mark.parametrize(
    ("values", "arguments", "env", "attempt", "slurm_job"),
    [
        ({}, [], {}, "7.0", "7"),
        ({}, [], {"SLURM_RESTART_COUNT": "2"}, "7.2", "7"),
        ({}, ["7-3", "0"], {"SLURM_RESTART_COUNT": "2"}, "7-3.2", "7_3"),  # of a sweep
        ({}, ["5", "3"], {"SLURM_RESTART_COUNT": "2"}, "5.5", "7"),
        ({"script_name": "servers.sbatch"}, ["", "0", "6"], {}, "7_3.0", "7_3"),
        ({"scheduler": "allocation"}, ["7-abc"], {}, "7-abc.0", ""),
        ({"scheduler": "local"}, [], {}, "local-19700101-000100-beef.0", ""),
    ],
)
def test_names_of_attempts(values, arguments, env, attempt, slurm_job):
    names = name_job(settings(**values), arguments, SLURM | env, 60.0, "beef")
    assert (names.attempt, names.slurm_job) == (attempt, slurm_job)
    trial = Trial(Path("/t"))
    paths = [trial.job_state(names.job_id), trial.job(names.job_id), trial.exclude(names.job_id)]
    assert [names.state, names.submission, names.exclude] == [str(path) for path in paths]
    assert names.cancel_intent == str(trial.cancel_intent(names.job_id))
    assert names.drain_intent == str(trial.drain_intent(attempt))
    if values.get("script_name") != "servers.sbatch":  # whose script has the folder of its attempts
        assert names.attempt_dir == str(trial.attempt(attempt).dir)


def test_what_sbatch_derived_is_dropped_and_what_a_step_has_only_in_a_step():
    env = SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}
    for values, dropped in (
        ({}, {"SLURM_NTASKS"}),
        ({"backend": "submitit"}, {"SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_PROCID"}),
        ({"scheduler": "allocation"}, {"SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_PROCID"}),
        ({"scheduler": "local"}, set()),
    ):
        own = settings(**values)
        assert set(compute_environment_changes(own, name_job(own, [], env, 0, ""), env)[0]) == dropped


@pytest.mark.parametrize(
    ("facts", "starts_again", "cause", "is_cancelled"),
    [
        (Facts(75, "auto"), True, "", False),
        (Facts(75, "disabled"), False, "", False),
        (Facts(0, "auto", has_term=True, is_requeued=True), False, "", False),
        (Facts(75, "auto", has_term=True), False, "preemption", True),
        (Facts(75, "auto", is_cancelled=True, has_term=True, is_time_limit=True), False, "cancelled", True),
        (Facts(143, "auto", has_term=True, is_time_limit=True), False, "time_limit", False),
        (Facts(143, "auto", has_term=True, is_time_limit=True, is_requeued=True), True, "", False),
        (Facts(70, "auto", hook_failure="x"), False, "", False),
        (Facts(137, "auto"), False, "", False),
    ],
)
def test_what_follows_from_the_end_of_an_attempt(facts, starts_again, cause, is_cancelled):
    found = decide_requeue(facts)
    assert (found.starts_again, found.cause, found.is_cancelled) == (starts_again, cause, is_cancelled)


def test_as_many_bad_nodes_are_excluded_as_can_be_spared():
    nodes = ["n1", "n2", "n3", "n4", "n5"]
    assert choose_excluded(["n4", "n2"], nodes, [], 4) == ["n4"]
    assert choose_excluded(["n2"], nodes, [], 4) == choose_excluded(["n2", "n2"], nodes, [], 4) == ["n2"]
    assert choose_excluded(["n4", "n2"], nodes, [], 3) == ["n4", "n2"]
    assert choose_excluded(["n4", "n2"], nodes, ["n4"], 4) == []
    assert choose_excluded(["n4", "n2"], nodes, [], 5) == []
    assert choose_excluded(["n9", "n4"], nodes, [], 4) == ["n9", "n4"], "n9 is not in the partition"


def test_the_program_imports_little():
    """It forwards signals to the supervisor, so it must start in some 50 ms."""
    slow = ["argparse", "asyncio", "dataclasses", "inspect", "logging", "numpy", "pathlib", "random"]
    slow += ["subprocess", "tempfile", "threading", "urllib.parse", "yaml"]
    code = f"import sys, hpc_rl.roles.job, hpc_rl.supervise.job_runner; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


TEARDOWN = """{% extends "below/NAME" %}
{% block teardown %}
echo "$rc $trial_dir ${SLURM_NTASKS:-none}" >>"$HERE/torn"
{% endblock %}
"""


TEMPLATES = {"local": "templates/local.sh.j2", "slurm": "sbatch/trial.sbatch.j2"}


@pytest.fixture
def run_with(tmp_path):
    """`run_with(scheduler, more)`: a job whose template tears something down, with these lines behind it."""
    runs = []

    def make(scheduler: str, more: str) -> JobRun:
        override = tmp_path / "site" / TEMPLATES[scheduler]
        override.parent.mkdir(parents=True)
        text = TEARDOWN.replace("NAME", TEMPLATES[scheduler])
        override.write_text(text.replace("{% endblock %}", f"{more}\n{{% endblock %}}"))
        runs.append(JobRun(tmp_path, scheduler, launcher={"templates_dir": str(tmp_path / "site")}))
        return runs[0]

    yield make
    for run in runs:
        run.end()


@pytest.mark.parametrize("scheduler", TEMPLATES)
@pytest.mark.parametrize("more", ["", "exit 9", "rc=8", "false", "# nothing more"])
def test_what_an_override_tears_down_runs_last_and_once(run_with, tmp_path, scheduler, more):
    run = run_with(scheduler, more)
    (tmp_path / "supervisor.py").write_text("import os; assert 'BASH_FUNC_teardown%%' not in os.environ")
    run.start()
    assert run.release([]) == {"exit 9": 9, "rc=8": 8, "false": 1}.get(more, 0), run.said()
    assert (tmp_path / "torn").read_text() == f"0 {run.trial.dir} none\n"


def test_nothing_is_torn_down_before_another_start(run_with, tmp_path):
    run = run_with("slurm", "")
    run.start()
    assert run.release([]) == 75 and run.calls() == ["requeue"], run.said()
    assert not (tmp_path / "torn").exists()
