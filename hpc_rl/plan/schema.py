"""The plan: a frozen decision about processes, their nodes and resources. Stored as plan.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hpc_rl.core.allocation import DEFAULT_POOL, parse
from hpc_rl.core.refusal import Refusal, make_note

GPU_VARIABLES = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "ROCR_VISIBLE_DEVICES"}


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container that a unit's processes run in."""

    type: Literal["apptainer", "pyxis"]
    image: str  # path on the nodes
    python: str  # interpreter within the image
    program: str  # of apptainer; unused with pyxis
    mounts: list[str]  # `source:target`; the start adds the directories of trial and submission
    args: list[str]
    gpu_option: Literal["--nv", "--rocm"] = "--nv"  # of apptainer
    local_dir: str = ""  # where a node copies its image; empty to use the image itself


@dataclass(frozen=True, kw_only=True)
class MpiStart:
    """How to start the ranks of a unit that find each other by MPI."""

    mpiexec: str = ""  # program; empty if srun starts them
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
    cpus_per_task: int  # also its OMP_NUM_THREADS; without a scheduler at most its share of the CPUs
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
        """Name of the unit's function in steps.sh."""
        return self.role if self.pool in ("", DEFAULT_POOL) else f"{self.role}_{self.pool}"

    @property
    def step(self) -> tuple[str, int]:
        """Key of the unit's step; the replicas of a role on a node share a step."""
        return self.launch_line, self.nodes[0] if self.by_agent else self.index

    @property
    def by_agent(self) -> bool:
        """Whether an agent on its node starts the unit, together with the other replicas there."""
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
    backend: str  # a name of core.backends.SERVER_BACKENDS


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes of one kind that are requested together: for the trial's other roles, or for servers only."""

    name: Literal["trial", "servers"]
    nodes: list[int]  # indexes, as in the units
    cpus_per_node: int = 0  # largest demand of a node, including the supervisor's share
    mem_mb_per_node: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions, made before anything is written."""

    experiment_name: str
    trial_name: str
    trainer: Literal["grpo", "teacher", "sft", "rw", "dpo"]
    purpose: Literal["train", "generate", "evaluate", "serve"] = "train"
    allocation: str  # canonical form
    n_nodes: int
    n_gpus_per_node: int
    cpus_per_node: int = 0  # largest demand of a node, including the supervisor's share
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
    threads_per_core: int = 1  # each step gets whole cores, and its CPUs are counted that way
    gpu_kind: Literal["nvidia", "amd"] = "nvidia"
    slurm_knows_gpus: bool = True  # false: the units' environment assigns the GPUs
    # derived and adapted values, printed by submit
    notes: list[Refusal] = field(default_factory=list, compare=False)

    @property
    def gpu_variable(self) -> str:
        """Name of the environment variable that tells a process its GPUs."""
        return GPU_VARIABLES[self.gpu_kind]

    @property
    def shares_gpus(self) -> bool:
        """Whether servers and trainer use the same GPUs in turn."""
        return parse(self.allocation).colocate

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"notes": [str(note) for note in self.notes]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Return a stored plan."""
        groups = [Group(**group) for group in data["groups"]]
        pools = [Pool(**pool) for pool in data["pools"]]
        return cls(
            **{
                **data,
                "units": [_parse_unit(unit) for unit in data["units"]],
                "groups": groups,
                "pools": pools,
                "notes": [make_note("", text) for text in data["notes"]],
            }
        )

    def find_group(self, name: Literal["trial", "servers"]) -> Group:
        """Return a group of nodes; in layout allocation, which has no groups, a group of all nodes."""
        every = Group(
            name=name,
            nodes=list(range(self.n_nodes)),
            cpus_per_node=self.cpus_per_node,
            mem_mb_per_node=self.mem_mb_per_node,
        )
        return next((group for group in self.groups if group.name == name), every)

    def list_step_units(self, unit: Unit) -> list[Unit]:
        """Return all units of a unit's step, including itself, in the order of their GPUs.

        A unit that is not in the plan is alone.
        """
        return self._step_units.get((unit.role, unit.index), [unit])

    @cached_property
    def _step_units(self) -> dict[tuple[str, int], list[Unit]]:
        """The units of each unit's step: a plan may have many thousands of units."""
        by_step: dict[tuple[str, int], list[Unit]] = {}
        for unit in sorted(self.units, key=lambda one: (one.gpu_offset, one.index)):
            by_step.setdefault(unit.step, []).append(unit)
        return {(one.role, one.index): by_step[one.step] for one in self.units}

    def list_server_tasks(self) -> list[list[int]]:
        """Return the nodes of each task of the array of servers: one node, or all nodes of its replicas.

        They have servers alone.
        """
        return list_server_tasks(self.units)

    def list_units_on(self, nodes: list[int]) -> list[Unit]:
        """Return the units on these nodes, with node indexes that count from 0 there."""
        place = {node: index for index, node in enumerate(nodes)}
        return [
            dataclasses.replace(unit, nodes=[place[node] for node in unit.nodes])
            for unit in self.units
            if set(unit.nodes) <= set(nodes)
        ]


def list_server_tasks(units: Iterable[Unit]) -> list[list[int]]:
    """Return the nodes of each server job of layout `jobs`, in the order of their first nodes."""
    others: set[int] = set()
    largest: dict[int, list[int]] = {}  # by node
    for unit in units:
        if unit.role != "server":
            others.update(unit.nodes)
            continue
        for node in unit.nodes:
            largest[node] = max(largest.get(node, []), unit.nodes, key=len)
    found = {tuple(nodes): nodes for node, nodes in sorted(largest.items()) if node not in others}
    return list(found.values())


def _parse_unit(data: dict[str, Any]) -> Unit:
    container, mpi = data.get("container"), data.get("mpi")
    parts = {
        "container": Container(**container) if container else None,
        "mpi": MpiStart(**mpi) if mpi else None,
    }
    return Unit(**{**data, **parts})
