"""Each replica's part of its step: GPUs by the node's names, and whole cores."""

from dataclasses import replace
from pathlib import Path

import pytest
from toy_plans import toy_unit

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.proc import count_oom_kills
from hpc_rl.roles.node_agent import select_cpus, select_gpus, sort_by_core

STEP = [toy_unit("server", index=i, cpus_per_task=2, gpus_per_task=1, gpu_offset=4 + i) for i in range(2)]
CUDA, ROCR = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("variable", "environ", "wanted"),
    [
        (CUDA, {CUDA: "4,5"}, {CUDA: "5"}),
        (CUDA, {CUDA: "MIG-a,MIG-b"}, {CUDA: "MIG-b"}),
        (CUDA, {}, {CUDA: "1"}),
        (ROCR, {ROCR: "4,5"}, {ROCR: "5"}),
        # HIP counts within what ROCR shows: a second variable would hide the GPU
        (ROCR, {ROCR: "4,5", CUDA: "4,5", "GPU_DEVICE_ORDINAL": "4,5"}, {ROCR: "5"}),
        (ROCR, {"GPU_DEVICE_ORDINAL": "2,3"}, {ROCR: "3"}),
    ],
)
def test_the_gpus_of_a_step_are_dealt_out_in_order(variable, environ, wanted):
    assert select_gpus(STEP, STEP[1], {"HOME": "/h", **environ}, variable) == {"HOME": "/h", **wanted}


def test_gpus_that_the_plan_names_win_and_too_few_are_refused():
    named = replace(STEP[1], env={CUDA: "7"})
    assert select_gpus(STEP, named, {CUDA: "4,5"}, CUDA) == {CUDA: "7"}
    without = [replace(unit, gpus_per_task=0) for unit in STEP]
    assert select_gpus(without, without[0], {CUDA: "4,5"}, CUDA) == {CUDA: "4,5"}
    with pytest.raises(ConfigError, match="need 2 GPUs, but CUDA_VISIBLE_DEVICES is 4"):
        select_gpus(STEP, STEP[0], {CUDA: "4"}, CUDA)


def test_a_bound_step_is_dealt_out_core_by_core(tmp_path: Path, monkeypatch):
    for cpu, core in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}.items():  # of two dies
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        for name, text in {"physical_package_id": 0, "core_id": 0, "thread_siblings_list": core}.items():
            (folder / name).write_text(f"{text}\n")
    cpus = sort_by_core({0, 1, 4, 5}, tmp_path)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert [select_cpus(STEP, unit, cpus) for unit in STEP] == [{0, 4}, {1, 5}]
    assert select_cpus(STEP, STEP[0], [*cpus, 8, 9]) == set(), "Slurm did not bind the step"
    assert select_cpus(STEP, STEP[0], cpus[:3]) == set(), "there are too few for all"


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/job_1/step_0", "sys/fs/cgroup/job_1/step_0/memory.events"),
        ("4:memory:/job_1\n0::/", "sys/fs/cgroup/memory/job_1/memory.oom_control"),
    ],
)
def test_kills_for_memory_are_counted_by_either_version_of_cgroups(tmp_path, cgroup, file):
    assert count_oom_kills(tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    assert count_oom_kills(tmp_path) == 0
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("oom_kill_disable 0\noom 5\noom_kill 3\n")
    assert count_oom_kills(tmp_path) == 3
