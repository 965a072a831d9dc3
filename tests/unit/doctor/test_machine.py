"""Every check of a machine: passed by a good one, and shown to fail (or to warn), with its fix, where
something is wrong.
"""

import os
import resource
import socket
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.core import (
    net,
    node_copies,
)
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.doctor import machine
from hpc_rl.doctor.finding import Requirements, Status, apply_checks
from hpc_rl.doctor.machine import (
    MACHINE_CHECKS,
    LeftoverProcess,
    find_versions,
    list_leftovers,
    measure_cgroup_memory,
)
from hpc_rl.doctor.mpi_check import MpiLook
from hpc_rl.sandbox import Mechanism, Protection, Sandbox

GB = 10**9
Usage = namedtuple("Usage", "total used free")
LIBRARIES = {"torch": "2.9.1+cu128", "transformers": "4.57.0", "safetensors": "0.5", "sglang": "0.5.23",
             "vllm": "0.32.0+cpu", "megatron-core": "0.14.0"}  # fmt: skip
NEEDS = Requirements(
    on_slurm=True, num_nodes=2, cpus=32, gpus=8, mem_mb=128_000, fileroot="/shared/runs", python="python", servers=("sglang",),
    megatron=True, mpi=True, mpiexec="mpiexec", local_dir="/tmp", sandbox="required",
)  # fmt: skip
FREE = resource.RLIM_INFINITY


@pytest.fixture
def good(monkeypatch):
    """A machine on which all is well; call it with what is wrong."""

    def make(**wrong) -> None:
        facts = {
            "python": (3, 12, 1), "libraries": LIBRARIES, "cpus": 64, "gpus": 8, "cgroup": None, "shm": 64 * GB,
            "tmp": 100 * GB, "nofile": (1024, 65536), "nproc": (FREE, FREE), "memlock": (65536, FREE), "bind_error": None,
            "mpi": MpiLook(found="mpiexec of MPICH"), "ports": "32768 60999", "address": "10.0.0.1", "resolves": True, "proxy": "", "leftovers": [],
            "modules": None, "disk": "xfs", "sandbox": Sandbox(Mechanism.NAMESPACES, frozenset(Protection)),
        } | wrong  # fmt: skip
        limits = {
            resource.RLIMIT_NOFILE: facts["nofile"],
            resource.RLIMIT_NPROC: facts["nproc"],
            resource.RLIMIT_MEMLOCK: facts["memlock"],
        }

        def fails(error: Exception | None):
            if error is not None:
                raise error

        def choose_address(num_hosts, interface, peers):
            fails(facts["address"] if isinstance(facts["address"], Exception) else None)
            return facts["address"]

        real_bind, read_text = net.bind, Path.read_text
        monkeypatch.setattr(machine.sys, "version_info", facts["python"])
        monkeypatch.setattr(machine, "find_versions", lambda python: facts["libraries"])
        monkeypatch.setattr(machine.mpi_check, "inspect_mpi", lambda python, mpiexec: facts["mpi"])
        monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: range(facts["cpus"]))
        monkeypatch.setattr(machine, "count_visible_gpus", lambda: (facts["gpus"], "nvidia-smi"))
        monkeypatch.setattr(machine.os, "sysconf", lambda name: 2**20)  # 1 TB as pages times page size
        monkeypatch.setattr(machine, "measure_cgroup_memory", lambda: facts["cgroup"])

        def disk_usage(path):
            return Usage(64 * GB, 0, facts["shm" if path == "/dev/shm" else "tmp"])

        def read_text_or_ports(path, *args, **more):
            return facts["ports"] if path.name == "ip_local_port_range" else read_text(path, *args, **more)

        monkeypatch.setattr(machine.shutil, "disk_usage", disk_usage)
        monkeypatch.setattr(machine.resource, "getrlimit", limits.__getitem__)
        monkeypatch.setattr(machine.net, "bind", lambda: fails(facts["bind_error"]) or real_bind())
        monkeypatch.setattr(Path, "read_text", read_text_or_ports)
        monkeypatch.setattr(machine.net, "choose_address", choose_address)
        error = None if facts["resolves"] else socket.gaierror("unknown")
        monkeypatch.setattr(machine.socket, "getaddrinfo", lambda *_: fails(error))
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", facts["proxy"])
        monkeypatch.setattr(machine, "find_modules_problem", lambda modules: facts["modules"])
        monkeypatch.setattr(node_copies, "mount_of", lambda path: (facts["disk"], []))
        monkeypatch.setattr(machine, "find_sandbox", lambda: facts["sandbox"])
        monkeypatch.setattr(machine, "list_leftovers", lambda: facts["leftovers"])

    return make


