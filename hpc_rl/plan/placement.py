"""Place replicas and ranks on nodes. Pure arithmetic, without a configuration.

Trainer ranks take the first nodes, with the same number on each; node 0 also has supervisor and rollout.
Servers take the last nodes. Trainer and servers share a node only if GPUs would otherwise stay idle. If they
take turns on the same units, both are on all nodes. Without ranks, servers take all nodes.

A replica with more units than a node has GPUs spans adjacent nodes, and has all their GPUs. Without GPUs,
replicas span nodes if there are fewer replicas than nodes for servers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

SEARCH_RADIUS = 500  # how far to search below and above the requested number of replicas


@dataclass(frozen=True)
class PoolDemand:
    """Replicas of `size` units each. Unless they `can_span`, each is on one node."""

    replicas: int
    size: int = 1
    can_span: bool = False

    @property
    def units(self) -> int:
        return self.replicas * self.size


@dataclass(frozen=True)
class Demand:
    """Trainer ranks, one unit each, and the pools of servers.

    Any other number of ranks must be a multiple of `together`. If `is_shared`, both have the same units.
    """

    ranks: int
    pools: tuple[PoolDemand, ...] = ()
    together: int = 1
    is_shared: bool = False

    @property
    def replicas(self) -> int:
        return sum(pool.replicas for pool in self.pools)

    @property
    def units(self) -> int:
        return self.ranks + (0 if self.is_shared else sum(pool.units for pool in self.pools))


@dataclass(frozen=True)
class Placement:
    """`servers[i]` is (node, first GPU) of replica i, which counts over the pools.

    A replica of pool p is on `spans[p]` nodes, from that node on; empty if each replica is on one node.
    """

    trainer_nodes: list[int]
    ranks_per_node: int
    servers: list[tuple[int, int]]
    spans: tuple[int, ...] = ()


def place(demand: Demand, n_nodes: int, n_gpus_per_node: int) -> Placement | None:
    """Return a placement, or None if the demand does not fit or leaves a node or a GPU idle."""
    if demand.is_shared:
        return _place_on_all(demand, n_nodes, n_gpus_per_node)
    if n_gpus_per_node:
        return _place_on_gpus(demand, n_nodes, n_gpus_per_node)
    if not demand.ranks:
        return _place_on_processes(demand, n_nodes, 0) if _count_span(demand, n_nodes) else None
    if n_nodes == 1 or not demand.replicas:
        return None if demand.ranks % n_nodes else _place_on_processes(demand, n_nodes, n_nodes)
    fitting = [
        (max(demand.ranks // nodes, -(-demand.replicas // (n_nodes - nodes))), nodes)
        for nodes in range(1, n_nodes)
        if demand.ranks % nodes == 0 and _count_span(demand, n_nodes - nodes)
    ]
    return _place_on_processes(demand, n_nodes, min(fitting)[1]) if fitting else None


def _count_span(demand: Demand, n_nodes: int) -> int:
    """Return the nodes of each replica, all without GPUs, on `n_nodes` for servers; 0 if one stays idle."""
    if demand.replicas >= n_nodes:
        return 1
    span = n_nodes // max(demand.replicas, 1)
    fits = all(pool.can_span and pool.size % span == 0 for pool in demand.pools)
    return span if fits and span * demand.replicas == n_nodes else 0


def _place_on_all(demand: Demand, n_nodes: int, n_gpus_per_node: int) -> Placement | None:
    """Place ranks and servers evenly over all nodes; each GPU has one rank and a part of one server."""
    [pool] = demand.pools
    if demand.ranks % n_nodes or pool.replicas % n_nodes:
        return None
    if n_gpus_per_node and not demand.ranks == pool.units == n_nodes * n_gpus_per_node:
        return None
    on_node = pool.replicas // n_nodes
    firsts = [number * pool.size if n_gpus_per_node else 0 for number in range(on_node)]
    servers = [(node, gpu) for node in range(n_nodes) for gpu in firsts]
    return Placement(list(range(n_nodes)), demand.ranks // n_nodes, servers)


def _place_on_processes(demand: Demand, n_nodes: int, trainer_nodes: int) -> Placement:
    """Place units without GPUs evenly over the nodes of their role; a node holds any number."""
    server_nodes = list(range(trainer_nodes, n_nodes)) or [0]
    span = _count_span(demand, len(server_nodes)) if demand.replicas else 1
    firsts = server_nodes[::span]
    servers = sorted((firsts[i % len(firsts)], 0) for i in range(demand.replicas))
    spans = (span,) * len(demand.pools) if span > 1 else ()
    return Placement(list(range(trainer_nodes)), demand.ranks // max(trainer_nodes, 1), servers, spans)


def _place_on_gpus(demand: Demand, n_nodes: int, n_gpus_per_node: int) -> Placement | None:
    if demand.units != n_nodes * n_gpus_per_node:
        return None
    counts = (
        nodes
        for nodes in range(1, n_nodes + 1)
        if demand.ranks % nodes == 0 and demand.ranks // nodes <= n_gpus_per_node
    )
    nodes = next(counts, None)
    if nodes is None:
        return None
    per_node = demand.ranks // nodes
    free = [[range(per_node if node < nodes else 0, n_gpus_per_node)] for node in range(n_nodes)]
    found: dict[int, list[tuple[int, int]]] = {}
    spans = tuple(max(1, pool.size // n_gpus_per_node) if pool.can_span else 1 for pool in demand.pools)
    # The largest come first, because their GPUs must be adjacent. Among equal sizes the first pool gets the
    # first nodes.
    for number in sorted(range(len(demand.pools)), key=lambda number: (-demand.pools[number].size, -number)):
        pool = demand.pools[number]
        span = spans[number]
        if span > 1:
            slots = _find_free_runs(free, n_gpus_per_node, span) if pool.size % n_gpus_per_node == 0 else []
        else:
            slots = [
                (node, gpu)
                for node, parts in enumerate(free)
                for part in parts
                for gpu in range(part.start, part.stop - pool.size + 1, pool.size)
            ]
        if len(slots) < pool.replicas:
            return None
        found[number] = slots[len(slots) - pool.replicas :]
        for first, gpu in found[number]:
            for node in range(first, first + span):
                free[node] = [left for part in free[node] for left in _split_gpus(part, gpu, pool.size)]
    servers = [slot for _, slots in sorted(found.items()) for slot in slots]
    return Placement(list(range(nodes)), per_node, servers, spans if max(spans, default=1) > 1 else ())


def _find_free_runs(free: list[list[range]], n_gpus: int, span: int) -> list[tuple[int, int]]:
    """Return the first nodes of disjoint runs of `span` adjacent nodes whose GPUs are all free.

    They are counted from the last node, as servers are.
    """
    runs, last = [], len(free)
    while last >= span:
        first = last - span
        taken = [node for node in range(first, last) if free[node] != [range(n_gpus)]]
        if not taken:
            runs.append((first, 0))
        last = taken[0] if taken else first
    return sorted(runs)


def _split_gpus(gpus: range, first: int, size: int) -> list[range]:
    """Return the ranges of adjacent GPUs that remain after a server takes `size` of them from `first` on.

    A server with more takes all of them.
    """
    if first not in gpus:
        return [gpus]
    return [part for part in (range(gpus.start, first), range(first + size, gpus.stop)) if part]


def find_nearest(demand: Demand, n_nodes: int, n_gpus_per_node: int) -> Demand | None:
    """Return the demand that fits and changes the fewest units, or None if no demand fits."""
    fitting = [
        other
        for other in (demand, *_list_others(demand, n_nodes, n_gpus_per_node))
        if other.ranks % demand.together == 0 and place(other, n_nodes, n_gpus_per_node)
    ]

    def count_changes(other: Demand) -> int:
        pools = zip(demand.pools, other.pools, strict=True)
        return abs(other.ranks - demand.ranks) + sum(abs(old.units - new.units) for old, new in pools)

    return min(fitting, key=count_changes, default=None)


def _list_others(demand: Demand, n_nodes: int, n_gpus_per_node: int) -> Iterator[Demand]:
    """Yield demands with other numbers of ranks and of the first pool's replicas."""
    total = n_nodes * n_gpus_per_node
    if not demand.pools:
        step = math.lcm(n_nodes, demand.together)
        for count in (demand.ranks // step, demand.ranks // step + 1):
            yield Demand(total or max(count, 1) * step)
        return
    first, *rest = demand.pools
    if demand.is_shared:
        step = math.lcm(n_nodes, demand.together, first.size)
        for count in (demand.ranks // step, demand.ranks // step + 1):
            units = total or max(count, 1) * step
            yield replace(demand, ranks=units, pools=(replace(first, replicas=units // first.size),))
        return
    if not demand.ranks:
        left = total - sum(pool.units for pool in rest)
        others = sum(pool.replicas for pool in rest)
        count = left // first.size if n_gpus_per_node else max(first.replicas, n_nodes - others)
        yield Demand(0, (replace(first, replicas=max(count, 1)), *rest))
    elif n_gpus_per_node:
        total -= sum(pool.units for pool in rest)
        most = (total - 1) // first.size
        wanted = min(max(first.replicas, 1), most)
        for replicas in range(max(1, wanted - SEARCH_RADIUS), min(most, wanted + SEARCH_RADIUS) + 1):
            yield Demand(total - replicas * first.size, (replace(first, replicas=replicas), *rest))
    else:
        others = sum(pool.replicas for pool in rest)
        for nodes in range(1, n_nodes):
            replicas = max(first.replicas, n_nodes - nodes - others)
            step = math.lcm(nodes, demand.together)
            for count in (demand.ranks // step, demand.ranks // step + 1):
                yield Demand(max(count, 1) * step, (replace(first, replicas=replicas), *rest))
