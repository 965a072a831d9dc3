"""Records and leases, also on a file system that misbehaves as NFS does, and under several processes at once."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.core.errors import ConfigError, Stale
from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import open_names, shared_fs
from hpc_rl.name_resolve.shared_fs import NameResolve


class Clock:
    """A reader's clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def names(tmp_path, clock):
    return NameResolve(tmp_path / "names", clock)


def test_a_record_is_replaced_as_a_whole(names):
    names.put("a/b", {"x": 1})
    names.put("a/b", {"y": 2})
    assert names.wait("a/b", 0) == {"y": 2}


@pytest.mark.parametrize(
    "key", ["", "/a", "a//b", "a/../b", "..", ".hidden", "a b", "a.json", "a.epoch-1", "ä", "a/" + "x" * 129]
)
def test_keys_that_are_no_safe_file_names_are_refused(names, key):
    with pytest.raises(ConfigError):
        names.put(key, {})
    with pytest.raises(ConfigError):
        names.lease(key, {}, 1.0)


def test_wait_gives_what_comes_or_names_what_did_not(names):
    threading.Timer(0.1, lambda: names.put("late/one", {"ok": True})).start()
    assert names.wait("late/one", 5.0) == {"ok": True}
    with pytest.raises(TimeoutError, match="never/comes"):
        names.wait("never/comes", 0.1)


def test_a_lease_lives_while_its_counter_moves_by_the_readers_clock(names, clock):
    lease = names.lease("server/0", {"url": "u"}, 5.0)
    assert names.list_leases("server")["server/0"].alive
    clock.now += 4
    lease.renew()
    seen = names.list_leases("server")["server/0"]
    assert (seen.alive, seen.value, seen.age_s) == (True, {"url": "u"}, 0)
    clock.now += 6
    seen = names.list_leases("server")["server/0"]
    assert (seen.alive, seen.age_s) == (False, 6)
    lease.renew({"url": "v"})
    seen = names.list_leases("server")["server/0"]
    assert (seen.alive, seen.value) == (True, {"url": "v"})


def test_a_lease_with_beats_lives_while_they_come(names, clock):
    """Its file stays: readers find the beats in a listing."""
    lease = names.lease("server/0", {"url": "u"}, 5.0, has_beats=True)
    content = lease.path.read_bytes()
    for _ in range(3):
        clock.now += 4
        lease.renew()
        seen = names.list_leases("server")["server/0"]
        assert (seen.alive, seen.age_s, seen.counter) == (True, 0, lease.counter)
    assert lease.path.read_bytes() == content
    clock.now += 6
    assert not names.list_leases("server")["server/0"].alive
    lease.renew({"url": "v"})
    seen = names.list_leases("server")["server/0"]
    assert (seen.alive, seen.value, seen.counter) == (True, {"url": "v"}, lease.counter)
    assert names.list_epochs("server")["server/0"].written == lease.counter
    lease.release()
    assert names.list_leases("server") == {}


def test_a_lease_with_beats_survives_the_loss_of_its_folder(names):
    lease = names.lease("server/0", {"url": "u"}, 5.0, has_beats=True)
    names.root.parent.mkdir(exist_ok=True)
    for _ in range(2):
        lease.renew()
        shutil.rmtree(names.root)
        lease.renew()
        assert names.list_leases("server")["server/0"].counter == lease.counter


def test_the_higher_epoch_wins_and_the_lower_one_is_told(names):
    old = names.lease("rollout/0", {"who": "old"}, 5.0)
    new = names.lease("rollout/0", {"who": "new"}, 5.0)
    assert new.epoch > old.epoch
    with pytest.raises(Stale, match="rollout/0"):
        old.renew({"who": "old again"})
    old.release()  # has no effect on the new owner
    assert names.list_leases("rollout/0")["rollout/0"].value == {"who": "new"}
    new.renew()


def test_a_released_lease_is_gone_and_its_epoch_is_not_given_again(names):
    lease = names.lease("owner", {}, 5.0)
    lease.release()
    lease.release()
    assert names.list_leases("owner") == {}
    with pytest.raises(Stale):
        lease.renew()
    assert names.lease("owner", {}, 5.0).epoch == lease.epoch + 1


def test_the_lease_of_a_process_that_exited_ends_before_its_time(names):
    lease = names.lease("server/0", {"attempt": "7.0", "incarnation": 1}, 60.0)
    names.end("server/0", {"attempt": "7.0", "incarnation": 0})
    names.end("server/0", {"attempt": "6.0", "incarnation": 1})
    names.end("server/1", {"attempt": "7.0"})
    assert names.list_leases("server")["server/0"].alive, "it is another process's"
    names.end("server/0", {"attempt": "7.0", "incarnation": 1})
    assert names.list_leases("server") == {}
    with pytest.raises(Stale):
        lease.renew()
    assert names.lease("server/0", {}, 60.0).epoch == 3