MODULES = {"option": "launcher.modules", "kind": Kind.MACHINE}
WRONG = [  # check, what is wrong, how severe, tokens of the finding and of the fix
    ("python", {"python": (3, 9, 2)}, "fail", "3.9.2", "3.11 or newer"),
    ("torch", {"libraries": {**LIBRARIES, "torch": "2.1.0"}}, "fail", "2.1.0", "torch>=2.9"),
    ("torch", {"libraries": {**LIBRARIES, "torch": ""}}, "fail", "torch", "pip install"),
    ("megatron", {"libraries": {**LIBRARIES, "megatron-core": ""}}, "fail", "missing", "megatron-core"),
    ("mpi", {"mpi": MpiLook(problem="mpiexec is not an executable program here")}, "fail", "mpiexec", "mpi4py>=4"),
    ("sglang", {"libraries": {**LIBRARIES, "sglang": ""}}, "fail", "not installed", "inference_server_python"),
    ("vllm", {"libraries": {**LIBRARIES, "vllm": "0.1.0"}}, "warn", "0.1.0", "0.32.0"),
    ("sglang", {"libraries": {**LIBRARIES, "sglang": "0.1.0"}}, "warn", "0.1.0", "0.5.23"),
    ("cpus", {"cpus": 2}, "fail", "2 usable, 32 required", "CPUs"),
    ("gpus", {"gpus": 4}, "fail", "4 visible", "n_gpus_per_node"),
    ("memory", {"cgroup": 8 * GB}, "fail", "8.0 GB usable (control group)", "launcher.slurm.mem"),
    ("shared memory", {"shm": 60 << 20}, "fail", "0.1 GB", "container"),
    ("temporary", {"tmp": 1000}, "warn", "0.0 GB", "TMPDIR"),
    ("local dir", {"disk": "nfs4"}, "fail", "on nfs4, which nodes share", "cluster.local_dir"),
    ("open files", {"nofile": (256, 512)}, "fail", "at most 512", "hard limit"),
    ("open files", {"nofile": (1024, 2048)}, "warn", "2048", "65536"),
    ("processes", {"nproc": (100, 100)}, "fail", "100", "ulimit -u"),
    ("locked memory", {"memlock": (8 << 20, 8 << 20)}, "warn", "8388608", "MEMLOCK"),
    ("ports", {"bind_error": PermissionError(1, "Operation not permitted")}, "fail", "not permitted", "sockets"),
    ("ports", {"ports": "60000 60999"}, "warn", "60000", "ip_local_port_range"),
    ("address", {"address": ConfigError("no route; this host has lo (127.0.0.1)")}, "fail", "127.0.0.1", "interface"),
    ("modules", {"modules": Refusal(**MODULES, why="`module load nope` fails here")}, "fail", "nope", "launcher.modules"),
    ("modules", {"modules": Refusal(**MODULES, why="there is no command", is_note=True)}, "warn", "command", "else correct"),
    ("host name", {"resolves": False}, "warn", socket.gethostname(), "DNS"),
    ("proxy", {"proxy": "http://proxy:3128"}, "warn", "http_proxy", "no_proxy"),
    ("sandbox", {"sandbox": Sandbox(Mechanism.LIMITS, frozenset())}, "fail", "nothing is protected", "Landlock"),
    ("leftovers", {"leftovers": [LeftoverProcess(4711, "python -m hpc_rl.roles.server", "12")]}, "warn",
     "4711 of job 12", "kill 4711"),
]  # fmt: skip


def test_all_is_well_on_a_good_machine(good):
    good()
    findings = apply_checks(MACHINE_CHECKS, NEEDS)
    assert [finding for finding in findings if finding.status is not Status.OK] == []
    assert {finding.check for finding in findings} == {name for name, *_ in WRONG}, "each is shown to fail"


@pytest.mark.parametrize(("name", "wrong", "status", "found", "fix"), WRONG)
def test_a_machine_with_a_fault(good, name, wrong, status, found, fix):
    good(**wrong)
    bad = [finding for finding in apply_checks(MACHINE_CHECKS, NEEDS) if finding.status is not Status.OK]
    assert [finding.check for finding in bad] == [name]
    assert bad[0].status == status and found in bad[0].found and fix in bad[0].fix


def test_an_interpreter_that_is_missing_fails_what_needs_it(good):
    good(libraries="nope is not a program")
    bad = [finding for finding in apply_checks(MACHINE_CHECKS, NEEDS) if finding.status is not Status.OK]
    assert {finding.check for finding in bad} == {"torch", "megatron", "sglang"}
    assert "nope" in bad[0].found and "launcher.python" in bad[0].fix


def test_vllm_that_is_missing_fails_what_needs_it(good):
    good(libraries={**LIBRARIES, "sglang": "", "vllm": ""})
    found = apply_checks(MACHINE_CHECKS, replace(NEEDS, servers=("vllm",)))
    assert [finding.check for finding in found if finding.status is not Status.OK] == ["vllm"]


