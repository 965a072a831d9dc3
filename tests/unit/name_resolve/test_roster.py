"""The roster of a pool: what its registrar reads and writes, and when its readers don't trust it."""

import errno
import logging
import os

import pytest

from hpc_rl.name_resolve import roster as roster_module
from hpc_rl.name_resolve.roster import (
    HEARTBEAT_S,
    POLL_S,
    READS_PER_POLL,
    RECHECK_S,
    STUCK_S,
    Registrar,
    RosterReader,
)
from hpc_rl.name_resolve.shared_fs import LEASE_TTL_S, Lease, NameResolve

POOL = "server/rollout"


class Clock:
    """A clock that a test moves, common to the registrar and its readers."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class CountingNames(NameResolve):
    """Records which leases were read."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.loaded: list[str] = []

    def load_lease(self, key, mark):
        self.loaded.append(key)
        return super().load_lease(key, mark)

    def take_loaded(self) -> list[str]:
        loaded, self.loaded = self.loaded, []
        return loaded


class Trial:
    """A pool with a registrar and a reader, each with its own names as in its own process."""

    def __init__(self, root) -> None:
        self.root, self.clock = root, Clock()
        self.servers = NameResolve(root, self.clock)
        self.registrar_names, self.reader_names = (CountingNames(root, self.clock) for _ in range(2))
        self.registrar = Registrar(self.registrar_names, [POOL], 1)
        self.reader = RosterReader(self.reader_names, POOL)

    @property
    def file(self):
        return self.root / f"{POOL}.json"

    def start_server(self, index: int = 0, **value) -> Lease:
        value = {"state": "serving", **value}
        return self.servers.lease(f"{POOL}/{index}", value, LEASE_TTL_S, has_beats=True)

    def start_servers(self, count: int) -> list[Lease]:
        """Start many servers without fsync."""
        folder = self.root / POOL
        folder.mkdir(parents=True, exist_ok=True)
        leases = [
            Lease(
                folder / str(index), f"{POOL}/{index}", 1, {"state": "serving"}, LEASE_TTL_S, has_beats=True
            )
            for index in range(count)
        ]
        for lease in leases:
            lease.path.write_text(lease.encode())
        return leases

    def pass_s(self, seconds: float, renewing: tuple[Lease, ...] = ()) -> None:
        """Let time pass while the registrar polls and servers renew their leases."""
        for _ in range(round(seconds / POLL_S)):
            self.clock.now += POLL_S
            for lease in renewing:
                lease.renew()
            self.registrar.poll()
            self.reader.list_leases()

    def trust(self) -> None:
        """Let the reader see that the roster moves."""
        self.pass_s(HEARTBEAT_S + POLL_S)
        self.reader_names.take_loaded()

    def read(self) -> dict[str, str]:
        """Return the states of the live servers; fail if a lease was read."""
        states = {key: seen.value["state"] for key, seen in self.reader.list_leases().items() if seen.alive}
        assert not self.reader_names.take_loaded(), "the roster was not used"
        return states


@pytest.fixture
def trial(tmp_path):
    return Trial(tmp_path / "names")


def test_a_reader_of_the_roster_reads_no_lease(trial):
    lease = trial.start_server()
    trial.trust()
    view, expected = trial.reader.list_leases()[lease.key], trial.servers.list_leases(POOL)[lease.key]
    assert (view.key, view.epoch, view.value, view.alive) == (lease.key, 1, lease.value, True)
    assert (view.counter, view.ttl_s) == (expected.counter, expected.ttl_s)
    assert trial.read() == {lease.key: "serving"}


def test_a_change_reaches_the_reader_with_the_next_poll_of_the_registrar(trial):
    lease = trial.start_server(state="loading")
    trial.trust()
    lease.renew({"state": "serving"})
    trial.pass_s(POLL_S)
    assert trial.read() == {lease.key: "serving"}
    other = trial.start_server(1)
    trial.pass_s(POLL_S)
    assert trial.read() == {lease.key: "serving", other.key: "serving"}
    lease.release()
    trial.pass_s(POLL_S)
    assert trial.read() == {other.key: "serving"}


def test_a_server_that_starts_again_has_its_new_epoch(trial):
    old = trial.start_server(url="old")
    trial.trust()
    new = trial.start_server(url="new")
    trial.pass_s(POLL_S)
    assert trial.read() == {old.key: "serving"}
    view = trial.reader.list_leases()[old.key]
    assert (view.epoch, view.value["url"]) == (new.epoch, "new") and new.epoch > old.epoch


def test_a_server_that_does_not_renew_dies_in_the_roster(trial):
    dead, living = trial.start_server(0), trial.start_server(1)
    trial.pass_s(LEASE_TTL_S + 2 * RECHECK_S, (living,))
    trial.reader_names.take_loaded()
    assert trial.read() == {living.key: "serving"}
    assert dead.key in trial.reader.list_leases()


