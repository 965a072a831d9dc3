"""Placement: nothing overlaps or stays idle; servers and trainers are on separate nodes if possible."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.plan.placement import Demand, Placement, PoolDemand, find_nearest, place


def make_demand(replicas: int, size: int, ranks: int) -> Demand:
    return Demand(ranks, (PoolDemand(replicas, size),) if replicas else ())


@pytest.mark.parametrize(
    ("demand", "n_nodes", "n_gpus", "expected"),
    [
        pytest.param(make_demand(1, 1, 1), 1, 0, Placement([0], 1, [(0, 0)]), id="one node without GPUs"),
        pytest.param(
            make_demand(2, 1, 2), 4, 0, Placement([0, 1], 1, [(2, 0), (3, 0)]), id="four nodes without GPUs"
        ),
        pytest.param(
            make_demand(3, 1, 4), 4, 0, Placement([0, 1], 2, [(2, 0), (2, 0), (3, 0)]), id="uneven servers"
        ),
        pytest.param(make_demand(2, 2, 4), 1, 8, Placement([0], 4, [(0, 4), (0, 6)]), id="one node packed"),
        pytest.param(make_demand(2, 4, 8), 2, 8, Placement([0], 8, [(1, 0), (1, 4)]), id="whole nodes"),
        pytest.param(make_demand(2, 2, 12), 2, 8, Placement([0, 1], 6, [(0, 6), (1, 6)]), id="shared nodes"),
        pytest.param(make_demand(0, 1, 16), 2, 8, Placement([0, 1], 8, []), id="a trainer alone"),
        pytest.param(make_demand(1, 1, 1), 4, 0, None, id="idle nodes"),
        pytest.param(make_demand(1, 1, 1), 1, 8, None, id="idle GPUs"),
        pytest.param(make_demand(1, 1, 8), 1, 8, None, id="too many GPUs"),
        pytest.param(make_demand(0, 1, 3), 2, 0, None, id="ranks that can't be spread"),
        pytest.param(make_demand(1, 3, 13), 2, 8, None, id="a replica cut by a node boundary"),
        pytest.param(
            Demand(1, (PoolDemand(1), PoolDemand(1))),
            3,
            0,
            Placement([0], 1, [(1, 0), (2, 0)]),
            id="a node for each pool",
        ),
        pytest.param(
            Demand(1, (PoolDemand(2), PoolDemand(2))),
            3,
            0,
            Placement([0], 1, [(1, 0), (1, 0), (2, 0), (2, 0)]),
            id="pools side by side",
        ),
        pytest.param(
            Demand(8, (PoolDemand(4, 1), PoolDemand(1, 4))),
            2,
            8,
            Placement([0], 8, [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]),
            id="pools of different sizes",
        ),
        pytest.param(
            Demand(8, (PoolDemand(1, 8), PoolDemand(1, 8))),
            3,
            8,
            Placement([0], 8, [(1, 0), (2, 0)]),
            id="whole nodes each",
        ),
        pytest.param(
            Demand(16, (PoolDemand(4, 4),), is_shared=True),
            2,
            8,
            Placement([0, 1], 8, [(0, 0), (0, 4), (1, 0), (1, 4)]),
            id="the same GPUs",
        ),
        pytest.param(
            Demand(6, (PoolDemand(2, 3),), is_shared=True),
            2,
            3,
            Placement([0, 1], 3, [(0, 0), (1, 0)]),
            id="whole nodes of both",
        ),
        pytest.param(
            Demand(8, (PoolDemand(8),), is_shared=True), 2, 8, None, id="the same GPUs, others idle"
        ),
        pytest.param(Demand(3, (PoolDemand(3),), is_shared=True), 2, 0, None, id="uneven in turn"),
        pytest.param(
            Demand(16, (PoolDemand(2, 16, True),)),
            6,
            8,
            Placement([0, 1], 8, [(2, 0), (4, 0)], (2,)),
            id="replicas of two nodes",
        ),
        pytest.param(
            Demand(8, (PoolDemand(1, 16, True), PoolDemand(2, 4, True))),
            4,
            8,
            Placement([0], 8, [(2, 0), (1, 0), (1, 4)], (2, 1)),
            id="pools of two nodes and of half a node",
        ),
        pytest.param(Demand(12, (PoolDemand(1, 12, True),)), 3, 8, None, id="one and a half nodes"),
        pytest.param(Demand(8, (PoolDemand(1, 16),)), 3, 8, None, id="two nodes, which it can't span"),
        pytest.param(
            Demand(1, (PoolDemand(2, 2, True),)),
            5,
            0,
            Placement([0], 1, [(1, 0), (3, 0)], (2,)),
            id="processes on two nodes",
        ),
        pytest.param(Demand(1, (PoolDemand(1, 2, True),)), 4, 0, None, id="two processes, three nodes"),
        pytest.param(
            Demand(0, (PoolDemand(1, 4, True),)), 2, 0, Placement([], 0, [(0, 0)], (2,)), id="alone"
        ),
    ],
)
def test_place(demand, n_nodes, n_gpus, expected):
    assert place(demand, n_nodes, n_gpus) == expected


POOLS = st.lists(
    st.builds(PoolDemand, st.integers(1, 20), st.sampled_from([1, 2, 4, 8, 16]), st.booleans()), max_size=3
)
DEMANDS = st.builds(Demand, st.integers(1, 20), POOLS.map(tuple))


@given(DEMANDS, st.integers(1, 6), st.sampled_from([1, 2, 4, 8]))
def test_every_gpu_is_used_once(demand, n_nodes, n_gpus):
    placement = place(demand, n_nodes, n_gpus)
    if placement is None:
        return
    used = [(node, gpu) for node in placement.trainer_nodes for gpu in range(placement.ranks_per_node)]
    sizes = [pool.size for pool in demand.pools for _ in range(pool.replicas)]
    used += [
        (node + (gpu + i) // n_gpus, (gpu + i) % n_gpus)
        for (node, gpu), size in zip(placement.servers, sizes, strict=True)
        for i in range(size)
    ]
    spans = placement.spans or (1,) * len(demand.pools)
    spanned = [max(1, pool.size // n_gpus) for pool in demand.pools]
    assert list(spans) == spanned
    assert len(placement.servers) == demand.replicas
    assert len(placement.trainer_nodes) * placement.ranks_per_node == demand.ranks
    assert sorted(used) == [(node, gpu) for node in range(n_nodes) for gpu in range(n_gpus)]


@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.integers(1, 6), st.sampled_from([1, 2, 4, 8]))
def test_in_turn_both_have_every_gpu_once(replicas, size, n_nodes, n_gpus):
    demand = Demand(replicas * size, (PoolDemand(replicas, size),), is_shared=True)
    nearest = find_nearest(demand, n_nodes, n_gpus)
    placement = place(nearest, n_nodes, n_gpus) if nearest else None
    assert (placement is None) == (n_gpus % size != 0)
    if placement is None:
        return
    every = [(node, gpu) for node in range(n_nodes) for gpu in range(n_gpus)]
    assert [(node, gpu + i) for node, gpu in placement.servers for i in range(size)] == every
    assert (placement.trainer_nodes, placement.ranks_per_node) == (list(range(n_nodes)), n_gpus)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(2, 8))
def test_without_gpus_roles_share_no_node_and_no_node_is_idle(replicas, ranks, n_nodes):
    placement = place(make_demand(replicas, 1, ranks), n_nodes, 0)
    if placement is None:
        return
    servers = {node for node, _ in placement.servers}
    assert servers.isdisjoint(placement.trainer_nodes)
    assert sorted(servers | set(placement.trainer_nodes)) == list(range(n_nodes))
    counts = [sum(node == n for node, _ in placement.servers) for n in servers]
    assert max(counts) - min(counts) <= 1


@given(DEMANDS, st.integers(1, 6), st.sampled_from([0, 1, 2, 4, 8]))
def test_the_nearest_fits_and_what_fits_is_its_own_nearest(demand, n_nodes, n_gpus):
    if not n_gpus:
        pools = tuple(replace(pool, size=pool.size if pool.can_span else 1) for pool in demand.pools)
        demand = Demand(demand.ranks, pools)
    other = find_nearest(demand, n_nodes, n_gpus)
    if other is not None:
        assert place(other, n_nodes, n_gpus) is not None
    if place(demand, n_nodes, n_gpus) is not None:
        assert n_nodes == 1 or other == demand
