"""make_plan: from a checked configuration to the plan. Pure and deterministic: no clock, no environment, no file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from hpc_rl.allocation import Allocation, Servers, Train, parse
from hpc_rl.config.loading.load import trainer_of
from hpc_rl.config.rules.slurm_rules import asks_for_gpus
from hpc_rl.config.rules.training_rules import models, trained
from hpc_rl.config.sections.cluster import environment_of
from hpc_rl.config.sections.experiment import Config, GRPOConfig
from hpc_rl.errors import ConfigError, DoesNotFit, NotBuilt
from hpc_rl.plan import containers
from hpc_rl.plan.placement import Demand, Placement, nearest, place
from hpc_rl.plan.schema import Group, Plan, Unit

MAX_UNITS = 100_000  # beyond every cluster, and still quick to count through
SUPERVISOR_CPUS = 1
SUPERVISOR_MEM_MB = 1024


def make_plan(
    config: Config,
    explicit: Collection[str],
    *,
    interpreter: str,
    scheduler: Literal["slurm", "local"],
    threads_per_core: int = 1,
) -> Plan:
    """Decide everything; what only lacks a backend is planned too, with the reason in `not_built`.

    Args:
        config: The checked configuration.
        explicit: Options that the user wrote.
        interpreter: The Python that submits.
        scheduler: What runs the trial.
        threads_per_core: Of the nodes; Slurm gives each step whole cores.

    Raises NotBuilt for what else this version can't do, DoesNotFit (with the nearest allocation that does), ConfigError.
    """
    refuse_scheduler(config, scheduler)
    containers.refuse_scheduler(config, scheduler)
    allocation, notes = _allocation(config)
    _refuse_unbuilt(config, allocation)
    allocation = _fill_stars(config, allocation)
    demand = _demand(allocation)
    if demand.units > MAX_UNITS:
        raise DoesNotFit(
            f"allocation_mode {allocation} asks for {demand.units} units; a trial has at most {MAX_UNITS}."
        )
    placement = _placement(config, allocation, demand)
    _refuse_idle_ranks(
        config, demand.ranks // (allocation.train.units_per_replica if allocation.train else 1)
    )
    extra = shlex.split(config.launcher.slurm.srun_additional_args)
    units = [
        replace(unit, srun_args=extra, container=containers.container_of(config, unit.role))
        for unit in _units(config, allocation, placement)
    ]
    knows_gpus = scheduler != "slurm" or slurm_knows_gpus(config)
    if not knows_gpus:
        units = [_with_visible_gpus(unit) for unit in units]
    layout = config.launcher.slurm.layout if scheduler == "slurm" else "allocation"
    plan = Plan(
        experiment_name=config.experiment_name,
        trial_name=config.trial_name,
        trainer=trainer_of(config),
        allocation=str(allocation),
        n_nodes=config.cluster.n_nodes,
        n_gpus_per_node=config.cluster.n_gpus_per_node,
        cpus_per_node=0,
        mem_mb_per_node=0,
        device="cuda" if config.cluster.n_gpus_per_node else "cpu",
        server_backend=allocation.servers.backend if allocation.servers else None,  # type: ignore[arg-type]  # vllm was refused
        units=units,
        recover_mode=config.recover.mode,
        recover_retries=config.recover.retries,
        python=config.launcher.python or interpreter,
        layout=layout,
        groups=_groups(config, layout, units),
        slurm_knows_gpus=knows_gpus,
        notes=[*notes, *_notes_on_defaults(config, explicit)],
        not_built=_awaited(config, allocation),
    )
    return with_threads_per_core(plan, threads_per_core)


def with_threads_per_core(plan: Plan, threads_per_core: int) -> Plan:
    """Return the plan with the CPUs and memory that it asks for on nodes of so many threads per core."""
    cpus, mem_mb = _largest_node(plan.units, range(plan.n_nodes), threads_per_core)
    groups = []
    for group in plan.groups:
        group_cpus, group_mem_mb = _largest_node(plan.units, group.nodes, threads_per_core)
        if plan.layout == "jobs" and group.name == "servers":
            # Each server node has a supervisor of its own.
            group_cpus += SUPERVISOR_CPUS
            group_mem_mb += SUPERVISOR_MEM_MB
        groups.append(replace(group, cpus_per_node=group_cpus, mem_mb_per_node=group_mem_mb))
    return replace(
        plan, threads_per_core=threads_per_core, cpus_per_node=cpus, mem_mb_per_node=mem_mb, groups=groups
    )


def refuse_scheduler(config: Config, scheduler: str) -> None:
    """One machine can't play several nodes or jobs."""
    layout = config.launcher.slurm.layout
    if layout != "allocation" and scheduler == "local":
        raise ConfigError(
            f"launcher.slurm.layout {layout} needs Slurm, and the trial would run on this machine: use allocation."
        )
    if config.cluster.n_nodes == 1 or scheduler != "local":
        return
    nodes = f"cluster.n_nodes is {config.cluster.n_nodes}"
    if config.launcher.type == "auto":
        raise ConfigError(
            f"{nodes}, which needs Slurm, but sbatch is not on the PATH: submit from a machine that has it, or use --n_nodes 1."
        )
    raise ConfigError(
        f"{nodes}, but launcher.type local is this one machine: use --n_nodes 1, or launcher.type slurm."
    )


