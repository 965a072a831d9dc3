"""Make the plan from a checked configuration. Pure: uses no clock, environment or file."""

import math
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from hpc_rl.config import pool_view
from hpc_rl.config.devices import choose_allocation, exclude_environment_nodes, fill_stars
from hpc_rl.config.load.stored import find_trainer, list_open_variables
from hpc_rl.config.options.experiment import Config, GRPOConfig, get_value, has_trainer
from hpc_rl.config.rules.slurm_rules import find_job_threads_limit, find_threads_limit, has_gpus
from hpc_rl.core.allocation import Allocation, Train
from hpc_rl.core.backends import SERVER_BACKENDS, choose_server_backend
from hpc_rl.core.errors import ConfigError, DoesNotFit, NotBuilt
from hpc_rl.core.refusal import Kind, Refusal, make_note
from hpc_rl.plan import containers, train_mesh
from hpc_rl.plan.placement import Demand, Placement, PoolDemand, find_nearest, place
from hpc_rl.plan.schema import GPU_VARIABLES, Group, MpiStart, Plan, Pool, Unit

MAX_UNITS = 100_000  # more than any cluster has, and still quick to count
SUPERVISOR_CPUS = 1
SUPERVISOR_MEM_MB = 1024
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second is newer


def make_plan(
    config: Config,
    explicit: Collection[str],
    *,
    interpreter: str,
    scheduler: Literal["slurm", "local"],
    threads_per_core: int = 1,  # on the nodes; Slurm gives each step whole cores
) -> Plan:
    """Decide which processes run where.

    `explicit` are the options that the user set, `interpreter` is the submitting Python. Raises NotBuilt for
    features that this version lacks, DoesNotFit with the nearest allocation that fits, and ConfigError.
    """
    n_gpus = config.cluster.n_gpus_per_node
    refuse_scheduler(config, scheduler)
    shared = exclude_environment_nodes(config)
    allocation, notes = choose_allocation(shared)
    _refuse_unbuilt(shared, allocation)
    allocation = fill_stars(shared, allocation)
    if contradictions := list(train_mesh.check(config, allocation)):
        raise ConfigError(*contradictions)
    train = allocation.train or Train("fsdp")
    pools = tuple(
        PoolDemand(one.d or 0, one.units_per_replica, SERVER_BACKENDS[one.backend].spans_nodes)
        for one in allocation.pools
    )
    ranks = (train.num_units or 1) if has_trainer(config) else 0
    demand = Demand(ranks, pools, together=train.multiple, is_shared=allocation.colocate)
    if demand.units > MAX_UNITS:
        why, use = f"needs {demand.units} GPUs or processes", f"at most {MAX_UNITS} are allowed"
        raise DoesNotFit(_refuse_allocation(allocation, Kind.VALUE, why, use))
    placement = _find_placement(shared, allocation, demand)
    if has_trainer(config):
        _refuse_idle_ranks(config, train)
    extra = shlex.split(config.launcher.slurm.srun_additional_args)
    own_args = vars(config.launcher.slurm.srun_args)
    units = [
        replace(
            unit,
            srun_args=[*extra, *own_args[unit.role]],
            container=containers.make_container(config, unit.role),
        )
        for unit in (*_make_units(config, allocation, placement), *_make_environment_units(config))
    ]
    mpi = _choose_mpi_start(config, scheduler)
    units = [replace(unit, mpi=mpi) if unit.role == "trainer" else unit for unit in units]
    knows_gpus = scheduler != "slurm" or has_gpu_request(config)
    if scheduler == "slurm" and knows_gpus:
        _refuse_shared_gpus(units)
    if not knows_gpus:
        units = [_assign_visible_gpus(unit, GPU_VARIABLES[config.cluster.gpu_kind]) for unit in units]
    if n_gpus and "cluster.n_gpus_per_node" not in explicit:
        notes.append(make_note("cluster.n_gpus_per_node", f"is {n_gpus} by default; 0 means no GPUs"))
    notes += _note_slow_groups(allocation, train, placement) if n_gpus and has_trainer(config) else []
    layout = config.launcher.slurm.layout if scheduler == "slurm" else "allocation"
    plan = Plan(
        experiment_name=config.experiment_name,
        trial_name=config.trial_name,
        trainer=find_trainer(config),
        purpose=config.purpose if isinstance(config, GRPOConfig) else "train",
        allocation=str(allocation),
        n_nodes=config.cluster.n_nodes,
        n_gpus_per_node=n_gpus,
        device="cuda" if n_gpus else "cpu",
        pools=[Pool(name=one.pool, backend=one.backend) for one in allocation.pools],
        units=units,
        recover_mode=config.recover.mode,
        recover_retries=config.recover.retries,
        python=config.launcher.python or interpreter,
        layout=layout,
        groups=_make_groups(config, layout, units),
        gpu_kind=config.cluster.gpu_kind,
        slurm_knows_gpus=knows_gpus,
        notes=notes,
    )
    limit = find_job_threads_limit(config.launcher.slurm) or threads_per_core
    return apply_threads_per_core(plan, min(limit, threads_per_core))


