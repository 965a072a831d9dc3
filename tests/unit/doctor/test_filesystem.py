"""The checks of a directory: for real on a good one, and shown to fail where the file system does not do what
trials need.
"""

import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.doctor import filesystem
from hpc_rl.doctor.filesystem import check_directory, check_mount_options, check_shared, probe_directory
from hpc_rl.doctor.finding import Status, make_finding

NAMES = {
    "fileroot", "shared", "mount options", "rename", "link", "exclusive create", "locks", "sync time", "space", "inodes",
    "file server clock",
}  # fmt: skip


def test_a_good_directory(tmp_path):
    findings = check_directory(tmp_path, on_slurm=False)
    assert {finding.check for finding in findings} == NAMES
    assert [finding for finding in findings if finding.status is Status.FAIL] == []
    assert list(tmp_path.iterdir()) == [], "something was left behind"


def test_a_directory_that_is_not_there_yet_is_probed_by_its_parent(tmp_path):
    findings = {finding.check: finding for finding in probe_directory(tmp_path / "a" / "b", on_slurm=False)}
    assert findings["fileroot"].status is Status.OK and "first submit" in findings["fileroot"].found
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_a_file_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    first = probe_directory(tmp_path / "file" / "x", on_slurm=False)[0]
    assert (first.check, first.status) == ("fileroot", Status.FAIL) and "can't be written" in first.found


def test_a_mount_that_hangs_costs_a_time_limit(tmp_path, monkeypatch):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/bash\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(filesystem.sys, "executable", str(slow))
    [finding] = check_directory(tmp_path, on_slurm=False, timeout_s=0.3)
    assert finding.status is Status.FAIL and "no answer within 0.3 s" in finding.found


def nothing(*_):
    return None


def keeps_old(source, target):
    os.unlink(source)


def unlocked(file, how):
    return None


def late_stat(path):
    return SimpleNamespace(st_mtime=time.time() - 90.0)


def statvfs(**more):
    real = {"f_bavail": 10**9, "f_frsize": 4096, "f_files": 10**9, "f_favail": 10**8} | more
    return lambda path: SimpleNamespace(**real)


WRONG = [  # check, what is replaced by what, how severe, tokens of the finding and of the fix
    ("rename", (os, "replace", keeps_old), "fail", "rename", "another one"),
    ("link", (os, "link", nothing), "fail", "both win", "another one"),
    ("exclusive create", (os, "mkdir", nothing), "fail", "two writers", "another one"),
    ("locks", (fcntl, "flock", unlocked), "warn", "flock does not exclude", "HF_HOME"),
    ("sync time", (filesystem, "SLOW_SYNC_S", -1.0), "warn", "takes", "faster"),
    ("space", (os, "statvfs", statvfs(f_bavail=1)), "fail", "0.0 GB", "remove"),
    ("space", (os, "statvfs", statvfs(f_bavail=10**6)), "warn", "4.1 GB", "recover.keep"),
    ("inodes", (os, "statvfs", statvfs(f_favail=12)), "fail", "12 free", "remove"),
    ("file server clock", (Path, "stat", late_stat), "warn", "-90.0 s", "NTP"),
]


@pytest.mark.parametrize(("name", "replaced", "status", "found", "fix"), WRONG)
def test_a_file_system_with_a_fault(tmp_path, monkeypatch, name, replaced, status, found, fix):
    here = filesystem.DirectoryProbe(tmp_path, tmp_path, tmp_path, on_slurm=True)
    monkeypatch.setattr(*replaced)
    findings = {
        one.check: one for one in (make_finding(check, here) for check in filesystem.DIRECTORY_CHECKS)
    }
    assert findings[name].status == status and found in findings[name].found and fix in findings[name].fix


def test_every_check_of_a_directory_is_shown_to_fail():
    assert {name for name, *_ in WRONG} == NAMES - {"fileroot", "shared", "mount options"}


def test_mounts_that_are_not_shared():
    root = Path("/shared/runs")
    for kind in ("nfs4", "virtiofs", "fuse.sshfs"):
        assert check_shared(root, kind, on_slurm=True).status is Status.OK
    assert check_shared(root, "ext4", on_slurm=False).status is Status.OK
    volatile, local = check_shared(root, "tmpfs", on_slurm=True), check_shared(root, "ext4", on_slurm=True)
    assert volatile.status is Status.FAIL and "shared file system" in volatile.fix
    assert local.status is Status.WARN and "--allocation" in local.fix


def test_mount_options_that_break_locks():
    assert check_mount_options(["rw", "hard"]).status is Status.OK
    bad = check_mount_options(["rw", "local_lock=all"])
    assert bad.status is Status.WARN and "local_lock=all" in bad.found and "HF_HOME" in bad.fix
