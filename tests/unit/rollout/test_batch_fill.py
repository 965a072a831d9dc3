"""Batches of exactly so many sequences."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.rollout.batch_fill import choose_sizes


def test_early_ones_come_first():
    assert choose_sizes([4, 4, 8, 4], 16) == [0, 1, 2]
    assert choose_sizes([3, 4, 8, 4], 16) == [1, 2, 3]
    assert choose_sizes([8, 8], 12) is None
    assert choose_sizes([], 0) == [] and choose_sizes([], 4) is None
    # the oldest waits only while no sum has it
    assert choose_sizes([6, 4, 4, 4, 4, 6], 16) == [0, 1, 5]
    assert choose_sizes([6, 4, 4, 4, 4], 16) == [1, 2, 3, 4]


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 40))
def test_it_finds_a_sum_where_there_is_one(sizes, total):
    sums = {0}
    for size in sizes:
        sums |= {one + size for one in sums}
    chosen = choose_sizes(sizes, total)
    assert (chosen is not None) == (total in sums)
    if chosen is not None:
        subsets = (every for k in range(len(sizes) + 1) for every in combinations(range(len(sizes)), k))
        assert tuple(chosen) == min(one for one in subsets if sum(sizes[i] for i in one) == total)
        assert len(set(chosen)) == len(chosen) and sum(sizes[i] for i in chosen) == total
