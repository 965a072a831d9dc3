"""Other divisions of the same units between servers and training, as far as they can be planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hpc_rl.config.devices import choose_allocation
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.pool_view import find_trained_pool_in
from hpc_rl.core.allocation import Allocation, Servers, Train
from hpc_rl.core.errors import ConfigError
from hpc_rl.plan.schema import Plan
from hpc_rl.simulate.setup import Setup, make_setup

MAX_SPLITS = 16

PlanMaker = Callable[[GRPOConfig], Plan]  # raises ConfigError if nothing fits


def list_splits(config: GRPOConfig, plan: Plan, limit: int = MAX_SPLITS) -> list[Allocation]:
    """Return allocations with as many units and other shares of servers, evenly chosen, fewest servers first.

    Sizes of a server and of a model replica of training stay.
    """
    allocation, _ = choose_allocation(replace(config, allocation_mode=plan.allocation))
    train, pool = allocation.train, _find_pool(config, allocation)
    if train is None or train.num_units is None or pool.num_units is None or allocation.colocate:
        return []
    total = train.num_units + pool.num_units
    found = [
        _replace(allocation, pool, count, replace(train, d=ranks // train.units_per_replica))
        for count in range(1, total // pool.units_per_replica + 1)
        if (ranks := total - count * pool.units_per_replica) > 0 and ranks % train.multiple == 0
    ]
    if len(found) <= limit:
        return found
    return [found[round(number * (len(found) - 1) / (limit - 1))] for number in range(limit)]


def scale_split(config: GRPOConfig, plan: Plan, n_nodes: int, share: float) -> GRPOConfig | None:
    """Return the configuration on so many nodes, with about this share of the units for servers, or None."""
    allocation, _ = choose_allocation(replace(config, allocation_mode=plan.allocation))
    train, pool = allocation.train, _find_pool(config, allocation)
    if train is None or train.num_units is None or pool.num_units is None or allocation.colocate:
        return None
    total = (train.num_units + pool.num_units) * n_nodes // plan.n_nodes
    wanted = round(share * total / pool.units_per_replica)
    for distance in range(total):
        for count in (wanted - distance, wanted + distance):
            ranks = total - count * pool.units_per_replica
            if count > 0 and ranks > 0 and ranks % train.multiple == 0:
                mesh = replace(train, d=ranks // train.units_per_replica)
                return replace(
                    config,
                    allocation_mode=str(_replace(allocation, pool, count, mesh)),
                    cluster=replace(config.cluster, n_nodes=n_nodes),
                )
    return None


def _find_pool(config: GRPOConfig, allocation: Allocation) -> Servers:
    name = find_trained_pool_in(config, allocation)
    return next(one for one in allocation.pools if one.pool == name)


def _replace(allocation: Allocation, pool: Servers, count: int, train: Train) -> Allocation:
    pools = tuple(replace(one, d=count) if one == pool else one for one in allocation.pools)
    return replace(allocation, pools=pools, train=train)


def plan_splits(
    config: GRPOConfig, plan: Plan, make_plan: PlanMaker, num_rows: int | None, limit: int = MAX_SPLITS
) -> Iterator[tuple[str, Setup]]:
    """Yield the splits that the plan accepts, each with its trial to simulate."""
    for allocation in list_splits(config, plan, limit):
        other = replace(config, allocation_mode=str(allocation))
        try:
            planned = make_plan(other)
        except ConfigError:  # this split leaves a node or a GPU idle, or its mesh is impossible
            continue
        yield planned.allocation, make_setup(other, planned, num_rows)