def test_a_roster_that_never_moved_is_not_trusted(trial):
    """A supervisor that is dead may have left it."""
    lease = trial.start_server()
    trial.registrar.poll()
    lease.renew({"state": "loading"})
    assert trial.reader.list_leases()[lease.key].value == {"state": "loading"}
    assert trial.reader_names.take_loaded()


@pytest.mark.parametrize("content", [None, b"", b'{"value": {"term": 1, "count', b"[]", b'{"value": {}}'])
def test_a_roster_that_stays_torn_or_absent_is_replaced_by_the_leases(trial, caplog, content):
    lease = trial.start_server()
    trial.trust()
    whole = trial.file.read_bytes()
    trial.file.unlink() if content is None else trial.file.write_bytes(content)
    assert trial.read() == {lease.key: "serving"}, "the last roster holds for a moment"
    trial.file.write_bytes(whole)
    assert trial.read() == {lease.key: "serving"}

    trial.file.unlink() if content is None else trial.file.write_bytes(content)
    trial.clock.now += STUCK_S + 1
    lease.renew({"state": "loading"})
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            trial.clock.now += 1
            assert trial.reader.list_leases()[lease.key].value == {"state": "loading"}
    assert trial.reader_names.take_loaded()
    assert len(caplog.records) == 1 and POOL in caplog.text

    trial.pass_s(HEARTBEAT_S)
    trial.reader_names.take_loaded()
    assert trial.read() == {lease.key: "loading"}, "the registrar has written it again"


def test_without_its_registrar_the_leases_are_read_and_dead_servers_stay_dead(trial, caplog):
    dead, living = trial.start_server(0), trial.start_server(1)
    trial.pass_s(LEASE_TTL_S + 2 * RECHECK_S, (living,))
    trial.clock.now += STUCK_S + 1  # the registrar was killed
    started = trial.start_server(2)
    with caplog.at_level(logging.INFO):
        alive = {key for key, seen in trial.reader.list_leases().items() if seen.alive}
    assert alive == {living.key, started.key} and dead.key not in alive
    assert len(caplog.records) == 1

    trial.registrar = Registrar(CountingNames(trial.root, trial.clock), [POOL], 2)
    trial.pass_s(POLL_S)
    trial.reader_names.take_loaded()
    assert {*trial.read()} >= {living.key, started.key}


def test_the_roster_of_a_supervisor_that_lost_the_trial_is_ignored(trial):
    lease = trial.start_server(state="loading")
    trial.trust()
    lost, trial.registrar = trial.registrar, Registrar(CountingNames(trial.root, trial.clock), [POOL], 2)
    lost.poll()
    outdated = trial.file.read_bytes().replace(b'"counter":', b'"counter":1')
    trial.pass_s(HEARTBEAT_S)
    lease.renew({"state": "serving"})
    trial.pass_s(POLL_S)
    trial.file.write_bytes(outdated)
    assert trial.read() == {lease.key: "serving"}
    trial.clock.now += STUCK_S + 1
    assert trial.reader.list_leases() and trial.reader_names.take_loaded(), "it is no heartbeat"


def test_terms_may_begin_anew_after_a_while(trial):
    """The directory of the names was removed and written again."""
    trial.registrar = Registrar(trial.registrar_names, [POOL], 9)
    trial.start_server()
    trial.trust()
    trial.registrar = Registrar(trial.registrar_names, [POOL], 1)
    trial.pass_s(STUCK_S + 2 * HEARTBEAT_S)
    trial.reader_names.take_loaded()
    assert trial.read()


def test_a_reader_that_has_just_read_a_newer_epoch_keeps_it(trial):
    old = trial.start_server(url="old")
    trial.registrar.poll()
    trial.reader.list_leases()
    trial.clock.now += HEARTBEAT_S
    trial.registrar.poll()
    outdated = trial.file.read_bytes()
    trial.file.unlink()
    trial.start_server(url="new")
    assert trial.reader.list_leases()[old.key].value["url"] == "new"
    trial.file.write_bytes(outdated)
    trial.reader_names.take_loaded()
    assert trial.read() and trial.reader.list_leases()[old.key].epoch == 2


def test_a_quiet_roster_is_written_as_a_heartbeat_without_fsync(trial, monkeypatch):
    trial.start_server()
    trial.registrar.poll()
    monkeypatch.setattr(os, "fsync", None)
    contents = set()
    for _ in range(round(60 / POLL_S)):
        trial.clock.now += POLL_S
        trial.registrar.poll()
        contents.add(trial.file.read_bytes())
    assert 60 / HEARTBEAT_S <= len(contents) <= 60 / HEARTBEAT_S + 1


