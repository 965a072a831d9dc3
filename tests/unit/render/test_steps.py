"""The launch line of each role, as received by a fake srun; and the plan in words."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from job_scripts import write_programs
from launch_lines import write_steps
from toy_plans import toy_plan, toy_unit

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import Trial
from hpc_rl.plan.schema import Group, MpiStart, Unit
from hpc_rl.render.lint import find_problems
from hpc_rl.render.steps import make_plan_lines

GPUS = {"n_gpus_per_node": 8}


def unit(role: str = "trainer", tasks: int = 1, nodes: tuple[int, ...] = (0,), gpus: int = 0, **more) -> Unit:
    size = {"tasks_per_node": tasks, "nodes": list(nodes), "gpus_per_task": gpus}
    return toy_unit(role, **{**size, "cpus_per_task": 3, "mem_mb_per_task": 10, **more})


def srun(
    tmp_path: Path, *units: Unit, role: str = "trainer", component: str = "", replicas: int = 1, **plan
) -> list[str]:
    """The arguments of the srun of a role, the program's last."""
    script = write_steps(Trial(tmp_path / "it's a $(trial)"), *units, **plan)
    assert find_problems({"steps.sh": script.read_text()}) == []
    write_programs(tmp_path, {"srun": '#!/bin/bash\nprintf "%s\\0" "$@"\n'})
    step = [role, f"{role}-0.3", "a2,b7", "/l%%/rank%t.log", component, str(replicas), "-m", "a module"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script, *step], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_the_srun_line_of_a_unit_on_two_nodes(tmp_path):
    argv = srun(tmp_path, unit(tasks=2, nodes=(1, 2), gpus=2), **GPUS)
    assert argv == [
        *("--job-name=trainer-0.3", "--nodelist=a2,b7", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"),
        *("--cpus-per-task=3", "--gpus-per-node=4", "--mem=0", "--exact", "--distribution=block:block"),
        *("--output=/l%%/rank%t.log",),
        *("--kill-on-bad-exit=0", "--wait=30", "--no-kill=off", "--export=ALL", "--mpi=none", "--input=all"),
        *("python", "-m", "a module"),
    ]


def test_the_users_srun_options_come_last(tmp_path):
    argv = srun(tmp_path, unit(srun_args=["--mpi=pmix", "--comment=a b"]))
    assert argv[-5:] == ["--mpi=pmix", "--comment=a b", "python", "-m", "a module"]


def test_servers_overlap_the_trainer_whose_gpus_they_share(tmp_path):
    both = (unit(tasks=8, gpus=1), unit(role="server", gpus=8))
    for allocation, overlaps in (("sglang:t8|fsdp:d8", True), ("sglang:t8+fsdp:d8", False)):
        plan = {**GPUS, "allocation": allocation}
        assert ("--overlap" in srun(tmp_path, *both, role="server", **plan)) == overlaps
        assert "--overlap" not in srun(tmp_path, *both, **plan)
        in_words = [
            line for line in make_plan_lines(toy_plan(list(both), "python", **plan)) if "turns" in line
        ]
        assert bool(in_words) == overlaps


def test_a_step_states_gpus_only_in_a_job_that_has_some(tmp_path):
    both = (unit(gpus=1), unit(role="rollout"))
    assert "--gpus-per-node=0" in srun(tmp_path, *both, role="rollout", **GPUS)
    for plan in ({}, {**GPUS, "slurm_knows_gpus": False}):
        units = both if plan else (unit(), unit(role="rollout"))
        assert not any("gpu" in flag for flag in srun(tmp_path, *units, **plan))
    # In layout jobs the trainer's job may have none though the servers' has.
    size = {"cpus_per_node": 1, "mem_mb_per_node": 1}
    groups = [Group(name=name, nodes=[node], **size) for node, name in enumerate(("trial", "servers"))]
    of_jobs = {"layout": "jobs", "groups": groups, **GPUS}
    units = (unit(), unit(role="server", nodes=(1,), gpus=1))
    assert not any("gpu" in flag for flag in srun(tmp_path, *units, **of_jobs))
    for replicas in (1, 8):
        argv = srun(tmp_path, *units, role="server", replicas=replicas, **of_jobs)
        assert f"--gpus-per-node={replicas}" in argv


def test_a_step_of_a_heterogeneous_job_names_its_component(tmp_path):
    assert "--het-group=1" in srun(tmp_path, unit(), component="1", layout="hetjob")
    assert not any(flag.startswith("--het-group") for flag in srun(tmp_path, unit()))


def test_units_of_a_role_that_differ_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="processes of server differ"):
        srun(tmp_path, unit(role="server"), unit(role="server", index=1, cpus_per_task=4))


def test_each_pool_has_a_launch_line_of_its_own(tmp_path):
    student = unit(role="server", index=1, cpus_per_task=4, pool="student")
    pools = [unit(role="server", pool="teacher"), student]
    assert "--cpus-per-task=3" in srun(tmp_path, *pools, role="server_teacher")
    assert "--cpus-per-task=4" in srun(tmp_path, *pools, role="server_student")
    assert "--cpus-per-task=12" in srun(tmp_path, *pools, role="server_student", replicas=3)
    lines = make_plan_lines(toy_plan(pools, "python"))
    assert lines[1:] == [
        "node 0  server      server 0 of pool teacher: 1 process, 3 CPUs, 0 GPUs, 10 MB",
        "node 0  server      server 1 of pool student: 1 process, 4 CPUs, 0 GPUs, 10 MB",
    ]


