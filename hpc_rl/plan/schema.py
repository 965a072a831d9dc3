"""Plan: the frozen decision of which process runs where, with what. Stored as plan.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_rl.core.allocation import DEFAULT_POOL

GPU_VARIABLES = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "ROCR_VISIBLE_DEVICES"}


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container that a unit's processes run in."""

    type: Literal["apptainer", "pyxis"]
    image: str  # path on the nodes
    python: str  # interpreter within the image
    program: str  # of apptainer; unused with pyxis
    mounts: list[str]  # `source:target`; the directories of trial and submission are added when it starts
    args: list[str]
    gpu_option: Literal["--nv", "--rocm"] = "--nv"  # of apptainer
    local_dir: str = ""  # where a node copies its image; empty to use the image itself


@dataclass(frozen=True, kw_only=True)
class MpiStart:
    """How the ranks of a unit are started where they find each other by MPI."""

    mpiexec: str = ""  # program; empty where srun starts them
    args: list[str] = field(default_factory=list)  # of mpiexec
    srun_mpi: str = "none"  # srun's --mpi


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One step for the supervisor to start: a server replica, rollout, all trainer ranks, an environment."""

    role: Literal["server", "rollout", "trainer", "environment"]
    index: int = 0  # replica index of the role, counted over all pools
    pool: str = ""  # of a server
    nodes: list[int]  # node indexes within the allocation, in rank order
    tasks_per_node: int = 1
    cpus_per_task: int  # also its OMP_NUM_THREADS
    mem_mb_per_task: int
    gpus_per_task: int = 0
    gpu_offset: int = 0  # first GPU of the unit on each of its nodes
    module: str  # what `python -m` starts
    env: dict[str, str] = field(default_factory=dict)
    srun_args: list[str] = field(default_factory=list)
    container: Container | None = None  # None: the node itself
    mpi: MpiStart | None = None  # None: the ranks find each other without MPI

    @property
    def launch_line(self) -> str:
        """Name of its function in steps.sh."""
        return self.role if self.pool in ("", DEFAULT_POOL) else f"{self.role}_{self.pool}"

    @property
    def step(self) -> tuple[str, int]:
        """What the units of one step have in common: the replicas of a role on a node share one."""
        return self.launch_line, self.nodes[0] if self.by_agent else self.index

    @property
    def by_agent(self) -> bool:
        """Whether an agent on its node starts it, with the other replicas there."""
        return self.role in ("server", "environment") and self.num_tasks == 1

    @property
    def by_mpiexec(self) -> bool:
        return self.mpi is not None and bool(self.mpi.mpiexec)

    @property
    def num_tasks(self) -> int:
        return len(self.nodes) * self.tasks_per_node


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Servers of one model."""

    name: str
    backend: str  # a name of allocation.SERVER_BACKENDS


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes that are requested together, all alike: those of the trial's other roles, or of servers only."""

    name: Literal["trial", "servers"]
    nodes: list[int]  # their indexes, as in the units
    cpus_per_node: int = 0  # largest demand of any of them, the supervisor's share included
    mem_mb_per_node: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is decided before anything is written."""

    experiment_name: str
    trial_name: str
    trainer: Literal["grpo", "teacher", "sft", "rw"]
    allocation: str  # canonical form
    n_nodes: int
    n_gpus_per_node: int
    cpus_per_node: int = 0  # largest demand of any node, supervisor's share included
    mem_mb_per_node: int = 0
    device: Literal["cpu", "cuda"]
    pools: list[Pool] = field(default_factory=list)
    units: list[Unit]
    recover_mode: str
    recover_retries: int
    python: str
    layout: Literal["allocation", "hetjob", "jobs"] = "allocation"
    # In the layouts hetjob and jobs: the nodes of the trial, then the servers'.
    groups: list[Group] = field(default_factory=list)
    threads_per_core: int = 1  # each step is given whole cores, and its CPUs are counted so
    gpu_kind: Literal["nvidia", "amd"] = "nvidia"
    slurm_knows_gpus: bool = True  # false: the units' environment deals them out
    notes: list[str] = field(default_factory=list)  # what was derived or adapted, in words; printed by submit

    @property
    def gpu_variable(self) -> str:
        """Name of the environment variable that shows a process its GPUs."""
        return GPU_VARIABLES[self.gpu_kind]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Return a stored plan."""
        groups = [Group(**group) for group in data["groups"]]
        pools = [Pool(**pool) for pool in data["pools"]]
        return cls(
            **{**data, "units": [_unit(unit) for unit in data["units"]], "groups": groups, "pools": pools}
        )

    def group(self, name: Literal["trial", "servers"]) -> Group:
        """Return a group of nodes; in layout allocation, where there are none, that of all nodes."""
        every = Group(
            name=name,
            nodes=list(range(self.n_nodes)),
            cpus_per_node=self.cpus_per_node,
            mem_mb_per_node=self.mem_mb_per_node,
        )
        return next((group for group in self.groups if group.name == name), every)

    def sharing_step(self, unit: Unit) -> list[Unit]:
        """Return the units of the step of a unit, itself included, in the order of their GPUs.

        One that is not in the plan is alone.
        """
        name = (unit.role, unit.index)
        step = next((one.step for one in self.units if (one.role, one.index) == name), None)
        same = [one for one in self.units if one.step == step]
        return sorted(same, key=lambda one: (one.gpu_offset, one.index)) or [unit]

    def units_on(self, nodes: list[int]) -> list[Unit]:
        """Return the units that run on these nodes, with node indexes that count from 0 there."""
        place = {node: index for index, node in enumerate(nodes)}
        return [
            dataclasses.replace(unit, nodes=[place[node] for node in unit.nodes])
            for unit in self.units
            if set(unit.nodes) <= set(nodes)
        ]


def _unit(data: dict[str, Any]) -> Unit:
    container, mpi = data.get("container"), data.get("mpi")
    parts = {
        "container": Container(**container) if container else None,
        "mpi": MpiStart(**mpi) if mpi else None,
    }
    return Unit(**{**data, **parts})
