"""The lease on a trial: only one of two jobs runs it; a later start of the same job takes over."""

import os
import socket
import threading

import pytest

from hpc_rl.core.errors import Stale, TrialBusy
from hpc_rl.core.proc import find_start_ticks
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.supervise import ownership


def owner(trial: Trial, attempt: str, pid: int, ticks: int | None, host: str = ""):
    value = {"attempt": attempt, "host": host or socket.gethostname(), "pid": pid, "start_ticks": ticks}
    return NameResolve(trial.names).lease(keys.OWNER, value, ownership.LEASE_TTL_S)


def test_another_job_that_lives_keeps_the_trial(trial):
    mine = owner(trial, "7.0", os.getpid(), find_start_ticks(os.getpid()))
    with pytest.raises(TrialBusy, match=r"run by attempt 7.0 on .*hpc-rl cancel exp/one"):
        ownership.take_ownership(NameResolve(trial.names), trial.attempt("8.0"))
    mine.renew()  # it was not fenced


def test_a_later_start_of_the_same_job_takes_over(trial):
    mine = owner(trial, "7.0", os.getpid(), find_start_ticks(os.getpid()))
    ownership.take_ownership(NameResolve(trial.names), trial.attempt("7.1"))
    with pytest.raises(Stale):
        mine.renew()


def test_a_dead_owner_is_followed_at_once(trial):
    owner(trial, "7.0", os.getpid(), 1)  # another process that once had this pid
    assert ownership.take_ownership(NameResolve(trial.names), trial.attempt("8.0")).epoch == 2


@pytest.mark.parametrize("lives", [True, False])
def test_an_owner_on_another_host_is_judged_by_its_counter(trial, monkeypatch, lives):
    monkeypatch.setattr(ownership, "LEASE_TTL_S", 0.6)
    monkeypatch.setattr(ownership, "CHECK_EVERY_S", 0.2)
    monkeypatch.setattr(ownership, "FENCE_S", 0.0)
    other, over = owner(trial, "7.0", 1234, 5, host="elsewhere"), threading.Event()

    def renew() -> None:
        while lives and not over.wait(0.1):
            other.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        if lives:
            with pytest.raises(TrialBusy):
                ownership.take_ownership(NameResolve(trial.names), trial.attempt("8.0"))
        else:
            assert ownership.take_ownership(NameResolve(trial.names), trial.attempt("8.0")).epoch == 2
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(("other", "is_later"), [("7.1", 1), ("8.0", 1), ("7.0", 0), ("6.0", 0), ("x", 0)])
def test_a_role_is_fenced_by_a_later_attempt_alone(trial, other, is_later):
    for number, job in enumerate(("6", "7", "8"), start=1):
        write_json(trial.job(job), {"job_id": job, "scheduler": "slurm", "time": float(number)})
    names, own = NameResolve(trial.names), trial.attempt("7.0")
    assert ownership.find_later_owner(names, own) == ""
    owner(trial, other, 1234, 5, host="elsewhere")
    assert ownership.find_later_owner(names, own) == (other if is_later else "")
