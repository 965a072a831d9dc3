"""One private Slurm per test run, with nothing in its queue at the start of each test."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import extend, look

sys.path.insert(0, str(Path(__file__).parent))  # cluster.py is a program of its own, too

from cluster import Cluster, speak_to
from hosts import HostsCluster, speak_from_login_node
from packages import NoSlurm, Slurm, find_or_fetch

NUM_NODES = 4
# The nodes are hosts of their own, for root. They share /var/tmp, and each has its own /tmp.
ON_HOSTS = bool(os.environ.get("HPC_RL_TEST_SLURM_HOSTS"))
if ON_HOSTS:
    os.environ["PYTEST_DEBUG_TEMPROOT"] = "/var/tmp"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            marker = item.get_closest_marker("one_host")
            if ON_HOSTS and marker:
                item.add_marker(pytest.mark.skip(reason=f"about one host: {marker.args[0]}"))


@pytest.fixture(scope="session")
def slurm_of() -> Callable[[str], Slurm]:
    """`slurm_of("24.11")`; skipped where no Slurm can be had, unless HPC_RL_TEST_REQUIRE names slurm."""

    def find(version: str) -> Slurm:
        try:
            return find_or_fetch(version=version)
        except NoSlurm as error:
            if "slurm" in os.environ.get("HPC_RL_TEST_REQUIRE", ""):
                pytest.fail(f"no Slurm: {error}")
            pytest.skip(f"no Slurm: {error}")

    return find


@pytest.fixture(scope="session")
def running_cluster(slurm_of: Callable[[str], Slurm]) -> Iterator[Cluster]:
    slurm = slurm_of("")
    if ON_HOSTS:
        with HostsCluster.started(slurm, NUM_NODES) as cluster:
            yield cluster
        return
    here = Path(tempfile.mkdtemp(prefix="hpcrl-", dir="/tmp"))  # short: unix sockets lie below it
    cluster = Cluster(here, slurm, NUM_NODES)
    with guarded(here):
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()
            shutil.rmtree(here, ignore_errors=True)


@contextlib.contextmanager
def guarded(here: Path) -> Iterator[None]:
    """A process that takes the cluster down if this one is killed, by whatever: it sees our end of its pipe
    close.
    """
    command = [
        sys.executable,
        str(Path(__file__).with_name("cluster.py")),
        "guard",
        "--dir",
        str(here),
        "--nodes",
        str(NUM_NODES),
    ]
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(b"down")
            guard.stdin.close()
        guard.wait(extend(30))


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster with an empty queue and all its nodes; this process is its client."""
    running_cluster.up()
    if isinstance(running_cluster, HostsCluster):
        speak_from_login_node(running_cluster, monkeypatch)
    else:
        speak_to(running_cluster, monkeypatch)
    yield running_cluster
    running_cluster.cancel_all()


@pytest.fixture
def until() -> Callable[..., None]:
    """`until(condition, timeout_s=90)`: wait for it."""

    def wait(condition: Callable[[], object], timeout_s: float = 90) -> None:
        deadline = time.monotonic() + extend(timeout_s)
        while not look(condition, 0.1):
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s"

    return wait