def test_a_registrar_reads_a_bounded_number_of_leases_and_changed_ones_first(trial):
    count = 5 * READS_PER_POLL
    leases = trial.start_servers(count)
    while not trial.file.exists():  # the first roster is whole
        trial.registrar.poll()
        assert len(trial.registrar_names.take_loaded()) <= READS_PER_POLL
    assert trial.file.read_text().count("serving") == count
    for _ in range(20):
        trial.clock.now += POLL_S
        trial.registrar.poll()
        assert len(trial.registrar_names.take_loaded()) <= READS_PER_POLL
    changed, started = leases[3], trial.start_server(7)
    changed.renew({"state": "loading"})
    trial.registrar.poll()
    assert {changed.key, started.key} <= {*trial.registrar_names.take_loaded()}


def test_a_lease_whose_inode_seems_unchanged_is_read_soon(trial, monkeypatch):
    """A full disk keeps it, and a file system may reuse it."""
    leases = trial.start_servers(5 * READS_PER_POLL)
    while not trial.file.exists():
        trial.registrar.poll()
    leases[5].value = {"state": "loading"}
    leases[5].path.write_text(leases[5].encode())
    trial.pass_s(2 * RECHECK_S + 6 * POLL_S)
    assert trial.reader.list_leases()[leases[5].key].value == {"state": "loading"}


def test_live_servers_are_not_read_again(trial):
    leases = trial.start_servers(200)
    while not trial.file.exists():
        trial.registrar.poll()
    trial.registrar_names.take_loaded()
    for _ in range(12):
        for lease in leases:
            lease.renew()
        trial.pass_s(LEASE_TTL_S / 6)
    assert not trial.registrar_names.take_loaded()
    assert all(seen.alive and seen.age_s < LEASE_TTL_S for seen in trial.reader.list_leases().values())
    leases[3].renew({"state": "loading"})
    leases[3].renew({"state": "serving"})  # its file may have its old inode again
    trial.pass_s(POLL_S)
    assert trial.registrar_names.take_loaded() == [leases[3].key]


@pytest.mark.parametrize("name", ["rename", "utime"])
def test_a_beat_that_can_not_be_shown_is_written(trial, monkeypatch, name):
    lease = trial.start_server()
    trial.trust()
    lease.renew()

    def fail(*_args, **_more):
        raise OSError(errno.EIO, "no reply")

    monkeypatch.setattr(os, name, fail)
    counter = lease.counter
    lease.renew()
    monkeypatch.undo()
    trial.pass_s(HEARTBEAT_S)
    assert trial.reader.list_leases()[lease.key].counter > counter
    assert trial.registrar_names.take_loaded()
    lease.renew()
    trial.pass_s(HEARTBEAT_S)
    assert trial.reader.list_leases()[lease.key].counter == lease.counter


def test_a_full_disk_costs_the_roster_one_log_line(trial, monkeypatch, caplog):
    trial.start_server()
    trial.trust()
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_args, **_more):
        raise full

    monkeypatch.setattr("hpc_rl.name_resolve.shared_fs.write_atomic", fail)
    with caplog.at_level(logging.WARNING, logger=roster_module.__name__):
        for _ in range(5):
            trial.clock.now += HEARTBEAT_S
            assert trial.registrar.poll()[POOL]
    assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_the_roster_of_a_removed_trial_creates_no_directory(tmp_path):
    folder = tmp_path / "trial"
    folder.mkdir()
    trial = Trial(folder / "names")
    trial.registrar.poll()
    assert trial.file.exists()
    trial.file.unlink()
    trial.file.parent.rmdir()
    trial.root.rmdir()
    folder.rmdir()
    trial.clock.now += HEARTBEAT_S
    trial.registrar.poll()
    assert not folder.exists()


def test_without_a_roster_many_leases_are_read_less_often(trial):
    leases = trial.start_servers(320)
    reads = []
    for _ in range(25):
        trial.reader.list_leases()
        reads.append(len(trial.reader_names.take_loaded()))
        trial.clock.now += 1
    assert [number for number, count in enumerate(reads) if count] == [0, 10, 20]
    assert len(trial.reader.list_leases(at_once=True)) == len(leases) == len(trial.reader_names.take_loaded())


def test_a_roster_is_opened_again_if_it_is_replaced_meanwhile(trial, monkeypatch):
    trial.start_server()
    trial.trust()
    read, errors = os.read, [OSError(errno.ESTALE, "Stale file handle")]

    def fail_once(fd, size):
        if errors:
            raise errors.pop()
        return read(fd, size)

    monkeypatch.setattr(os, "read", fail_once)
    assert trial.reader_names.load_record(POOL) == trial.file.read_bytes() and not errors