def test_only_the_newest_two_epochs_are_kept(names):
    for _ in range(5):
        names.lease("owner", {}, 5.0)
    assert sorted(path.name for path in names.root.iterdir()) == ["owner.epoch-4", "owner.epoch-5"]
    for _ in range(5):
        names.lease("one", {}, 5.0, has_beats=True).renew()
    found = sorted(path.name for path in names.root.glob("one*"))
    assert found == ["one.epoch-4", "one.epoch-4.beat-1-0", "one.epoch-5", "one.epoch-5.beat-1-0"]


def test_a_heartbeat_is_due_six_times_in_the_time_to_live_and_when_the_value_changes(names, clock):
    lease = names.lease("owner", {"x": 1}, 60.0)
    assert not lease.is_due({"x": 1}) and lease.is_due({"x": 2})
    clock.now += 10
    assert lease.is_due() and lease.is_due({"x": 1})
    lease.renew({"x": 2})
    assert not lease.is_due() and not lease.is_due({"x": 2})


def test_leases_of_a_prefix_are_its_own_and_those_below_it(names):
    for key in ("server", "server/0", "server/10", "serverless", "server/0/deeper"):
        names.lease(key, {}, 5.0)
    names.put("server/1", {})
    assert list(names.list_leases("server")) == ["server", "server/0", "server/10"]
    assert list(names.list_leases("server/1")) == []
    assert list(names.list_leases("nothing/here")) == []


def test_of_many_takers_each_has_an_epoch_and_the_last_renews(names):
    barrier, taken = threading.Barrier(16), []

    def take() -> None:
        barrier.wait()
        taken.append(names.lease("owner", {}, 5.0))

    for thread in together(16, take):
        thread.join()
    epochs = [lease.epoch for lease in taken]
    assert len(set(epochs)) == 16
    for lease in taken:
        if lease.epoch == max(epochs):
            lease.renew()
        else:
            with pytest.raises(Stale):
                lease.renew()


def test_one_file_per_key_below_its_prefix(names):
    names.put("trainer/7.0/1", {"port": 5})
    lease = names.lease("server/0", {}, 5.0)
    lease.renew()
    files = {path.relative_to(names.root).as_posix() for path in names.root.rglob("*") if path.is_file()}
    assert files == {"server/0.epoch-1", "trainer/7.0/1.json"}


def test_a_name_that_is_remembered_as_absent_is_found_by_listing(names, monkeypatch):
    NameResolve(names.root).put("a/b", {"x": 1})
    fresh: set[Path] = set()
    scandir, read_bytes = os.scandir, shared_fs._load_bytes

    def listing(path):
        fresh.add(Path(path))
        return scandir(path)

    def cached(path):
        if path.parent not in fresh:
            raise FileNotFoundError(errno.ENOENT, "remembered as absent", str(path))
        return read_bytes(path)

    monkeypatch.setattr(os, "scandir", listing)
    monkeypatch.setattr(shared_fs, "_load_bytes", cached)
    assert names.wait("a/b", 0) == {"x": 1}


@pytest.fixture
def first_call(monkeypatch):
    """`first_call(os, "scandir", answer)`: the first call gives this, or raises it where it is an error."""

    def make(owner, name: str, answer: bytes | OSError) -> None:
        real, calls = getattr(owner, name), []

        def call(path):
            calls.append(path)
            if len(calls) > 1:
                return real(path)
            if isinstance(answer, OSError):
                raise answer
            return answer

        monkeypatch.setattr(owner, name, call)

    return make


def together(number: int, run) -> list[threading.Thread]:
    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


def lose_reply(monkeypatch, name: str, error: OSError) -> None:
    """A call of `os` has its effect, and raises this."""
    real = getattr(os, name)

    def call(source, target):
        real(source, target)
        raise error

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("content", [b"", b'{"value": {"x"', b"[]"])
def test_partial_content_is_read_again_and_never_given_out(names, monkeypatch, first_call, content):
    names.put("a", {"x": 1})
    first_call(shared_fs, "_load_bytes", content)
    assert names.wait("a", 0) == {"x": 1}
    monkeypatch.setattr(shared_fs, "_load_bytes", lambda path: content)
    with pytest.raises(TimeoutError):
        names.wait("a", 0)


def test_a_stale_handle_is_opened_again(names, first_call):
    names.put("a", {"x": 1})
    first_call(shared_fs, "_load_bytes", OSError(errno.ESTALE, "Stale file handle"))
    assert names.wait("a", 0) == {"x": 1}


