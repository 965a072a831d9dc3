"""The most important messages, kept whole in tests/golden/messages.txt: refusals, cancel, recover, status,
exit reasons.

Each is made by the code that users meet it through, with fixed inputs. `pytest tests/unit/test_messages.py
--update-golden` writes the file anew; its diff is what to review.
"""

import errno
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.checkpoint.decide import Cause, GenerationInfo, PastStart, Situation, decide
from hpc_rl.cli.cancel import OUTCOMES, OUTCOMES_UNSAVED
from hpc_rl.cli.status import describe_status
from hpc_rl.config.changes import Change, refuse_unsafe
from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core import allocation
from hpc_rl.core.errors import CannotWrite, FailureClass, HpcRlError, StopCause
from hpc_rl.core.trial import write_json
from hpc_rl.datasets.rows import check_same_rows
from hpc_rl.plan.plan import make_plan
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.schedulers.shared_query import NOT_LISTED
from hpc_rl.schedulers.sinfo import Node
from hpc_rl.status import scheduler_view
from hpc_rl.status.state_reason import describe_state
from hpc_rl.status.submitted_jobs import TrialJob
from hpc_rl.status.trial_status import load_status
from hpc_rl.supervise import failure_policy
from hpc_rl.supervise.job_policy import (
    AFTER_EXIT,
    AFTER_STOP,
)
from hpc_rl.trials import (
    attachment,
    cancellation,
    first_start,
    preflight,
    submission,
    trial_index,
)
from hpc_rl.trials.lock import check_unlocked

GOLDEN = Path(__file__).parents[1] / "golden" / "messages.txt"
BASE = [
    "experiment_name=sums",
    "trial_name=small",
    "actor.path=/models/m",
    "train_dataset.path=/data/t.jsonl",
    "train_dataset.batch_size=8",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=16",
    "cluster.n_gpus_per_node=0",
]
MESSAGES: dict[str, Callable[..., object]] = {}


def message(make: Callable[..., object]) -> Callable[..., object]:
    """Register a function that returns a message or raises an error with one."""
    MESSAGES[make.__name__.replace("_", " ")] = make
    return make


def checked(*overrides: str) -> object:
    return check(load([], [*BASE, *overrides]), files=False)


# -- configuration


@message
def an_unknown_option(fake):
    checked("actor.optimizer.lrr=1")


@message
def a_value_of_the_wrong_type(fake):
    checked("total_train_steps=many")


@message
def a_name_that_is_not_a_directory(fake):
    checked("experiment_name=a/b")


@message
def an_allocation_that_does_not_fit(fake):
    loaded = checked("allocation_mode=sglang:d8+fsdp:d4", "cluster.n_gpus_per_node=8")
    make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="local")


@message
def an_allocation_that_is_not_understood(fake):
    allocation.parse("embedded:d1+fdsp:d1")


@message
def an_option_that_the_state_does_not_allow_to_change(fake):
    refuse_unsafe([Change("seed", 1, 2, False, "the position in the data counts by it")], "sums/small")


@message
def other_rows_than_before(fake):
    check_same_rows(
        "/data/t.jsonl", {"rows": 8, "xxh3": "a"}, {"rows": 9, "xxh3": "b"}, "checkpoint 3 was made"
    )


@message
def a_request_that_the_cluster_cannot_run(fake):
    loaded = check(load([], [*BASE, "--n_nodes=3", "launcher.type=slurm"]), files=False)
    plan = make_plan(loaded.config, loaded.explicit, interpreter="python", scheduler="slurm")

    class Cluster:
        def query_nodes(self) -> list[Node]:
            return [Node("main", f"n{number}", 64, 256_000, is_default=True) for number in (1, 2)]

    preflight.quick_check(loaded.config, plan, Cluster())


# -- submit and recover


@message
def a_trial_that_runs(fake):
    fake.run_to(3)
    submission.check_idle(fake.trial)


@message
def a_trial_that_is_being_submitted(fake):
    write_json(fake.trial.submitting, {"host": "login1", "pid": 4711, "start_ticks": 1})
    check_unlocked(fake.trial)


@message
def a_trial_that_ends_before_its_checkpoint(fake):
    first_start.check_end(9, fake.trial, checked("total_train_steps=5").config)


@message
def a_trial_of_another_cluster(fake):
    scheduler_view.make_job_scheduler(fake.trial, TrialJob("7", scheduler="slurm", cluster="west"))


def situation(*steps: int, **more) -> str:
    found = tuple(GenerationInfo(step, 0, "7", True) for step in steps)
    made = decide(
        Situation(**{"mode": "auto", "start_mode": "resume", "first_start": True} | more, generations=found)
    )
    return f"{made.action}: {made.reason}"


@message
def a_start_from_the_newest_checkpoint(fake):
    return situation(3, 9)


@message
def a_start_from_a_checkpoint_that_does_not_exist(fake):
    return situation(3, 9, wanted=5)


@message
def a_start_without_a_checkpoint(fake):
    return situation()


@message
def a_start_after_too_many(fake):
    past = tuple(PastStart("7.0", number, Cause.FAILED, "out of memory") for number in range(4))
    return situation(3, first_start=False, history=past)


# -- trials by name


@message
def a_trial_name_that_is_unknown(fake):
    trial_index.record_trial(fake.trial)
    trial_index.resolve("t2")


@message
def a_path_that_is_not_a_trial(fake):
    trial_index.resolve(str(fake.trial.dir.parent))


# -- cancel