def test_what_is_not_required_does_not_fail(good):
    good(
        libraries={**LIBRARIES, "megatron-core": "", "sglang": "", "vllm": ""}, gpus=0, memlock=(65536, 65536)
    )
    findings = apply_checks(MACHINE_CHECKS, Requirements(fileroot="/shared/runs"))
    assert not [finding for finding in findings if finding.status is not Status.OK]


def test_a_check_that_the_machine_does_not_allow_is_a_warning():
    def check_secret_place(needs):
        raise PermissionError(13, "Permission denied")

    [finding] = apply_checks([check_secret_place], NEEDS)
    assert (finding.check, finding.status) == ("secret place", Status.WARN) and "denied" in finding.found


def test_this_machine_is_checked_for_real(tmp_path):
    findings = apply_checks(MACHINE_CHECKS, Requirements(fileroot=str(tmp_path), python=sys.executable))
    assert {finding.check for finding in findings} == {name for name, *_ in WRONG}
    by_name = {finding.check: finding for finding in findings}
    assert by_name["python"].status is by_name["torch"].status is by_name["ports"].status is Status.OK


def test_the_address_is_that_of_a_role(monkeypatch):
    asked = []
    monkeypatch.setattr(machine.net, "choose_address", lambda *args: asked.append(args) or "10.0.0.1")
    monkeypatch.setenv("HPC_RL_INTERFACE", "ib0")
    monkeypatch.setattr(
        os, "environ", {**os.environ, "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
    )
    machine.check_address(NEEDS)
    machine.check_address(replace(NEEDS, interface="eth1"))
    assert [(num, interface, peers[:1]) for num, interface, peers in asked] == [
        (2, "ib0", ["n2"]),
        (2, "eth1", ["n2"]),
    ]


def test_the_smallest_memory_limit_above_a_process_counts(tmp_path):
    (tmp_path / "own").write_text("0::/job/step\n")
    (tmp_path / "fs" / "job" / "step").mkdir(parents=True)
    (tmp_path / "fs" / "job" / "memory.max").write_text("1000000\n")
    (tmp_path / "fs" / "job" / "step" / "memory.max").write_text("max\n")
    assert measure_cgroup_memory(tmp_path / "fs", tmp_path / "own") == 1_000_000
    (tmp_path / "own").write_text("5:memory:/job\n")
    (tmp_path / "fs" / "memory" / "job").mkdir(parents=True)
    (tmp_path / "fs" / "memory" / "job" / "memory.limit_in_bytes").write_text("77\n")
    assert measure_cgroup_memory(tmp_path / "fs", tmp_path / "own") == 77


def test_an_interpreter_that_is_none():
    assert "not a program" in find_versions("/no/such/python")


def test_a_process_whose_supervisor_has_ended_is_found_and_no_other(tmp_path):
    """`proc` is made by hand: 10 is held by a supervisor, 11 by 10, 12 by a step daemon, 13 and 15 by none,
    14 is not ours.
    """

    def process(pid: int, parent: int, command: str, comm: str = "python", ours: bool = True) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} ({comm}) S {parent} 0 0")
        (folder / "comm").write_text(f"{comm}\n")
        (folder / "cmdline").write_text(command.replace(" ", "\0") + "\0")
        (folder / "environ").write_text("A=b\0" + ("HPC_RL_STEPS=srun\0SLURM_JOB_ID=7\0" if ours else ""))

    process(5, 1, "python -m hpc_rl.roles.supervisor", ours=False)
    process(6, 1, "slurmstepd: [7.1]", comm="slurmstepd", ours=False)
    process(10, 5, "python -m hpc_rl.roles.rollout")
    process(11, 10, "python -m hpc_rl.roles.rollout_worker")
    process(12, 6, "python -m hpc_rl.roles.server")
    process(13, 1, "sglang::scheduler")
    process(14, 1, "bash", ours=False)
    process(7, 1, "/lib/systemd/systemd --user", comm="systemd", ours=False)
    process(15, 7, "python -m hpc_rl.roles.trainer")
    (tmp_path / "self").mkdir()
    assert [(left.pid, left.job_id) for left in list_leftovers(tmp_path)] == [(13, "7"), (15, "7")]


def test_a_local_dir_is_judged_as_the_roles_judge_it(tmp_path):
    def verdict(local_dir: str, **more) -> tuple[Status, str]:
        finding = apply_checks([machine.check_local_dir], Requirements(local_dir=local_dir, **more))[0]
        return finding.status, finding.found

    assert verdict(str(tmp_path / "below"))[0] == Status.OK
    assert verdict("$NO_SUCH_DISK")[0] != Status.OK and "is not set on node" in verdict("$NO_SUCH_DISK")[1]
    assert verdict("$NO_SUCH_DISK", is_login=True)[0] == Status.OK
    assert "GB free" in verdict(str(tmp_path))[1]


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_gpus_are_counted_by_what_a_process_would_see(monkeypatch, variable):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(variable, "0,3")
    assert machine.count_visible_gpus() == (2, variable)
