"""SharedFsNames on a file system that misbehaves as NFS does, and under several processes at once."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.name_resolve import open_names
from hpc_rl.name_resolve.shared_fs import SharedFsNames
from hpc_rl.trial import Trial


@pytest.fixture
def names(tmp_path):
    return SharedFsNames(tmp_path / "names")


def test_one_file_per_key_below_its_prefix(names):
    names.add("trainer/7.0/1", {"port": 5})
    lease = names.lease("server/0", {}, 5.0)
    lease.renew()
    files = sorted(
        path.relative_to(names.root).as_posix() for path in names.root.rglob("*") if path.is_file()
    )
    assert files == ["server/0.epoch-1", "trainer/7.0/1.json"]


def test_a_name_that_is_remembered_as_absent_is_found_by_listing(names, monkeypatch):
    SharedFsNames(names.root).add("a/b", {"x": 1})
    fresh: set[Path] = set()
    scandir, read_bytes = os.scandir, Path.read_bytes

    def listing(path):
        fresh.add(Path(path))
        return scandir(path)

    def cached(path):
        if path.parent not in fresh:
            raise FileNotFoundError(errno.ENOENT, "remembered as absent", str(path))
        return read_bytes(path)

    monkeypatch.setattr(os, "scandir", listing)
    monkeypatch.setattr(Path, "read_bytes", cached)
    assert names.get("a/b") == {"x": 1}


@pytest.mark.parametrize("content", [b"", b'{"value": {"x"', b"[]"])
def test_partial_content_is_read_again_and_never_given_out(names, monkeypatch, content):
    names.add("a", {"x": 1})
    read_bytes, calls = Path.read_bytes, []

    def partial_first(path):
        calls.append(path)
        return content if len(calls) == 1 else read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", partial_first)
    assert names.get("a") in ({"x": 1}, None)
    monkeypatch.setattr(Path, "read_bytes", lambda path: content)
    assert names.get("a") is None
    assert names.list("") == {}


def test_a_stale_handle_is_opened_again(names, monkeypatch):
    names.add("a", {"x": 1})
    read_bytes, calls = Path.read_bytes, []

    def stale_first(path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", stale_first)
    assert names.get("a") == {"x": 1}


def test_a_rename_whose_reply_is_lost_has_happened(names, monkeypatch):
    lease = names.lease("owner", {}, 5.0)
    replace = os.replace

    def lost_reply(source, target):
        replace(source, target)
        raise OSError(errno.EIO, "no reply")

    monkeypatch.setattr(os, "replace", lost_reply)
    names.add("a", {"x": 1}, replace=True)
    lease.renew({"v": 2})
    monkeypatch.undo()
    assert names.get("a") == {"x": 1}
    assert names.leases("owner")["owner"].value == {"v": 2}


def test_a_rename_that_failed_is_an_error(names, monkeypatch):
    names.add("a", {"x": 1})

    def refuse(source, target):
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="quota"):
        names.add("a", {"x": 2}, replace=True)
    assert names.get("a") == {"x": 1}
    assert [path.name for path in names.root.iterdir()] == ["a.json"]


def test_a_link_that_was_won_though_the_reply_says_exists(names, monkeypatch):
    link = os.link

    def lost_reply(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "says exists")

    monkeypatch.setattr(os, "link", lost_reply)
    names.add("a", {"x": 1})
    assert names.lease("owner", {}, 5.0).epoch == 1


def test_a_taker_with_an_old_listing_does_not_reuse_an_epoch(names, monkeypatch):
    for _ in range(3):
        names.lease("owner", {}, 5.0)
    scandir, calls = os.scandir, []

    def old_first(path):
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", old_first)
    assert names.lease("owner", {}, 5.0).epoch == 4


def test_unfinished_files_are_not_seen(names):
    names.add("a/b", {})
    (names.root / "a" / ".b.json.123.tmp").write_text("{")
    (names.root / "a" / ".c.epoch-9.456.tmp").write_text("{")
    assert list(names.list("")) == ["a/b"]
    assert names.leases("") == {}


def test_readers_during_replaces_see_whole_records_only(names):
    names.add("a", {"n": 0, "pad": "x" * 5000})
    seen, over = [], threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.append(names.get("a"))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for n in range(200):
        names.add("a", {"n": n, "pad": "x" * 5000}, replace=True)
    over.set()
    for reader in readers:
        reader.join()
    assert seen and all(one is not None and len(one["pad"]) == 5000 for one in seen)


def test_of_adders_in_several_processes_one_wins(tmp_path):
    code = (
        "import sys, time\n"
        "from hpc_rl.name_resolve.shared_fs import SharedFsNames\n"
        "names = SharedFsNames(sys.argv[1]); won = 0\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for n in range(20):\n"
        "    try:\n"
        "        names.add(f'race/{n}', {'by': sys.argv[2]}); won += 1\n"
        "    except FileExistsError: pass\n"
        "print(won, names.lease('owner', {}, 1.0).epoch)\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    racers = [subprocess.Popen([*argv, str(n)], stdin=pipe, stdout=pipe, text=True) for n in range(3)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    results = [tuple(map(int, racer.communicate()[0].split())) for racer in racers]
    assert sum(won for won, _ in results) == 20
    assert sorted(epoch for _, epoch in results) == [1, 2, 3]


def test_open_names_by_trial_path_and_root(tmp_path):
    trial = Trial.of(tmp_path, "me", "exp", "one")
    assert open_names(trial).root == trial.names
    assert open_names(str(trial.dir)).root == trial.names
    elsewhere = SimpleNamespace(nfs_record_root=str(tmp_path / "records"))
    config = SimpleNamespace(cluster=SimpleNamespace(name_resolve=elsewhere))
    assert open_names(trial, config).root == tmp_path / "records" / "me" / "exp" / "one"


def test_on_a_full_disk_a_lease_is_still_renewed(tmp_path, monkeypatch):
    names = SharedFsNames(tmp_path)
    lease = names.lease("rollout", {"url": "http://somewhere:1"}, 10.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hpc_rl.name_resolve.shared_fs.write_atomic", full)
    before = lease.path.read_text()
    for _ in range(12):  # the count gets longer
        lease.renew()
    assert lease.path.read_text() != before
    seen = names.leases("rollout")["rollout"]
    assert seen.alive and seen.value == {"url": "http://somewhere:1"}
    lease.release()
    assert names.leases("rollout") == {}