@message
def what_cancel_did(fake):
    lines = {f"job 7 {line.format(was='done')}." for line in (*OUTCOMES.values(), *OUTCOMES_UNSAVED.values())}
    return "\n".join(sorted(lines))


@message
def a_cancel_on_a_full_disk(fake):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cancellation, "write_json", full)
        try:
            cancellation.write_request(fake.trial, TrialJob("7", native_id="7", scheduler="slurm"), now=False)
        except CannotWrite as error:
            return error


# -- status


def reason_of(fake, *args) -> str:
    status = load_status(fake.trial, *args)
    return describe_state(status.state, status.reason)


@message
def status_of_a_trial_that_was_cancelled_and_saved(fake):
    fake.run_to(5)
    fake.cancel_wish("7")
    fake.generation(5)
    record = {"exit_code": 75, "reason": AFTER_STOP[StopCause.CANCELLED].reason, "cause": "cancelled"}
    write_json(fake.trial.attempt("7.0").ended, record)
    return reason_of(fake)


@message
def status_of_a_trial_that_could_not_be_saved(fake):
    fake.run_to(5)
    fake.generation(3)
    fake.ended("7.0", 75, "stopped by a signal; no space left on device")
    fake.script_said("7", "ended", code=75)
    return reason_of(fake)


@message
def status_of_a_trial_that_failed(fake):
    fake.run_to(5)
    fake.ended("7.0", 70, "rollout-0: KeyError: 'answer' at reward.py:12")
    return reason_of(fake)


@message
def status_of_a_trial_whose_job_ran_into_its_time_limit(fake):
    fake.run_to(5)
    return reason_of(fake, JobState("7", State.TIMEOUT, "TIMEOUT"))


@message
def status_of_a_trial_whose_job_is_gone(fake):
    fake.run_to(5)
    return reason_of(fake, JobState("7", State.UNKNOWN, NOT_LISTED, "does not list the job any more"))


@message
def status_of_a_trial_that_waits(fake):
    fake.job("7")
    return reason_of(fake, JobState("7", State.PENDING, "PENDING", "Resources"), time.time())


@message
def status_of_a_trial_that_was_taken_back(fake):
    fake.run_to(5)
    status = load_status(fake.trial, JobState("7", State.PENDING, "PENDING", "BeginTime"), time.time())
    return status.last_end


@message
def status_of_a_rollout_that_makes_no_progress(fake):
    fake.run_to(5)
    report = {"rejected": {"reward_timeout": 60}, "rejected_in_a_row": 60, "last_reason": "reward_timeout"}
    report |= {"last_error": "KeyError: 'answer'", "servers": 0, "oldest_running_s": 300, "quiet_s": 290}
    write_json(fake.trial.attempt("7.0").rollout_report(0), report)
    lines = describe_status(load_status(fake.trial))
    return "\n".join(lines[lines.index("") :][-13:-3])


# -- exits


def after(code: int, reason: str, failure: FailureClass = FailureClass.UNKNOWN, failures: int = 1) -> str:
    found = failure_policy.UnitExit(code, reason, failure)
    return failure_policy.decide_after_failure("trainer", found, "auto", failures, 3).reason


@message
def a_trainer_whose_code_failed(fake):
    return after(70, "KeyError: 'answer'", FailureClass.USER)


@message
def a_trainer_that_ran_out_of_memory_twice(fake):
    return after(70, "CUDA out of memory", FailureClass.OUT_OF_MEMORY, failures=2)


@message
def a_trainer_that_lost_its_node(fake):
    return after(137, "n3 is down", FailureClass.NODE)


@message
def a_trainer_that_failed_too_often(fake):
    return after(70, "connection reset", FailureClass.INFRASTRUCTURE, failures=4)


@message
def a_trainer_that_was_killed_before_it_could_save(fake):
    found = failure_policy.UnitExit(137, "killed by SIGKILL")
    return failure_policy.decide_after_drain(
        "trainer", found, "auto", 0, 3, AFTER_STOP[StopCause.CANCELLED].reason
    ).reason


# -- attach, job script


@message
def attach_without_a_process(fake):
    fake.run_to(3)
    attachment.choose_process(load_status(fake.trial), "server", None, None)


@message
def reasons_of_the_job_script(fake):
    return "\n".join(rule.reason for rule in (*AFTER_STOP.values(), *AFTER_EXIT.values()))


def test_the_messages(make_fake_trial, tmp_path, state_home, monkeypatch, update_golden):
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    (tmp_path / "slurm.conf").write_text("ClusterName=east\n")
    monkeypatch.setattr(
        "hpc_rl.schedulers.SCHEDULERS", {"local": RunningScheduler, "slurm": RunningScheduler}
    )
    sections = []
    for number, (name, make) in enumerate(MESSAGES.items()):
        fake = make_fake_trial(tmp_path / str(number))
        sections.append(f"## {name}\n{made(make, fake)}\n")
    found = "\n".join(sections).replace(str(tmp_path), "TMP")
    found = re.sub(r"TMP/\d+", "ROOT", found)
    if update_golden:
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


def made(make: Callable[..., object], fake) -> str:
    try:
        return str(make(fake))
    except HpcRlError as error:
        return f"{error}\n(exit code {int(error.exit_code)})"


class RunningScheduler:
    """A scheduler whose jobs all run."""

    name = "local"

    def __init__(self, trial: object) -> None: ...

    def query_states(self, job_ids: list[str]) -> dict[str, JobState]:
        return {job_id: JobState(job_id, State.RUNNING) for job_id in job_ids}