def apply_threads_per_core(plan: Plan, threads_per_core: int) -> Plan:
    """Return the plan with CPUs and memory for nodes with this number of threads per core."""
    cpus, mem_mb = _measure_largest_node(plan.units, range(plan.n_nodes), threads_per_core)
    groups = []
    for group in plan.groups:
        group_cpus, group_mem_mb = _measure_largest_node(plan.units, group.nodes, threads_per_core)
        if plan.layout == "jobs" and group.name == "servers":
            # Each task of the array has its own supervisor, on its first node.
            group_cpus += SUPERVISOR_CPUS
            group_mem_mb += SUPERVISOR_MEM_MB
        groups.append(replace(group, cpus_per_node=group_cpus, mem_mb_per_node=group_mem_mb))
    return replace(
        plan, threads_per_core=threads_per_core, cpus_per_node=cpus, mem_mb_per_node=mem_mb, groups=groups
    )


def refuse_scheduler(config: Config, scheduler: str) -> None:
    """Raise ConfigError for options that need Slurm if the scheduler is this machine."""
    if scheduler != "local":
        return
    slurm, n_nodes, refusals = config.launcher.slurm, config.cluster.n_nodes, list[Refusal]()
    is_chosen = config.launcher.type == "local"
    here = "launcher.type is local" if is_chosen else "sbatch is not on the PATH"
    if slurm.layout != "allocation":
        why, use = f"needs Slurm, but {here}", "use layout allocation"
        refusals.append(_refuse_local("launcher.slurm.layout", slurm.layout, why, use))
    if n_nodes > 1:
        elsewhere = "submit from a machine that has it, or plan only, with --dry_run --launcher.type slurm"
        use = f"use --n_nodes 1, or {'launcher.type slurm' if is_chosen else elsewhere}"
        refusals.append(_refuse_local("cluster.n_nodes", n_nodes, f"needs Slurm, but {here}", use))
    images = any(containers.make_container(config, role) for role in containers.PYTHONS)
    if images and slurm.container_type == "pyxis":
        why, use = f"needs srun, but {here}", "use container_type apptainer, or omit the images"
        refusals.append(_refuse_local("launcher.slurm.container_type", "pyxis", why, use))
    if refusals:
        raise ConfigError(*refusals)


def _refuse_local(option: str, value: Any, why: str, use: str) -> Refusal:
    related = ("launcher.type",)
    return Refusal(option=option, value=value, kind=Kind.CONFLICT, why=why, use=use, related=related)


def has_gpu_request(config: Config) -> bool:
    """Return whether the job requests GPUs from Slurm, so that Slurm can assign them to the steps."""
    slurm = config.launcher.slurm
    return slurm.gpus_by is not None or has_gpus(slurm.gres)


def _assign_visible_gpus(unit: Unit, variable: str) -> Unit:
    count = unit.gpus_per_task * unit.tasks_per_node
    visible = ",".join(str(unit.gpu_offset + number) for number in range(count))
    return replace(unit, env={variable: visible} | unit.env)


# -- the allocation


_SIZES = ("cluster.n_nodes", "cluster.n_gpus_per_node")


def _refuse_allocation(
    allocation: Allocation, kind: Kind, why: str, use: str = "", related: tuple[str, ...] = _SIZES
) -> Refusal:
    option = "allocation_mode"
    return Refusal(option=option, value=allocation, kind=kind, why=why, use=use, related=related)


