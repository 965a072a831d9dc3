"""The values of each role's launch line in steps.sh, and the plan as comments of a job script. Pure."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hpc_rl.core.allocation import DEFAULT_POOL
from hpc_rl.core.errors import ConfigError
from hpc_rl.plan.containers import make_command
from hpc_rl.plan.plan import SUPERVISOR_CPUS, SUPERVISOR_MEM_MB
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.render.hooks import UNPACKED

ROLES = ("environment", "server", "rollout", "trainer")


def make_launch_lines(plan: Plan, trial_dir: Path, workdir: Path) -> list[dict[str, Any]]:
    """Return the options of the srun of each role, or pool of servers. Raises ConfigError."""
    lines: dict[str, dict[str, Any]] = {}
    num_units = Counter(unit.launch_line for unit in plan.units)
    for unit in sorted(plan.units, key=lambda unit: ROLES.index(unit.role)):
        command = make_command(unit, plan.python, trial_dir, workdir)
        name = unit.launch_line
        line = {
            "name": name,
            "role": unit.role,
            "n_nodes": len(unit.nodes),
            "n_tasks": unit.num_tasks,
            "tasks_per_node": unit.tasks_per_node,
            "cpus_per_task": unit.cpus_per_task,
            "gpus": _make_gpu_option(plan, unit),
            "summary": f"{_format_count(num_units[name], 'unit')}, {_describe_size(unit)}",
            "cpus_per_node": unit.tasks_per_node * unit.cpus_per_task,
            "gpus_per_node": unit.tasks_per_node * unit.gpus_per_task,
            "mpiexec": unit.mpi.mpiexec if unit.mpi else "",
            "mpi_args": [[arg] for arg in unit.mpi.args] if unit.mpi else [],
            "srun_mpi": unit.mpi.srun_mpi if unit.mpi else "none",
            "container_name": _make_container_option(unit, trial_dir),
            "srun_options": [*([option] for option in unit.srun_args), *command.srun_options],
            "program": command.program,
        }
        if lines.setdefault(name, line) != line:
            raise ConfigError(
                f"the processes of {name} differ in their options, but steps.sh starts them with one srun."
            )
    return list(lines.values())


def _make_gpu_option(plan: Plan, unit: Unit) -> str:
    """Return the options for GPUs, empty in a job without GPUs; in others a step states it even for 0 GPUs.

    Steps of servers that share the trainer's GPUs overlap its step, in CPUs as well.
    """
    job = plan.units
    if plan.layout == "jobs" and unit.role != "server":
        job = plan.list_units_on(plan.groups[0].nodes)
    if not plan.slurm_knows_gpus or not any(one.gpus_per_task for one in job):
        return ""
    count = unit.gpus_per_task * unit.tasks_per_node
    overlaps = "--overlap " if plan.shares_gpus and unit.role == "server" else ""
    return f"{overlaps}--gpus-per-node={f'$((replicas * {count}))' if unit.by_agent and count else count} "


def _make_container_option(unit: Unit, trial_dir: Path) -> str:
    """Return the option for pyxis to unpack an image once per node and role; restarts reuse it."""
    name = make_container_name(unit, trial_dir)
    return f'--container-name={UNPACKED}"$SLURM_JOB_ID"-{name} ' if name else ""


def make_container_name(unit: Unit, trial_dir: Path) -> str:
    """Return the suffix of the name of a unit's container on each node; empty if we do not name it.

    Other trials in the same allocation, and other images of the same trial, get other names.
    """
    container = unit.container
    if container is None or container.type != "pyxis":
        return ""
    if any(arg.startswith("--container-name") for arg in container.args):
        return ""
    digest = hashlib.sha256(f"{trial_dir}\0{container.image}".encode()).hexdigest()[:8]
    return f"{digest}-{unit.launch_line}"


def has_slurm_gpus(plan: Plan) -> bool:
    return plan.slurm_knows_gpus and any(unit.gpus_per_task for unit in plan.units)


def make_plan_lines(plan: Plan) -> list[str]:
    """Return lines with the nodes of each role, and the resources of its processes."""
    rows = [
        (
            "node 0",
            "supervisor",
            f"1 process, {_format_count(SUPERVISOR_CPUS, 'CPU')}, {SUPERVISOR_MEM_MB} MB",
        )
    ]
    for role in reversed(ROLES):
        units = [unit for unit in plan.units if unit.role == role]
        if role == "server":
            rows += _make_server_rows(units)
        else:
            rows += [(_format_nodes(unit.nodes), role, _describe_size(unit)) for unit in units]
    if plan.shares_gpus:
        nodes = _format_nodes(list(range(plan.n_nodes)))
        rows.append((nodes, "turns", "servers and trainer use the same units, one after the other"))
    if plan.layout == "jobs":
        servers, tasks = plan.find_group("servers").nodes, plan.list_server_tasks()
        each = f"each of these {len(tasks)} nodes"
        if len(tasks[0]) > 1:
            each = f"each {len(tasks[0])} of these {len(servers)} nodes"
        text = f"servers.sbatch starts one task, with a supervisor, for {each}"
        rows.append((_format_nodes(servers), "array", text))
    width = max(len(nodes) for nodes, _, _ in rows)
    return [f"{nodes:<{width}}  {role:<10}  {text}" for nodes, role, text in rows]


def _make_server_rows(units: Sequence[Unit]) -> list[tuple[str, str, str]]:
    """Return a row for each range of nodes with the same number of replicas of the same pool."""
    on_node: dict[tuple[str, tuple[int, ...]], list[Unit]] = {}
    for unit in units:
        on_node.setdefault((unit.pool, tuple(unit.nodes)), []).append(unit)
    rows = []
    for (pool, number), same in groupby(on_node.items(), key=lambda item: (item[0][0], len(item[1]))):
        places = list(same)
        nodes = [node for (_, several), _ in places for node in several]
        indexes = sorted(unit.index for _, replicas in places for unit in replicas)
        which = f"server {_format_range(indexes)}" + (
            "" if pool in ("", DEFAULT_POOL) else f" of pool {pool}"
        )
        (_, several), _ = places[0]
        where = "node" if len(several) == 1 else f"{len(several)} nodes"
        each = f"{_format_count(number, 'replica')} on each {where}, " if len(places) > 1 else ""
        rows.append((_format_nodes(nodes), "server", f"{which}: {each}{_describe_size(places[0][1][0])}"))
    return rows


def _describe_size(unit: Unit) -> str:
    """Describe the processes of a unit and the resources of each."""
    where = " on each node" if len(unit.nodes) > 1 else ""
    each = " each" if unit.num_tasks > 1 else ""
    cpus, gpus = _format_count(unit.cpus_per_task, "CPU"), _format_count(unit.gpus_per_task, "GPU")
    processes = _format_count(unit.tasks_per_node, "process")
    return f"{processes}{where},{each} {cpus}, {gpus}, {unit.mem_mb_per_task} MB"


def _format_count(number: int, what: str) -> str:
    many = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else many}"


def _format_nodes(nodes: Sequence[int]) -> str:
    return f"{'node' if len(nodes) == 1 else 'nodes'} {_format_range(nodes)}"


def _format_range(numbers: Sequence[int]) -> str:
    """Return `0-3` or `0,2,5`, for ascending numbers."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and last - first == len(numbers) - 1:
        return f"{first}-{last}"
    return ",".join(map(str, numbers))