def slurm_knows_gpus(config: Config) -> bool:
    """Whether the job asks Slurm for its GPUs; where it does not, Slurm can't deal them out to the steps either."""
    slurm = config.launcher.slurm
    return slurm.gpus_by is not None or asks_for_gpus(slurm.gres)


def _with_visible_gpus(unit: Unit) -> Unit:
    count = unit.gpus_per_task * unit.tasks_per_node
    visible = ",".join(str(unit.gpu_offset + number) for number in range(count))
    return replace(unit, env={"CUDA_VISIBLE_DEVICES": visible} | unit.env)


# -- which allocation


def _allocation(config: Config) -> tuple[Allocation, list[str]]:
    if config.allocation_mode.strip():
        return parse(config.allocation_mode), []
    allocation = _derive(config)
    cluster = config.cluster
    kind = f"{cluster.n_gpus_per_node} GPUs each" if cluster.n_gpus_per_node else "without GPUs"
    return allocation, [f"allocation_mode is derived: {allocation}, from {cluster.n_nodes} node(s) {kind}."]


def _derive(config: Config) -> Allocation:
    n_nodes, n_gpus = config.cluster.n_nodes, config.cluster.n_gpus_per_node
    backend = trained(config)[1].backend or "fsdp"
    if not isinstance(config, GRPOConfig):
        return Allocation(train=Train(backend, d=n_nodes * max(n_gpus, 1)))
    if not n_gpus:
        trainers = max(n_nodes // 2, 1)
        return Allocation(
            servers=Servers("embedded", d=max(n_nodes - trainers, 1)), train=Train(backend, d=trainers)
        )
    if n_nodes * n_gpus == 1:
        raise DoesNotFit(
            "one GPU can't hold a server and a trainer at once: use cluster.n_gpus_per_node 2 or more, "
            "or 0 to run everything as processes without a GPU."
        )
    trainers = n_gpus // 2 if n_nodes == 1 else (n_nodes // 2) * n_gpus
    return Allocation(
        servers=Servers("sglang", d=n_nodes * n_gpus - trainers), train=Train(backend, d=trainers)
    )


def _refuse_unbuilt(config: Config, allocation: Allocation) -> None:
    servers, train = allocation.servers, allocation.train
    needs_servers = isinstance(config, GRPOConfig)
    name = f"allocation_mode {allocation}"
    if allocation.evaluate:
        raise NotBuilt(
            f"{name}: a trial that only evaluates is not built; every training trial evaluates at its end."
        )
    if allocation.colocate:
        raise NotBuilt(
            f"{name}: sharing units between servers and training ('|') is not built; use '+': {servers}+{train}."
        )
    if servers and not train:
        raise NotBuilt(f"{name}: a trial of servers alone is not built; add a trainer: {servers}+fsdp:d1.")
    if train and train.backend == "fsdp" and train.units_per_replica > 1:
        raise NotBuilt(
            f"{name}: fsdp with t or c is not built; use d only, as fsdp:d{train.num_units or '*'}."
        )
    if needs_servers and not servers:
        raise NotBuilt(
            f"{name}: generation in the trainer's units is not built; name servers, as {_usual(config)}:d1+{train}."
        )
    if servers and not needs_servers:
        raise ConfigError(f"{name}: an {config.trainer} trial has no generation servers; use {train}.")
    if servers:
        _refuse_servers(config, servers, name)


def _awaited(config: Config, allocation: Allocation) -> str:
    """Why nothing of this plan can be started yet; empty where it can. Raises ConfigError for two engines at once."""
    named = [
        f"{section}.backend megatron" for section, engine in models(config) if engine.backend == "megatron"
    ]
    train = allocation.train
    if train and train.backend == "megatron":
        named.insert(0, f"allocation_mode {allocation}")
    elif trained(config)[1].backend == "megatron":
        raise ConfigError(f"{named[0]}, but allocation_mode {allocation} trains with fsdp; make them agree.")
    if not named:
        return ""
    count = (train.num_units if train else None) or "*"
    return f"{', '.join(named)}: the megatron backend is not built; use fsdp with d only, as fsdp:d{count}."


def _usual(config: Config) -> str:
    return "sglang" if config.cluster.n_gpus_per_node else "embedded"


def _refuse_servers(config: Config, servers: Servers, name: str) -> None:
    n_gpus = config.cluster.n_gpus_per_node
    if servers.backend == "vllm":
        raise NotBuilt(f"{name}: vllm servers are not built; use sglang, or embedded where no GPU is.")
    if servers.backend == "embedded" and n_gpus:
        raise NotBuilt(
            f"{name}: embedded servers run without a GPU, but cluster.n_gpus_per_node is {n_gpus}; "
            "use sglang, or cluster.n_gpus_per_node 0."
        )
    if servers.p > 1:
        raise NotBuilt(
            f"{name}: sglang servers with p are not built; use t: sglang:t{servers.units_per_replica}."
        )
    if servers.t > 1 and not n_gpus:
        raise NotBuilt(
            f"{name}: t needs GPUs, but cluster.n_gpus_per_node is 0; use d, as sglang:d{servers.t}."
        )
    if servers.t > max(n_gpus, 1):
        raise NotBuilt(
            f"{name}: a server that spans nodes is not built; t can be at most cluster.n_gpus_per_node, {n_gpus}."
        )
    if isinstance(config, GRPOConfig) and servers.backend == "sglang" and servers.t % config.sglang.ep_size:
        raise ConfigError(
            f"sglang.ep_size {config.sglang.ep_size} must divide the GPUs of a server: {name} has t {servers.t}."
        )


def _fill_stars(config: Config, allocation: Allocation) -> Allocation:
    """Replace `d*` by what the other part leaves; without GPUs a node counts as one unit."""
    servers, train = allocation.servers, allocation.train
    starred = [part for part in (servers, train) if part and part.d is None]
    if not starred:
        return allocation
    if len(starred) == 2:
        raise ConfigError(
            f"allocation_mode {allocation}: only one part can take what is left; give the other a number."
        )
    cluster = config.cluster
    taken = sum(part.num_units or 0 for part in (servers, train) if part)
    left = cluster.n_nodes * max(cluster.n_gpus_per_node, 1) - taken
    if not cluster.n_gpus_per_node:
        left = max(left, 1)
    count = left // starred[0].units_per_replica
    if count < 1:
        raise DoesNotFit(
            f"allocation_mode {allocation}: nothing is left for d*: {taken} of {taken + left} units are taken."
        )
    filled = replace(starred[0], d=count)
    return (
        replace(allocation, servers=filled)
        if isinstance(filled, Servers)
        else replace(allocation, train=filled)
    )


# -- where it goes


def _demand(allocation: Allocation) -> Demand:
    servers, train = allocation.servers, allocation.train
    ranks = train.num_units if train else None
    return (
        Demand(servers.d or 0, servers.units_per_replica, ranks or 1) if servers else Demand(0, 1, ranks or 1)
    )


def _placement(config: Config, allocation: Allocation, demand: Demand) -> Placement:
    cluster = config.cluster
    placement = place(demand, cluster.n_nodes, cluster.n_gpus_per_node)
    if placement:
        return placement
    other = nearest(demand, cluster.n_nodes, cluster.n_gpus_per_node)
    fits = (
        "nothing with such servers does"
        if other is None
        else f"the nearest that does: {_as_text(allocation, other)}"
    )
    if cluster.n_gpus_per_node:
        total = cluster.n_nodes * cluster.n_gpus_per_node
        have = f"{cluster.n_nodes} node(s) of {cluster.n_gpus_per_node} GPUs have {total}"
        why = (
            f"it takes {demand.units} GPUs, {have}"
            if demand.units != total
            else f"it can't be cut to fit; {have}"
        )
    elif not demand.replicas:
        why = f"{demand.ranks} ranks can't be spread evenly over {cluster.n_nodes} nodes"
    elif demand.units < cluster.n_nodes:
        why = f"it has {demand.units} units, so that some of {cluster.n_nodes} nodes would stay idle"
    else:
        why = f"{cluster.n_nodes} nodes can't each have servers only or the same number of ranks only"
    raise DoesNotFit(f"allocation_mode {allocation} does not fit: {why}; {fits}.")


def _as_text(allocation: Allocation, demand: Demand) -> str:
    servers = replace(allocation.servers, d=demand.replicas) if allocation.servers else None
    return str(Allocation(servers=servers, train=Train("fsdp", d=demand.ranks)))


def _refuse_idle_ranks(config: Config, ranks: int) -> None:
    """Every rank must have a row of every update."""
    rows, made_of = config.train_dataset.batch_size, "train_dataset.batch_size"
    if isinstance(config, GRPOConfig):
        rows = rows * config.gconfig.n_samples // config.actor.ppo_n_minibatches
        made_of += " * gconfig.n_samples / actor.ppo_n_minibatches"
    if rows < ranks:
        enough = f"use fsdp:d{rows} or less, or more rows"
        raise DoesNotFit(
            f"{ranks} trainer ranks share {rows} row{'' if rows == 1 else 's'} per update ({made_of}): {enough}."
        )


# -- units


def _units(config: Config, allocation: Allocation, placement: Placement) -> list[Unit]:
    launcher, on_gpus = config.launcher, config.cluster.n_gpus_per_node > 0
    trainer = Unit(
        role="trainer",
        index=0,
        nodes=placement.trainer_nodes,
        tasks_per_node=placement.ranks_per_node,
        cpus_per_task=launcher.trainer_cpus_per_gpu,
        mem_mb_per_task=launcher.trainer_mem_per_gpu,
        gpus_per_task=int(on_gpus),
        module="hpc_rl.app.trainer",
        env=environment_of("launcher.trainer_env_vars", launcher.trainer_env_vars),
    )
    servers = allocation.servers
    if not servers:
        return [trainer]
    size = servers.units_per_replica
    server_env = environment_of("launcher.inference_server_env_vars", launcher.inference_server_env_vars)
    if servers.backend == "sglang":
        server_env = {}  # they are for the process of SGLang, which has packages of its own; servers.sglang sets them
    replicas = [
        Unit(
            role="server",
            index=index,
            nodes=[node],
            tasks_per_node=1,
            cpus_per_task=launcher.inference_server_cpus_per_gpu * size,
            mem_mb_per_task=launcher.inference_server_mem_per_gpu * size,
            gpus_per_task=size if on_gpus else 0,
            gpu_offset=gpu,
            module="hpc_rl.app.server",
            env=server_env,
        )
        for index, (node, gpu) in enumerate(placement.servers)
    ]
    rollout = Unit(
        role="rollout",
        index=0,
        nodes=[0],
        tasks_per_node=1,
        cpus_per_task=launcher.rollout_cpus,
        mem_mb_per_task=launcher.rollout_mem_mb,
        gpus_per_task=0,
        module="hpc_rl.app.rollout",
    )
    return [*replicas, rollout, trainer]


def _largest_node(units: list[Unit], nodes: Sequence[int], threads_per_core: int) -> tuple[int, int]:
    """Return the most CPUs and the most memory (MB) that any of these nodes needs: all nodes of a job are given the same."""
    cpus = {node: SUPERVISOR_CPUS if node == 0 else 0 for node in nodes}
    mem_mb = {node: SUPERVISOR_MEM_MB if node == 0 else 0 for node in nodes}
    for unit in units:
        # Slurm rounds the CPUs of each step on a node, not those of the job.
        num_cores = math.ceil(unit.tasks_per_node * unit.cpus_per_task / threads_per_core)
        for node in set(unit.nodes) & set(nodes):
            cpus[node] += num_cores * threads_per_core
            mem_mb[node] += unit.tasks_per_node * unit.mem_mb_per_task
    return max(cpus.values()), max(mem_mb.values())


def _groups(config: Config, layout: str, units: list[Unit]) -> list[Group]:
    """Nodes with the supervisor, rollout or trainer, and nodes of servers alone. Raises DoesNotFit where none are."""
    if layout == "allocation":
        return []
    of_trial = {node for unit in units if unit.role != "server" for node in unit.nodes}
    of_servers = [node for node in range(config.cluster.n_nodes) if node not in of_trial]
    if not of_servers:
        raise DoesNotFit(
            f"launcher.slurm.layout {layout} asks for the nodes of the servers apart, but the trainer is on all "
            f"{config.cluster.n_nodes} node(s): use more nodes, fewer trainer ranks, or layout allocation."
        )
    return [
        Group(name="trial", nodes=sorted(of_trial), cpus_per_node=0, mem_mb_per_node=0),
        Group(name="servers", nodes=of_servers, cpus_per_node=0, mem_mb_per_node=0),
    ]


def _notes_on_defaults(config: Config, explicit: Collection[str]) -> list[str]:
    if config.cluster.n_gpus_per_node and "cluster.n_gpus_per_node" not in explicit:
        return [f"cluster.n_gpus_per_node is {config.cluster.n_gpus_per_node} by default; 0 means no GPUs."]
    return []