def _refuse_unbuilt(config: Config, allocation: Allocation) -> None:
    """Raise NotBuilt for allocations that this version lacks, ConfigError if one contradicts the trainer."""
    train = allocation.train
    if allocation.pools and train and not isinstance(config, GRPOConfig):
        why, use = f": trainer {config.trainer} has no generation servers", f"use {train}"
        raise ConfigError(_refuse_allocation(allocation, Kind.CONFLICT, why, use, ("trainer",)))
    if unbuilt := next(_find_unbuilt(config, allocation), None):
        why, use = unbuilt
        raise NotBuilt(_refuse_allocation(allocation, Kind.UNSUPPORTED, f": {why}", use))
    if allocation.pools:
        pool_view.find_trained_pool_in(config, allocation)
    for servers in allocation.pools:
        option = SERVER_BACKENDS[servers.backend].divisor_option
        if option and isinstance(config, GRPOConfig):
            option = f"{SERVER_BACKENDS[servers.backend].section}.{option}"
            size = get_value(pool_view.view_pool(config, servers.pool), option)
            if servers.t % size:
                why = f"must divide the GPUs of a server, t {servers.t} of allocation_mode {allocation}"
                related = ("allocation_mode",)
                raise ConfigError(
                    Refusal(option=option, value=size, kind=Kind.CONFLICT, why=why, related=related)
                )


def _find_unbuilt(config: Config, allocation: Allocation) -> Iterator[tuple[str, str]]:
    """Yield the reason, and what to use instead."""
    train, n_gpus = allocation.train, config.cluster.n_gpus_per_node
    pools, usual = "+".join(map(str, allocation.pools)), choose_server_backend(n_gpus)
    if allocation.evaluate:
        yield "it evaluates without a trainer", f"run `hpc-rl evaluate`, or add a trainer: {pools}+fsdp:d1"
    if pools and not train and has_trainer(config):
        alone = "or run `hpc-rl generate`, `evaluate` or `serve`, which need none"
        yield "it has no trainer", f"add a trainer: {pools}+fsdp:d1; {alone}"
    if not pools and isinstance(config, GRPOConfig):
        yield "generation by the trainer is not implemented", f"add servers, as {usual}:d1+{train}"
    for servers in allocation.pools:
        backend = SERVER_BACKENDS[servers.backend]
        if n_gpus and not backend.on_gpus:
            why = f"{servers.backend} servers can't use GPUs, but cluster.n_gpus_per_node is {n_gpus}"
            yield why, f"use {usual}, or cluster.n_gpus_per_node 0"
        if servers.p > 1 and "p" not in backend.supported:
            use = f"use t: {servers.backend}:t{servers.units_per_replica}"
            yield f"{servers.backend} servers with p are not implemented", use
        if n_gpus and servers.t > n_gpus and servers.t % n_gpus:
            why = f"a server with t{servers.t} spans nodes, and must have all GPUs of each"
            yield why, f"use a t that is a multiple of cluster.n_gpus_per_node, {n_gpus}"
        if n_gpus and servers.t > n_gpus and allocation.colocate:
            why = "servers that take turns with the trainer can't span nodes"
            yield why, f"use t at most {n_gpus}, or separate nodes: {pools}+{train}"


# -- placement


