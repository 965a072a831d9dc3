"""Variables of other nodes that a role drops, and the place of compilers' caches."""

import os
from pathlib import Path

import pytest

from hpc_rl.core import node_copies
from hpc_rl.core.errors import ConfigError
from hpc_rl.roles.node_environment import CACHES, NodeDirectory, correct


def test_directories_that_are_not_on_this_node_are_dropped(tmp_path):
    environ = {"TMPDIR": str(tmp_path / "gone"), "XDG_RUNTIME_DIR": "/run/user/none", "HOME": "/not/here"}
    correct(environ)
    assert environ == {"HOME": "/not/here"}
    environ = {"TMPDIR": str(tmp_path)}
    correct(environ)
    assert environ == {"TMPDIR": str(tmp_path)}


@pytest.mark.parametrize("proxy", ["http_proxy", "HTTPS_PROXY"])
def test_a_proxy_stays_for_the_outside_and_not_for_the_trial(proxy):
    environ = {proxy: "http://proxy:3128", "no_proxy": ".site.org,localhost"}
    correct(environ, ["n1", "n2"])
    assert environ[proxy] == "http://proxy:3128"
    assert environ["no_proxy"] == ".site.org,localhost,127.0.0.1,::1,n1,n2"
    assert environ["NO_PROXY"] == "localhost,127.0.0.1,::1,n1,n2"


def test_without_a_proxy_nothing_is_set():
    environ: dict[str, str] = {}
    correct(environ, ["n1"])
    assert environ == {}


def of_job(tmp_path: Path, job: str = "7", **given: str) -> tuple[NodeDirectory, dict[str, str]]:
    environ = {"TMPDIR": str(tmp_path), **given}
    return NodeDirectory(environ, job), environ


def test_caches_are_in_the_jobs_directory_unless_they_are_placed_elsewhere(tmp_path):
    node, environ = of_job(tmp_path, TRITON_CACHE_DIR="/mine")
    assert environ["TRITON_CACHE_DIR"] == "/mine"
    others = CACHES.keys() - {"TRITON_CACHE_DIR"}
    assert all(Path(environ[name]).parent == node.path for name in others)
    assert node.path.parent == tmp_path and node.path.stat().st_mode & 0o777 == 0o700
    node.leave(in_order=True)


def test_the_last_role_that_ends_in_order_removes_it(tmp_path):
    first, second = of_job(tmp_path)[0], of_job(tmp_path)[0]
    (first.path / "triton").mkdir()
    first.leave(in_order=True)
    assert first.path.exists(), "another role uses it"
    second.leave(in_order=False)
    assert first.path.exists(), "its next start reads the caches"
    of_job(tmp_path)[0].leave(in_order=True)
    assert not first.path.exists()


def test_what_a_killed_job_left_is_removed_by_the_next_one_and_what_is_in_use_is_not(tmp_path):
    left, used = of_job(tmp_path, "5")[0], of_job(tmp_path, "6")[0]
    left.leave(in_order=False)
    of_job(tmp_path, "7")[0].leave(in_order=True)
    assert not left.path.exists() and used.path.exists()
    used.leave(in_order=True)


def test_a_directory_of_another_is_not_used(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / f"hpc-rl-{os.getuid()}-7").symlink_to(elsewhere)
    node, environ = of_job(tmp_path)
    assert not environ.keys() & CACHES.keys()
    node.leave(in_order=True)
    open_to_all = tmp_path / f"hpc-rl-{os.getuid()}-8"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert not of_job(tmp_path, "8")[1].keys() & CACHES.keys()
    assert elsewhere.exists() and open_to_all.exists()


def test_a_local_dir_is_where_the_directory_is_made(tmp_path):
    environ = {"DISK": str(tmp_path), "TMPDIR": "/not/here"}
    node = NodeDirectory(environ, "7", "$DISK/below")
    assert node.path == tmp_path / "below" / f"hpc-rl-{os.getuid()}-7"
    assert environ["TRITON_CACHE_DIR"] == str(node.path / "triton")
    node.leave(in_order=True)
    assert not node.path.exists()


def test_a_local_dir_that_cannot_be_used_names_the_option(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"cluster\.local_dir.*is not set on node"):
        NodeDirectory({}, "7", "$SCRATCH/below")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cluster\.local_dir.*can't be used on node"):
        NodeDirectory({}, "7", str(tmp_path / "file"))
    for kind in ("nfs4", "fuse.sshfs", "virtiofs"):
        monkeypatch.setattr(node_copies, "mount_of", lambda path, kind=kind: (kind, []))
        with pytest.raises(ConfigError, match=rf"cluster\.local_dir.* is on {kind}, which nodes share"):
            NodeDirectory({}, "7", str(tmp_path))