def test_a_role_that_the_trial_has_not_is_an_error(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        srun(tmp_path, unit(), role="server")
    assert caught.value.returncode == 78 and "no role server" in caught.value.stderr


def test_the_plan_in_words():
    nodes = enumerate((1, 2, 2, 3, 3))
    servers = [unit(role="server", index=index, nodes=(node,), gpus=1) for index, node in nodes]
    units = [*servers, unit(role="rollout"), unit(tasks=8, nodes=(0, 1), gpus=1)]
    assert make_plan_lines(toy_plan(units, "python", n_nodes=4)) == [
        "node 0     supervisor  1 process, 1 CPU, 1024 MB",
        "nodes 0-1  trainer     8 processes on each node, each 3 CPUs, 1 GPU, 10 MB",
        "node 0     rollout     1 process, 3 CPUs, 0 GPUs, 10 MB",
        "node 1     server      server 0: 1 process, 3 CPUs, 1 GPU, 10 MB",
        "nodes 2-3  server      server 1-4: 2 replicas on each node, 1 process, 3 CPUs, 1 GPU, 10 MB",
    ]


OPEN_MPI, HYDRA = "mpiexec (Open MPI) 5.0.11", "HYDRA build details:\n    Version: 5.0.2"


def mpiexec(
    tmp_path: Path, *units: Unit, says: str, scheduler: str = "slurm", **plan
) -> tuple[list[str], dict]:
    """The arguments and environment of the trainer's mpiexec, which prints this version."""
    script = write_steps(Trial(tmp_path / "a trial"), *units, scheduler=scheduler, **plan)
    assert find_problems({"steps.sh": script.read_text()}) == []
    program = '#!/bin/bash\nif [[ $1 == --version ]]; then cat "$0.version"; else printf "%s\\0" "$@"; env >"$0.env"; fi\n'
    write_programs(tmp_path, {"mpi exec": program})
    (tmp_path / "mpi exec.version").write_text(says)
    outer = ["PMI_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "SLURM_PROCID"]
    outer += ["SLURM_STEP_ID"]
    kept = {
        "OMPI_MCA_btl": "tcp",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_GPUS_PER_NODE": "8",
    }
    env = {"PATH": os.environ["PATH"], **dict.fromkeys(outer, "5"), **kept}
    step = ["trainer", "trainer-0.3", "a2,b7", "", "", "1", "-m", "a module"]
    done = subprocess.run(["bash", script, *step], env=env, capture_output=True, text=True, check=True)
    lines = (tmp_path / "mpi exec.env").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    assert not found.keys() & set(outer) and found["OMPI_MCA_btl"] == "tcp"
    return done.stdout.split("\0")[:-1], found


def by_mpi(tmp_path: Path, **more) -> Unit:
    mpi = MpiStart(mpiexec=str(tmp_path / "mpi exec"), args=["--mca", "a b"])
    return replace(unit(tasks=2, nodes=(1, 2), **more), mpi=mpi)


@pytest.mark.parametrize(
    ("says", "hosts"),
    [
        (OPEN_MPI, ["--host", "a2:2,b7:2", "--map-by", "ppr:2:node", "--bind-to", "none"]),
        (HYDRA, ["-hosts", "a2,b7", "-ppn", "2"]),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10", ["-hosts", "a2,b7", "-ppn", "2"]),
    ],
)
def test_mpiexec_gets_hosts_and_ranks_as_its_implementation_takes_them(tmp_path, says, hosts):
    argv, env = mpiexec(tmp_path, by_mpi(tmp_path, gpus=2), says=says, **GPUS)
    assert argv == ["-n", "4", *hosts, "--mca", "a b", "python", "-m", "a module"]
    own = {name: env[name] for name in env if name.startswith(("SLURM_", "SRUN_"))}
    of_job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_TASKS_PER_NODE": "2(x4)"}
    of_step = {"SLURM_EXACT": "1", "SLURM_MEM_PER_NODE": "0", "SLURM_GPUS_PER_NODE": "4"}
    assert own == {**of_job, **of_step, "SLURM_CPUS_PER_TASK": "6", "SRUN_CPUS_PER_TASK": "6"}


def test_without_slurm_mpiexec_starts_all_ranks_here(tmp_path):
    argv, env = mpiexec(tmp_path, by_mpi(tmp_path), says=OPEN_MPI, scheduler="local")
    assert argv[2:4] == ["--host", "localhost:2"]
    assert not [name for name in env if name.startswith("SLURM_")], "it would start them by srun"


def test_an_mpiexec_that_is_none_is_refused(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        mpiexec(tmp_path, by_mpi(tmp_path), says="gforker 1.0")
    assert caught.value.returncode == 78 and "neither Open MPI, MPICH nor Intel MPI" in caught.value.stderr


def test_srun_is_told_which_mpi_the_ranks_have(tmp_path):
    assert "--mpi=pmix" in srun(tmp_path, replace(unit(), mpi=MpiStart(srun_mpi="pmix")))
    assert "--mpi=none" in srun(tmp_path, unit())