def _find_placement(config: Config, allocation: Allocation, demand: Demand) -> Placement:
    """Return the placement. Raises DoesNotFit with the reason and the nearest allocation that fits."""
    n_nodes, n_gpus = config.cluster.n_nodes, config.cluster.n_gpus_per_node
    placement = place(demand, n_nodes, n_gpus)
    if placement:
        return placement
    fits = "no number of such servers fits"
    if other := find_nearest(demand, n_nodes, n_gpus):
        sized = zip(allocation.pools, other.pools, strict=True)
        pools = tuple(replace(servers, d=pool.replicas) for servers, pool in sized)
        train = allocation.train or Train("fsdp")
        sized_train = replace(train, d=other.ranks // train.units_per_replica) if demand.ranks else None
        nearest = Allocation(pools=pools, train=sized_train, colocate=allocation.colocate)
        fits = f"the nearest that fits: {nearest}"
    have = f"{n_nodes} node(s) of {n_gpus} GPUs have {n_nodes * n_gpus}"
    if n_gpus and demand.units != n_nodes * n_gpus:
        why = f"it needs {demand.units} GPUs, {have}"
        why += ", and none may stay idle" if demand.units < n_nodes * n_gpus else ""
    elif n_gpus:
        why = f"it can't be divided among the nodes; {have}"
    elif not demand.replicas:
        why = f"{demand.ranks} ranks can't be spread evenly over {n_nodes} nodes"
    elif demand.units < n_nodes:
        why = f"it has {demand.units} processes, so some of {n_nodes} nodes would stay idle"
    else:
        why = f"each of {n_nodes} nodes must have only servers, or as many trainer ranks as the others"
    raise DoesNotFit(_refuse_allocation(allocation, Kind.CONFLICT, f"does not fit: {why}", fits))


def _note_slow_groups(allocation: Allocation, train: Train, placement: Placement) -> Iterator[Refusal]:
    """Yield a note if the tensor ranks of a group are on several nodes."""
    if placement.ranks_per_node % train.t:
        apart = f"t {train.t} does not divide the {placement.ranks_per_node} ranks of a node"
        why = f"may be slow: {apart}, so some tensor groups span nodes"
        yield make_note("allocation_mode", why, Kind.MACHINE, value=allocation, related=_SIZES)


def _refuse_idle_ranks(config: Config, train: Train) -> None:
    """Raise DoesNotFit if a data rank would have no row in an update."""
    rows, factors = config.train_dataset.batch_size, ["train_dataset.batch_size"]
    if isinstance(config, GRPOConfig):
        rows = rows * config.gconfig.n_samples // config.actor.ppo_n_minibatches
        factors += ["gconfig.n_samples", "actor.ppo_n_minibatches"]
    if rows < (train.d or 1):
        product = " * ".join(factors[:2]) + "".join(f" / {name}" for name in factors[2:])
        why = f": an update has {rows} row(s) ({product}) for {train.d} data ranks, but each needs one"
        use = f"use {replace(train, d=max(rows, 1))} or less, or a larger train_dataset.batch_size"
        name = "allocation_mode"
        raise DoesNotFit(Refusal(option=name, kind=Kind.CONFLICT, why=why, use=use, related=tuple(factors)))


# -- units


def _make_units(config: Config, allocation: Allocation, placement: Placement) -> list[Unit]:
    launcher, on_gpus = config.launcher, config.cluster.n_gpus_per_node > 0
    trainer = Unit(
        role="trainer",
        nodes=placement.trainer_nodes,
        tasks_per_node=placement.ranks_per_node,
        cpus_per_task=launcher.trainer_cpus_per_gpu,
        mem_mb_per_task=launcher.trainer_mem_per_gpu,
        gpus_per_task=int(on_gpus),
        module="hpc_rl.roles.trainer",
        env=_make_trainer_env(list_open_variables(config, "trainer_env_vars"), on_gpus, allocation.train),
    )
    if not allocation.pools:
        return [trainer]
    server_env = list_open_variables(config, "inference_server_env_vars")
    places = enumerate(placement.servers)  # of all pools in turn
    spans = placement.spans or (1,) * len(allocation.pools)
    replicas = [
        Unit(
            role="server",
            index=index,
            pool=servers.pool,
            nodes=list(range(node, node + span)),
            cpus_per_task=launcher.inference_server_cpus_per_gpu * (servers.units_per_replica // span),
            mem_mb_per_task=launcher.inference_server_mem_per_gpu * (servers.units_per_replica // span),
            gpus_per_task=servers.units_per_replica // span if on_gpus else 0,
            gpu_offset=gpu,
            module="hpc_rl.roles.server",
            # The role passes them to a process of the backend, and must not have them itself.
            env={} if SERVER_BACKENDS[servers.backend].is_process else server_env,
        )
        for servers, span in zip(allocation.pools, spans, strict=True)
        for index, (node, gpu) in islice(places, servers.d)
    ]
    rollout = Unit(
        role="rollout",
        nodes=[0],
        cpus_per_task=launcher.rollout_cpus,
        mem_mb_per_task=launcher.rollout_mem_mb,
        module=_choose_rollout_module(config),
    )
    return [*replicas, rollout, trainer] if has_trainer(config) else [*replicas, rollout]


def _choose_rollout_module(config: Config) -> str:
    """Return what the rollout role runs: the service of batches, a pass over prompts, or an endpoint."""
    if not has_trainer(config):
        is_endpoint = get_value(config, "purpose") == "serve"
        return "hpc_rl.roles.endpoint" if is_endpoint else "hpc_rl.roles.generator"
    has_environments = isinstance(config, GRPOConfig) and config.environments is not None
    return "hpc_rl.roles.rollout_front" if has_environments else "hpc_rl.roles.rollout"


def _make_trainer_env(env: dict[str, str], on_gpus: bool, train: Train | None) -> dict[str, str]:
    """Return the user's variables `env`, with defaults for GPUs.

    Expandable memory segments avoid gaps between blocks, because packed micro-batches differ in size.
    Megatron's messages between tensor and context ranks must start in the order of the surrounding work.
    """
    if on_gpus and not env.keys() & set(ALLOCATOR_VARIABLES):
        env[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    if on_gpus and train and train.backend == "megatron" and train.t * train.c > 1:
        env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return env


def _make_environment_units(config: Config) -> list[Unit]:
    """Return a unit per command of `environments`, spread over the nodes for environments."""
    section = config.environments if isinstance(config, GRPOConfig) else None
    if section is None:
        return []
    last = config.cluster.n_nodes
    nodes = list(range(last - section.n_nodes, last)) or [0]
    return [
        Unit(
            role="environment",
            index=index,
            nodes=[nodes[index % len(nodes)]],
            cpus_per_task=section.cpus,
            mem_mb_per_task=section.mem_mb,
            module="hpc_rl.roles.environment_role",
        )
        for index in range(len(section.commands))
    ]


def _measure_largest_node(units: list[Unit], nodes: Sequence[int], threads_per_core: int) -> tuple[int, int]:
    """Return the largest CPUs and the largest memory (MB) that one of these nodes needs."""
    cpus = {node: SUPERVISOR_CPUS if node == 0 else 0 for node in nodes}
    mem_mb = {node: SUPERVISOR_MEM_MB if node == 0 else 0 for node in nodes}
    steps: dict[tuple[str, int], list[Unit]] = {}
    for unit in units:
        steps.setdefault(unit.step, []).append(unit)
    for same in steps.values():
        # Slurm rounds the CPUs of each step on a node, not the CPUs of the job.
        threads_used = min(threads_per_core, find_threads_limit(same[0].srun_args) or threads_per_core)
        num_cores = math.ceil(sum(unit.tasks_per_node * unit.cpus_per_task for unit in same) / threads_used)
        for node in filter(cpus.__contains__, set(same[0].nodes)):
            cpus[node] += num_cores * threads_per_core
            mem_mb[node] += sum(unit.tasks_per_node * unit.mem_mb_per_task for unit in same)
    return max(cpus.values()), max(mem_mb.values())


def _make_groups(config: Config, layout: str, units: list[Unit]) -> list[Group]:
    """Return the group of nodes with supervisor, rollout or trainer, and the group with servers only.

    Raises DoesNotFit if no node has servers only.
    """
    if layout == "allocation":
        return []
    of_trial = {node for unit in units if unit.role != "server" for node in unit.nodes}
    of_servers = [node for node in range(config.cluster.n_nodes) if node not in of_trial]
    if not of_servers:
        raise DoesNotFit(
            Refusal(
                option="launcher.slurm.layout",
                value=layout,
                kind=Kind.CONFLICT,
                why=f"needs nodes with servers only, but the trainer is on all {config.cluster.n_nodes}",
                use="use more nodes, or layout allocation",
                related=("allocation_mode", "cluster.n_nodes"),
            )
        )
    spans = sorted({len(unit.nodes) for unit in units if unit.role == "server"})
    if layout == "jobs" and len(spans) > 1:
        sizes = " and on ".join(map(str, spans))
        raise DoesNotFit(
            Refusal(
                option="launcher.slurm.layout",
                value=layout,
                kind=Kind.CONFLICT,
                why=f"needs servers on equal numbers of nodes, but some are on {sizes}",
                use="use layout allocation",
                related=("allocation_mode",),
            )
        )
    return [
        Group(name="trial", nodes=sorted(of_trial)),
        Group(name="servers", nodes=of_servers),
    ]


def _choose_mpi_start(config: Config, scheduler: str) -> MpiStart | None:
    """Return how MPI starts the trainer; None if the trainer uses no MPI."""
    launcher = config.launcher
    if launcher.trainer_start == "mpiexec":
        return MpiStart(mpiexec=launcher.mpi.mpiexec, args=list(launcher.mpi.args))
    if scheduler == "slurm" and launcher.slurm.srun_mpi != "none":
        return MpiStart(srun_mpi=launcher.slurm.srun_mpi)
    return None


def _refuse_shared_gpus(units: Sequence[Unit]) -> None:
    """Raise DoesNotFit if mpiexec's ranks would see GPUs that Slurm gives to other steps on their nodes.

    On its own node mpiexec starts the ranks without srun, so they see all GPUs of the job there.
    """
    for unit in (one for one in units if one.by_mpiexec and one.gpus_per_task):
        others = [other for other in units if other is not unit and other.gpus_per_task]
        shared = set(unit.nodes) & {node for other in others for node in other.nodes}
        if shared:
            node = f"node {min(shared)} has GPUs of the trainer and of servers"
            raise DoesNotFit(
                Refusal(
                    option="launcher.trainer_start",
                    value="mpiexec",
                    kind=Kind.CONFLICT,
                    why=f": {node}, which mpiexec can't divide",
                    use="give the trainer its own nodes, set launcher.slurm.gpus_by null on whole nodes, or "
                    "use trainer_start srun with launcher.slurm.srun_mpi",
                    related=("allocation_mode", "cluster.n_nodes", "launcher.slurm.gpus_by"),
                )
            )
