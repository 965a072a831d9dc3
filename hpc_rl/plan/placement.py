"""Placement: which replica and which ranks on which node. Pure arithmetic; knows no configuration.

Trainer ranks take the first nodes, the same number on each (node 0 also holds supervisor and rollout);
servers take the last ones. They share a node only where GPUs would stay idle otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass

SEARCH_RADIUS = 500  # numbers of replicas on either side of the requested one


@dataclass(frozen=True)
class Demand:
    """Replicas of `units_per_replica` units each, and trainer ranks of one unit each."""

    replicas: int
    units_per_replica: int
    ranks: int

    @property
    def units(self) -> int:
        return self.replicas * self.units_per_replica + self.ranks


@dataclass(frozen=True)
class Placement:
    """`servers[i]` is (node, first GPU) of replica i."""

    trainer_nodes: list[int]
    ranks_per_node: int
    servers: list[tuple[int, int]]


def place(demand: Demand, n_nodes: int, n_gpus_per_node: int) -> Placement | None:
    """Return a placement, or None where the demand does not fit or leaves a node or a GPU idle."""
    if n_gpus_per_node:
        return _place_on_gpus(demand, n_nodes, n_gpus_per_node)
    if n_nodes == 1 or not demand.replicas:
        return None if demand.ranks % n_nodes else _on_processes(demand, n_nodes, n_nodes)
    fitting = [
        (max(demand.ranks // nodes, -(-demand.replicas // (n_nodes - nodes))), nodes)
        for nodes in range(1, n_nodes)
        if demand.ranks % nodes == 0 and demand.replicas >= n_nodes - nodes
    ]
    return _on_processes(demand, n_nodes, min(fitting)[1]) if fitting else None


def _on_processes(demand: Demand, n_nodes: int, trainer_nodes: int) -> Placement:
    """Place units without GPUs: any number on a node, spread evenly over the nodes of the role."""
    server_nodes = list(range(trainer_nodes, n_nodes)) or [0]
    servers = sorted((server_nodes[i % len(server_nodes)], 0) for i in range(demand.replicas))
    return Placement(list(range(trainer_nodes)), demand.ranks // trainer_nodes, servers)


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
    per_node, size = demand.ranks // nodes, demand.units_per_replica
    slots = [
        (node, gpu)
        for node in range(n_nodes)
        for gpu in range(per_node if node < nodes else 0, n_gpus_per_node - size + 1, size)
    ]
    if len(slots) < demand.replicas:
        return None
    return Placement(list(range(nodes)), per_node, slots[len(slots) - demand.replicas :])


def nearest(demand: Demand, n_nodes: int, n_gpus_per_node: int) -> Demand | None:
    """Return the demand that fits and changes the fewest units, or None where none fits."""
    fitting = [
        other for other in _others(demand, n_nodes, n_gpus_per_node) if place(other, n_nodes, n_gpus_per_node)
    ]

    def change(other: Demand) -> int:
        replicas = abs(other.replicas - demand.replicas) * demand.units_per_replica
        return replicas + abs(other.ranks - demand.ranks)

    return min(fitting, key=change, default=None)


def _others(demand: Demand, n_nodes: int, n_gpus_per_node: int) -> Iterator[Demand]:
    size, total = demand.units_per_replica, n_nodes * n_gpus_per_node
    if not demand.replicas:
        for count in (demand.ranks // n_nodes, demand.ranks // n_nodes + 1):
            yield Demand(0, size, total or max(count, 1) * n_nodes)
    elif n_gpus_per_node:
        most = (total - 1) // size
        wanted = min(max(demand.replicas, 1), most)
        for replicas in range(max(1, wanted - SEARCH_RADIUS), min(most, wanted + SEARCH_RADIUS) + 1):
            yield Demand(replicas, size, total - replicas * size)
    else:
        for nodes in range(1, n_nodes):
            for count in (demand.ranks // nodes, demand.ranks // nodes + 1):
                yield Demand(max(demand.replicas, n_nodes - nodes), size, max(count, 1) * nodes)