def test_a_rename_whose_reply_is_lost_has_happened(names, monkeypatch):
    lease = names.lease("owner", {}, 5.0)
    lose_reply(monkeypatch, "replace", OSError(errno.EIO, "no reply"))
    names.put("a", {"x": 1})
    lease.renew({"v": 2})
    monkeypatch.undo()
    assert names.wait("a", 0) == {"x": 1}
    assert names.list_leases("owner")["owner"].value == {"v": 2}


def test_a_rename_that_failed_is_an_error(names, monkeypatch):
    names.put("a", {"x": 1})

    def refuse(source, target):
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="quota"):
        names.put("a", {"x": 2})
    assert names.wait("a", 0) == {"x": 1}
    assert [path.name for path in names.root.iterdir()] == ["a.json"]


def test_a_link_that_was_won_though_the_reply_says_exists(names, monkeypatch):
    lose_reply(monkeypatch, "link", FileExistsError(errno.EEXIST, "says exists"))
    names.put("a", {"x": 1})
    assert names.lease("owner", {}, 5.0).epoch == 1


def test_a_taker_with_an_old_listing_does_not_reuse_an_epoch(names, first_call):
    for _ in range(3):
        names.lease("owner", {}, 5.0)
    first_call(os, "scandir", FileNotFoundError("owner"))
    assert names.lease("owner", {}, 5.0).epoch == 4


def test_unfinished_files_are_not_seen(names):
    names.lease("a/b", {}, 5.0)
    record = json.dumps({"value": {}, "counter": 0, "ttl_s": 5.0, "released": False})
    (names.root / "a" / ".b.epoch-9.456.tmp").write_text(record)
    assert names.list_leases("a")["a/b"].epoch == 1


def test_readers_during_replaces_see_whole_records_only(names):
    names.put("a", {"n": 0, "pad": "x" * 5000})
    seen, over = [], threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.append(names.wait("a", 0))

    readers = together(3, read)
    for n in range(200):
        names.put("a", {"n": n, "pad": "x" * 5000})
    over.set()
    for reader in readers:
        reader.join()
    assert seen and all(one is not None and len(one["pad"]) == 5000 for one in seen)


def test_of_takers_in_several_processes_each_has_epochs_of_its_own(tmp_path):
    code = (
        "import sys\n"
        "from hpc_rl.name_resolve.shared_fs import NameResolve\n"
        "names = NameResolve(sys.argv[1])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(*(names.lease('owner', {}, 1.0).epoch for _ in range(20)))\n"
    )
    argv, pipe = [sys.executable, "-c", code, str(tmp_path)], subprocess.PIPE
    racers = [subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    epochs = [int(one) for racer in racers for one in racer.communicate()[0].split()]
    assert len(set(epochs)) == 60


def test_open_names_by_trial_and_root(tmp_path):
    trial = Trial.of(tmp_path, "me", "exp", "one")
    assert open_names(trial).root == trial.names
    elsewhere = SimpleNamespace(nfs_record_root=str(tmp_path / "records"))
    config = SimpleNamespace(cluster=SimpleNamespace(name_resolve=elsewhere))
    assert open_names(trial, config).root == tmp_path / "records" / "me" / "exp" / "one"


def test_on_a_full_disk_a_lease_is_still_renewed(tmp_path, monkeypatch):
    names = NameResolve(tmp_path)
    lease = names.lease("rollout", {"url": "http://somewhere:1"}, 10.0)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hpc_rl.name_resolve.shared_fs.write_atomic", full)
    before = lease.path.read_text()
    for _ in range(12):  # the count gets longer
        lease.renew()
    assert lease.path.read_text() != before
    seen = names.list_leases("rollout")["rollout"]
    assert seen.alive and seen.value == {"url": "http://somewhere:1"}
    lease.release()
    assert names.list_leases("rollout") == {}


def test_a_removed_directory_is_made_again_by_its_leases_unless_the_trial_was_removed(tmp_path):
    root = tmp_path / "trial" / "names"
    names = NameResolve(root)
    held = names.lease("servers/rollout/0", {"url": "u"})
    shutil.rmtree(root)
    held.renew()
    assert NameResolve(root).list_leases("servers/rollout")["servers/rollout/0"].value == {"url": "u"}
    shutil.rmtree(tmp_path / "trial")
    with pytest.raises(FileNotFoundError):
        held.renew()
    assert not (tmp_path / "trial").exists()


def test_a_lease_that_can_not_be_written_is_not_tried_at_every_look(tmp_path, clock):
    held = NameResolve(tmp_path / "trial" / "names", clock).lease("a/b", {"url": "u"})
    shutil.rmtree(tmp_path / "trial")
    tries = 0
    for _ in range(600):
        clock.now += 0.1
        if held.is_due({"url": "other"}):
            tries += 1
            with pytest.raises(FileNotFoundError):
                held.renew({"url": "other"})
    assert 5 < tries <= 21
