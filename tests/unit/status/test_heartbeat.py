"""When status calls a supervisor silent: by a counter, or by times of one file server."""

import os
import time

import pytest

from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import Lease, NameResolve
from hpc_rl.status.heartbeat import SILENT_S, WATCH_S, Heartbeat


class Trial:
    """The leases of a running trial, and a reader with a clock of its own."""

    def __init__(self, root) -> None:
        self.now = 1000.0
        self.names = NameResolve(root)
        self.owner = self.names.lease(keys.OWNER, {"attempt": "7.0", "host": "host1", "node": "n1"})
        self.server = self.names.lease(keys.server("default", 0), {"host": "host2"})
        self.renews = False
        self.reader = Heartbeat(NameResolve(root, lambda: self.now), lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.renews:
            self.owner.renew()

    def set_age(self, lease: Lease, seconds: float) -> None:
        os.utime(lease.path, (time.time() - seconds,) * 2)


@pytest.fixture
def trial(tmp_path) -> Trial:
    return Trial(tmp_path / "names")


def test_a_lease_that_was_just_renewed_is_believed_at_once(trial):
    assert trial.reader.silence("7.0", WATCH_S) is None
    assert trial.now == 1000.0


def test_a_lease_much_older_than_that_of_a_server_is_silent_at_once(trial):
    trial.set_age(trial.owner, SILENT_S + 3)
    found = trial.reader.silence("7.0", WATCH_S)
    assert found is not None and (found.node, round(found.silent_s)) == ("n1", SILENT_S + 3)
    assert trial.now == 1000.0


@pytest.mark.parametrize("age_s", [300.0, -300.0], ids=["server_clock_behind", "server_clock_ahead"])
@pytest.mark.parametrize("renews", [True, False])
def test_where_all_files_look_old_or_new_the_counter_is_watched(trial, age_s, renews):
    trial.renews = renews
    for lease in (trial.owner, trial.server):
        trial.set_age(lease, age_s)
    found = trial.reader.silence("7.0", WATCH_S)
    assert (found is None) == renews
    assert trial.now <= 1000.0 + WATCH_S + 1


@pytest.mark.parametrize("renews", [True, False])
def test_a_lease_that_may_become_silent_during_the_watch_is_watched(trial, renews):
    trial.renews = renews
    for lease in (trial.owner, trial.server):
        trial.set_age(lease, SILENT_S - WATCH_S + 1)
    assert trial.reader.silence("7.0") is None, "a reader that stays looks later"
    assert trial.now == 1000.0
    found = trial.reader.silence("7.0", WATCH_S)
    assert (found is None) == renews
    assert trial.now <= 1000.0 + WATCH_S + 1


def test_a_reader_that_stays_judges_by_its_own_clock(trial):
    for lease in (trial.owner, trial.server):
        trial.set_age(lease, 300.0)
    assert trial.reader.silence("7.0") is None, "the first look tells nothing"
    trial.now += SILENT_S
    found = trial.reader.silence("7.0")
    assert found is not None and found.silent_s == SILENT_S
    trial.owner.renew()
    trial.set_age(trial.owner, 300.0)
    assert trial.reader.silence("7.0") is None


def test_another_attempt_or_a_released_lease_is_nothing_to_judge(trial):
    trial.set_age(trial.owner, 300.0)
    assert trial.reader.silence("7.1", WATCH_S) is None
    trial.owner.release()
    trial.set_age(trial.owner, 300.0)
    assert trial.reader.silence("7.0", WATCH_S) is None
