"""Divide the devices between servers and trainer: by `allocation_mode`, or by a derived allocation. Pure."""

from dataclasses import replace
from functools import partial

from hpc_rl.config.options.experiment import Config, GRPOConfig, has_trainer
from hpc_rl.config.pool_view import EVALUATION_POOL, find_trained_pool_in
from hpc_rl.config.rules.training_rules import find_trained_model
from hpc_rl.core.allocation import Allocation, Servers, Train, parse
from hpc_rl.core.backends import choose_server_backend
from hpc_rl.core.errors import ConfigError, DoesNotFit
from hpc_rl.core.refusal import Kind, Refusal, make_note


def count_data_ranks(config: Config) -> int | None:
    """Return the trainer's number of data ranks; None if the plan will refuse the allocation."""
    try:
        shared = exclude_environment_nodes(config)
        train = fill_stars(shared, choose_allocation(shared)[0]).train
    except (ConfigError, DoesNotFit):
        return None
    return train.d if train else None


def exclude_environment_nodes(config: Config) -> Config:
    """Subtract the nodes of environments from the cluster. Raises DoesNotFit if none is left."""
    if not isinstance(config, GRPOConfig) or config.environments is None or not config.environments.n_nodes:
        return config
    own, n_nodes = config.environments.n_nodes, config.cluster.n_nodes
    if own >= n_nodes:
        raise DoesNotFit(
            Refusal(
                option="environments.n_nodes",
                value=own,
                kind=Kind.CONFLICT,
                why=f"leaves none of the {n_nodes} node(s) for servers and trainer",
                use=f"use cluster.n_nodes {own + 1} or more, or fewer nodes for environments",
                related=("cluster.n_nodes",),
            )
        )
    return replace(config, cluster=replace(config.cluster, n_nodes=n_nodes - own))


def choose_allocation(config: Config) -> tuple[Allocation, list[Refusal]]:
    """Return the allocation, with a note if it is derived."""
    if config.allocation_mode.strip():
        allocation = parse(config.allocation_mode, find_trained_model(config)[1].backend)
        return _drop_trainer(config, allocation) if not has_trainer(config) else (allocation, [])
    allocation = _derive_allocation(config)
    cluster = config.cluster
    kind = f"with {cluster.n_gpus_per_node} GPUs each" if cluster.n_gpus_per_node else "without GPUs"
    why = f"is not set, so {allocation} is chosen for {cluster.n_nodes} node(s) {kind}"
    return allocation, [make_note("allocation_mode", why)]


def _drop_trainer(config: Config, allocation: Allocation) -> tuple[Allocation, list[Refusal]]:
    """Return the allocation of a trial without a trainer, whose GPUs its servers get, and a note.

    AReaL marks such a trial by `+eval`.
    """
    allocation = replace(allocation, evaluate=False)
    if allocation.train is None or not allocation.pools:
        return allocation, []
    name = find_trained_pool_in(config, allocation)
    others = config.pools if isinstance(config, GRPOConfig) else {}
    pools = tuple(
        replace(one, d=None) if one.pool == name and config.cluster.n_gpus_per_node else one
        for one in allocation.pools
        if one.pool != EVALUATION_POOL or one.pool in others
    )
    alone = fill_stars(config, Allocation(pools=pools))
    why = f"has a trainer, but this purpose starts only servers, so {alone} is used"
    return alone, [make_note("allocation_mode", why)]


def _derive_allocation(config: Config) -> Allocation:
    """Return half of the units for servers and half for training, or all of them for training."""
    n_nodes, n_gpus = config.cluster.n_nodes, config.cluster.n_gpus_per_node
    engine, servers = find_trained_model(config)[1].backend or "fsdp", choose_server_backend(n_gpus)
    if not isinstance(config, GRPOConfig):
        return Allocation(train=Train(engine, d=n_nodes * max(n_gpus, 1)))
    if not has_trainer(config):
        return Allocation(pools=(Servers(servers, d=n_nodes * max(n_gpus, 1)),))
    if n_nodes * n_gpus == 1:
        why = ": one GPU can't hold both server and trainer at once"
        use = (
            f"use 2 or more, or 0 for processes without a GPU, or allocation_mode {servers}:d1|fsdp:d1, with "
            "which they take turns"
        )
        name = "cluster.n_gpus_per_node"
        raise DoesNotFit(Refusal(option=name, value=1, kind=Kind.CONFLICT, why=why, use=use))
    per_node = max(n_gpus, 1)
    trainers = max(n_gpus // 2, 1) if n_nodes == 1 else (n_nodes // 2) * per_node
    num_servers = max(n_nodes * per_node - trainers, 1)
    return Allocation(pools=(Servers(servers, d=num_servers),), train=Train(engine, d=trainers))


def fill_stars(config: Config, allocation: Allocation) -> Allocation:
    """Replace `d*` by the replicas that the remaining units hold; a node without GPUs is one unit.

    Servers and trainer that share units have no rest: `d*` is as many as the other has, or all units.
    """
    parts: list[Servers | Train] = [*allocation.pools, *filter(None, [allocation.train])]
    starred = [part for part in parts if part.d is None]
    refuse = partial(Refusal, option="allocation_mode", value=allocation)
    if not starred:
        return allocation
    if allocation.colocate:
        return _fill_shared_stars(config, allocation)
    if len(starred) > 1:
        why, use = ": only one part can have d*", "write a number in the others, such as d4"
        raise ConfigError(refuse(kind=Kind.VALUE, why=why, use=use))
    cluster = config.cluster
    taken = sum(part.num_units or 0 for part in parts)
    left = cluster.n_nodes * max(cluster.n_gpus_per_node, 1) - taken
    left = left if cluster.n_gpus_per_node else max(left, 1)
    count = left // starred[0].units_per_replica
    if count < 1:
        kind = "GPUs" if cluster.n_gpus_per_node else "nodes"
        why = f": nothing is left for d*, because the other parts use {taken} of {taken + left} {kind}"
        sizes = ("cluster.n_nodes", "cluster.n_gpus_per_node")
        raise DoesNotFit(
            refuse(kind=Kind.CONFLICT, why=why, use="lower their numbers, or use more nodes", related=sizes)
        )
    train = allocation.train
    return replace(
        allocation,
        pools=tuple(replace(one, d=count if one.d is None else one.d) for one in allocation.pools),
        train=replace(train, d=count) if train and train.d is None else train,
    )


def _fill_shared_stars(config: Config, allocation: Allocation) -> Allocation:
    cluster, [servers], train = config.cluster, allocation.pools, allocation.train
    assert train is not None
    units = servers.num_units or train.num_units or cluster.n_nodes * max(cluster.n_gpus_per_node, 1)
    for part in (servers, train):
        if units % part.units_per_replica:
            kind = "GPUs" if cluster.n_gpus_per_node else "nodes"
            size = part.units_per_replica
            why = f": d* can't be filled, because {units} {kind} are not a multiple of {size} per replica"
            use = "write a number in place of *, or change the sizes"
            sizes = ("cluster.n_nodes", "cluster.n_gpus_per_node")
            raise DoesNotFit(
                Refusal(
                    option="allocation_mode",
                    value=allocation,
                    kind=Kind.CONFLICT,
                    why=why,
                    use=use,
                    related=sizes,
                )
            )
    return replace(
        allocation,
        pools=(replace(servers, d=units // servers.units_per_replica),),
        train=replace(train, d=units // train.units_per_replica),
    )
