"""Every check of the doctor: well where all is well, and shown to fail (or to warn), with its fix, by a fixture of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_rl.doctor import checks, job_probe, slurm_facts
from hpc_rl.doctor.facts import UNLIMITED, Facts, Leftover
from hpc_rl.doctor.filesystem import FileSystem
from hpc_rl.doctor.finding import Status, Wanted
from hpc_rl.doctor.job_probe import Nodes, Report
from hpc_rl.doctor.node import Seen
from hpc_rl.doctor.slurm_facts import Cluster, Partition

GB = 10**9
LIBRARIES = {"python": "3.12.1", "torch": "2.9.1+cu128", "transformers": "4.57.0", "safetensors": "0.5", "sglang": "0.5.23",
             "megatron-core": "0.14.0", "tensorboard": "2.20"}  # fmt: skip
GOOD_FS = FileSystem(
    path="/shared/runs", kind="nfs4", options=["rw", "hard"], rename=True, link=True, exclusive=True, flock=True, fsync_s=0.01,
    free_bytes=500 * GB, free_inodes=10**7, skew_s=0.1,
)  # fmt: skip
GOOD = Facts(
    host="login1", node="n1", python="3.12.1", packages={"PyYAML": "6.0"}, trainer=LIBRARIES, server=LIBRARIES,
    state_dir="/home/u/.local/state/hpc-rl", encoding="utf-8", time_zone="UTC +0000", cpus=64, gpus=8, gpus_from="nvidia-smi",
    mem_bytes=256 * GB, shm_bytes=64 * GB, shm_free=64 * GB, tmp="/tmp", tmp_free=100 * GB, nofile=(65536, 65536),
    nproc=(UNLIMITED, UNLIMITED), memlock=(UNLIMITED, UNLIMITED), port=40000, port_range=(32768, 60999), address="10.0.0.1",
    fs=GOOD_FS,
)  # fmt: skip
WANTED = Wanted(
    on_slurm=True, num_nodes=2, cpus=32, gpus=8, mem_mb=128_000, fileroot="/shared/runs", python="python", sglang=True,
    megatron=True, partition="gpu",
)  # fmt: skip

MACHINE = [  # check, what is wrong, how bad, words of the finding, words of the fix
    ("python", {"python": "3.9.2"}, "fail", "3.9.2", "3.11 or newer"),
    ("packages", {"packages": {"PyYAML": "", "rich": "13"}}, "fail", "PyYAML", "pip install"),
    ("templates", {"templates": False}, "fail", "templates", "reinstall"),
    ("torch", {"trainer": {**LIBRARIES, "torch": "2.1.0"}}, "fail", "2.1.0", "torch>=2.9"),
    ("torch", {"trainer": {**LIBRARIES, "torch": ""}}, "fail", "torch", "pip install"),
    ("torch", {"trainer": "nope is not a program"}, "fail", "nope", "launcher.python"),
    ("megatron", {"trainer": {**LIBRARIES, "megatron-core": ""}}, "fail", "missing", "megatron-core"),
    ("sglang", {"server": {**LIBRARIES, "sglang": ""}}, "fail", "not installed", "inference_server_python"),
    ("sglang", {"server": {**LIBRARIES, "sglang": "0.1.0"}}, "warn", "0.1.0", "0.5.23"),
    ("state directory", {"state_error": "Permission denied"}, "warn", "Permission denied", "XDG_STATE_HOME"),
    ("xdg", {"xdg_relative": ["XDG_STATE_HOME"]}, "warn", "XDG_STATE_HOME", "absolute"),
    ("variables", {"leaking": ["SBATCH_PARTITION"]}, "warn", "SBATCH_PARTITION", "launcher.slurm"),
    ("proxy", {"proxies": ["http_proxy"]}, "warn", "http_proxy", "no_proxy"),
    ("encoding", {"encoding": "ascii"}, "warn", "ascii", "C.UTF-8"),
    ("time zone", {"zone_error": "Mars/Olympus"}, "warn", "Mars/Olympus", "zoneinfo"),
    ("cpus", {"cpus": 2}, "fail", "2 usable, 32 wanted", "CPUs"),
    ("gpus", {"gpus": 4}, "fail", "4 visible", "n_gpus_per_node"),
    ("memory", {"cgroup_bytes": 8 * GB}, "fail", "8.0 GB usable (control group)", "launcher.slurm.mem"),
    ("shared memory", {"shm_bytes": 64 << 20, "shm_free": 60 << 20}, "fail", "0.1 GB", "container"),
    ("temporary", {"tmp_free": 1000}, "warn", "/tmp", "TMPDIR"),
    ("open files", {"nofile": (256, 512)}, "fail", "256", "ulimit -n"),
    ("open files", {"nofile": (1024, 2048)}, "warn", "2048", "65536"),
    ("processes", {"nproc": (100, 100)}, "fail", "100", "ulimit -u"),
    ("locked memory", {"memlock": (8 << 20, 8 << 20)}, "warn", "8388608", "MEMLOCK"),
    ("ports", {"port_error": "Operation not permitted"}, "fail", "not permitted", "sockets"),
    ("ports", {"port_range": (60000, 60999)}, "warn", "60000", "ip_local_port_range"),
    ("address", {"address_error": "no route; this host has lo (127.0.0.1)"}, "fail", "127.0.0.1", "interface"),
    ("host name", {"resolves": False}, "warn", "login1", "DNS"),
    ("leftovers", {"leftovers": [Leftover(4711, "python -m hpc_rl.app.server", "12")]}, "warn", "4711 of job 12", "kill 4711"),
    ("fileroot", {"fs": replace(GOOD_FS, error="Read-only file system")}, "fail", "Read-only", "cluster.fileroot"),
    ("shared", {"fs": replace(GOOD_FS, kind="tmpfs")}, "fail", "tmpfs", "shared file system"),
    ("shared", {"fs": replace(GOOD_FS, kind="ext4")}, "warn", "ext4", "--allocation"),
    ("mount options", {"fs": replace(GOOD_FS, options=["rw", "local_lock=all"])}, "warn", "local_lock=all", "caches"),
    ("rename", {"fs": replace(GOOD_FS, rename=False)}, "fail", "rename", "another one"),
    ("link", {"fs": replace(GOOD_FS, link=False)}, "fail", "both win", "another one"),
    ("exclusive create", {"fs": replace(GOOD_FS, exclusive=False)}, "fail", "twice", "another one"),
    ("locks", {"fs": replace(GOOD_FS, flock=False)}, "warn", "nobody", "caches"),
    ("sync time", {"fs": replace(GOOD_FS, fsync_s=3.2)}, "warn", "3.2 s", "faster"),
    ("space", {"fs": replace(GOOD_FS, free_bytes=10**6)}, "fail", "0.0 GB", "remove"),
    ("space", {"fs": replace(GOOD_FS, free_bytes=5 * GB)}, "warn", "5.0 GB", "recover.keep"),
    ("inodes", {"fs": replace(GOOD_FS, free_inodes=12)}, "fail", "12 free", "remove"),
    ("file server's clock", {"fs": replace(GOOD_FS, skew_s=-90.0)}, "warn", "-90.0 s", "NTP"),
]  # fmt: skip
ALL = (*checks.HERE_ONLY, *checks.MACHINE, *checks.DIRECTORY)


def one(findings, name):
    found = [finding for finding in findings if finding.check == name]
    assert len(found) == 1, f"{len(found)} findings are called {name}"
    return found[0]


def assert_finding(finding, status, found, fix):
    assert finding.status == status
    assert found in finding.found
    assert fix in finding.fix


def test_all_is_well_on_a_good_machine():
    findings = checks.judge(GOOD, WANTED, ALL)
    assert [finding for finding in findings if finding.status is not Status.OK] == []
    assert len({finding.check for finding in findings}) == len(findings) >= 15


@pytest.mark.parametrize(("name", "wrong", "status", "found", "fix"), MACHINE)
def test_a_machine_that_is_not_well(name, wrong, status, found, fix):
    findings = checks.judge(replace(GOOD, **wrong), WANTED, ALL)
    assert_finding(one(findings, name), status, found, fix)
    others = {finding.check for finding in findings if finding.status is not Status.OK} - {name}
    follow = {"fileroot": {"link", "rename", "exclusive create", "space"}, "torch": {"megatron"}}
    assert others <= follow.get(name, set())


def test_every_check_of_a_machine_is_shown_to_fail():
    assert {name for name, *_ in MACHINE} == {finding.check for finding in checks.judge(GOOD, WANTED, ALL)}


def test_what_nothing_asks_for_is_no_failure():
    bare = replace(
        GOOD,
        server="no such program",
        trainer={**LIBRARIES, "megatron-core": ""},
        gpus=0,
        address="127.0.0.1",
    )
    findings = checks.judge(bare, Wanted(fileroot="/shared/runs"), ALL)
    assert not [finding for finding in findings if finding.status is Status.FAIL]


# --- Slurm ---------------------------------------------------------------------------------------------------------------

GPU = Partition("gpu", False, True, "1-00:00:00", 4, 64, 500_000, "gpu:h100:8(S:0-1)")
WELL = Cluster(
    version="23.11.4",
    controllers=["Slurmctld(primary) at ctl is UP"],
    partitions=[GPU, replace(GPU, name="cpu", gres="")],
)
SLURM = [
    ("slurm programs", {"missing": ["sbatch", "scancel"]}, {}, "fail", "sbatch, scancel", "module"),
    ("slurm version", {"version": "19.05.5"}, {}, "fail", "19.05.5", "20.11"),
    ("slurm version", {"version": "21.08.8"}, {}, "warn", "21.08.8", "22.05"),
    ("slurm controller", {"error": "Unable to contact slurm controller"}, {}, "fail", "Unable", "munge"),
    (
        "slurm controller",
        {"controllers": ["Slurmctld(primary) at ctl is DOWN"]},
        {},
        "warn",
        "DOWN",
        "admins",
    ),
    (
        "slurm accounting",
        {"accounting": "Slurm accounting storage is disabled"},
        {},
        "warn",
        "disabled",
        "without it",
    ),
    ("partition", {}, {"partition": "gpus"}, "fail", "gpus is not known", "cpu, gpu"),
    ("partition", {"partitions": [replace(GPU, up=False)]}, {}, "fail", "gpu is down", "admins"),
    ("partition", {}, {"partition": ""}, "warn", "no default", "launcher.slurm.partition"),
    ("nodes", {}, {"num_nodes": 5}, "fail", "4 with", "cluster.n_nodes"),
    ("nodes", {}, {"gpus": 16}, "fail", "0 with", "8 GPUs"),
]


def test_all_is_well_with_a_good_cluster():
    assert {finding.status for finding in slurm_facts.judge(WELL, WANTED)} == {Status.OK}
    assert {name for name, *_ in SLURM} == {finding.check for finding in slurm_facts.judge(WELL, WANTED)}


@pytest.mark.parametrize(("name", "wrong", "wish", "status", "found", "fix"), SLURM)
def test_a_cluster_that_is_not_well(name, wrong, wish, status, found, fix):
    assert_finding(
        one(slurm_facts.judge(replace(WELL, **wrong), replace(WANTED, **wish)), name), status, found, fix
    )


def test_no_slurm_is_fine_where_none_is_wanted():
    nothing = Cluster(missing=list(slurm_facts.PROGRAMS))
    assert [finding.status for finding in slurm_facts.judge(nothing, Wanted())] == [Status.OK]
    assert [finding.status for finding in slurm_facts.judge(nothing, WANTED)] == [Status.FAIL]


# --- nodes ---------------------------------------------------------------------------------------------------------------


def nodes(*seen: Seen, num_nodes: int = 3, complaint: str = "", facts=lambda rank: {}) -> Nodes:
    """Three nodes that see each other well, but for what is given."""
    given = {one.rank: one for one in seen}
    reports = []
    for rank in range(3):
        default = Seen(
            rank, name_s=0.2, won=["open", "link", "mkdir"] if rank == 0 else [], lock=False, reached=2
        )
        reports.append(Report(replace(GOOD, node=f"n{rank}", **facts(rank)), given.get(rank, default)))
    return Nodes(reports[: num_nodes and 3], num_nodes, complaint)


FINE = Seen(1, name_s=0.2, lock=False, reached=2)
TOGETHER = [
    (
        "nodes reported",
        nodes(num_nodes=4, complaint="srun: error: node n3 is down"),
        "fail",
        "3 of 4; srun said: srun: error",
        "exclude",
    ),
    ("visible to all", nodes(replace(FINE, missing=[2])), "fail", "n1 did not see", "one file system"),
    ("visible soon", nodes(replace(FINE, name_s=None)), "fail", "did not show", "acdirmax"),
    ("visible soon", nodes(replace(FINE, name_s=31.0)), "warn", "31.0 s", "acdirmax"),
    ("absent names", nodes(replace(FINE, stale_name_s=None)), "warn", "more than 5 s", "exists"),
    ("replaced files", nodes(replace(FINE, stale_content_s=None)), "fail", "old content", "nocto"),
    ("replaced files", nodes(replace(FINE, stale_content_s=4.0)), "warn", "4.0 s", "acregmax"),
    ("one winner", nodes(replace(FINE, won=["link"])), "fail", "link was won by n0, n1", "both own"),
    ("lock scope", nodes(replace(FINE, lock=True)), "warn", "does not keep out n1", "HF_HOME"),
    ("clocks", nodes(replace(FINE, skew_s=40.0)), "warn", "n0 and n1 are 40.0 s apart", "NTP"),
    ("time zones", nodes(facts=lambda rank: {"time_zone": f"Z{rank}"}), "warn", "Z0, Z1, Z2", "TZ"),
    (
        "network",
        nodes(replace(FINE, unreachable=["10.0.0.3:4000 of node 2"])),
        "fail",
        "n1 can't reach 10.0.0.3",
        "firewall",
    ),
    (
        "same software",
        nodes(facts=lambda rank: {"python": f"3.1{rank + 1}.0"}),
        "fail",
        "torch 2.9.1+cu128 on n1",
        "launcher.python",
    ),
]


def test_all_is_well_with_good_nodes():
    findings = job_probe.judge(nodes())
    assert [finding for finding in findings if finding.status is not Status.OK] == []
    assert {name for name, *_ in TOGETHER} == {finding.check for finding in findings}


@pytest.mark.parametrize(("name", "wrong", "status", "found", "fix"), TOGETHER)
def test_nodes_that_are_not_well(name, wrong, status, found, fix):
    assert_finding(one(job_probe.judge(wrong), name), status, found, fix)


def test_where_no_node_came_that_is_all_that_is_said():
    [finding] = job_probe.judge(Nodes([], 2, "Requested node configuration is not available"))
    assert (finding.status, finding.check) == (Status.FAIL, "nodes reported")
    assert "not available" in finding.found
