"""Packing, balance and length buckets: what must hold for any lengths, and small cases by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.engines.shared.packing import _pack_best_fit, balance, make_length_buckets, pack

lengths_st = st.lists(st.integers(0, 50), max_size=60)
max_rows_st = st.one_of(st.none(), st.integers(1, 7))


def rows_of(groups: list[list[int]]) -> list[int]:
    return sorted(row for group in groups for row in group)


@given(lengths_st, st.one_of(st.none(), st.integers(50, 200)), st.integers(1, 5), max_rows_st)
def test_pack_places_every_row_once_within_the_limits(lengths, capacity, min_groups, max_rows) -> None:
    groups = pack(lengths, capacity, min_groups, max_rows)
    assert rows_of(groups) == list(range(len(lengths)))
    assert all(group and group == sorted(group) for group in groups)
    assert all(capacity is None or sum(lengths[row] for row in group) <= capacity for group in groups)
    assert all(max_rows is None or len(group) <= max_rows for group in groups)
    assert len(groups) >= min(min_groups, len(lengths))
    assert groups == pack(list(lengths), capacity, min_groups, max_rows)


def test_pack_reaches_the_lower_bound_where_best_fit_does() -> None:
    groups = pack([9, 8, 7, 6, 5, 4, 3, 2, 1, 1], capacity=16)
    assert len(groups) == 3  # 46 tokens


def test_pack_makes_even_micro_batches() -> None:
    assert pack([5] * 8, min_groups=4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert pack([], 10) == []
    assert pack([3, 3], min_groups=5) == [[0], [1]]


def test_no_micro_batch_has_more_rows_than_the_limit() -> None:
    assert pack([9, 1, 1, 1, 1, 1], min_groups=2) == [[0], [1, 2, 3, 4, 5]]
    assert pack([9, 1, 1, 1, 1, 1], max_rows=3) == [[0, 4, 5], [1, 2, 3]]
    assert pack([9, 1, 1, 1, 1, 1], capacity=10, max_rows=3) == [[0], [1, 3, 5], [2, 4]]
    assert make_length_buckets([9, 9, 9, 9, 9], max_rows=2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("cut", [pack, make_length_buckets])
def test_a_row_above_the_capacity_is_named(cut) -> None:
    with pytest.raises(ValueError, match="row 1 has 20 tokens, more than max_tokens_per_mb 15"):
        cut([3, 20, 21], 15)


@given(lengths_st, st.integers(1, 6))
def test_balance_is_within_one_row_of_even(lengths, num_groups) -> None:
    groups = balance(lengths, num_groups)
    assert len(groups) == num_groups
    assert rows_of(groups) == list(range(len(lengths)))
    loads = [sum(lengths[row] + 1 for row in group) for group in groups]
    assert max(loads) - min(loads) <= max(lengths, default=0) + 1


def test_balance_by_hand_is_stable_by_length_then_index() -> None:
    assert balance([4, 4, 6, 2], 2) == [[2, 3], [0, 1]]


@given(lengths_st, st.one_of(st.none(), st.integers(50, 200)), st.integers(1, 5), max_rows_st)
def test_buckets_place_every_row_once_within_the_limits(lengths, capacity, min_groups, max_rows) -> None:
    groups = make_length_buckets(lengths, capacity, min_groups, max_rows, pass_tokens=20)
    assert rows_of(groups) == list(range(len(lengths)))
    assert len(groups) >= min(min_groups, len(lengths))
    for group in groups:
        longest_first = sorted((lengths[row] for row in group), reverse=True)
        size = len(group) * longest_first[0]
        assert capacity is None or size <= capacity
        assert max_rows is None or len(group) <= max_rows
        for at in range(1, len(group)):  # no split would save enough
            padded = at * longest_first[0] + (len(group) - at) * longest_first[at]
            assert size - padded <= max(20, 0.05 * size)


def test_buckets_keep_short_rows_away_from_long_ones() -> None:
    lengths = [1000, 10, 990, 12, 11] + [10] * 100
    assert make_length_buckets(lengths) == [[0, 2], [1, *range(5, 105)], [3, 4]]
    assert make_length_buckets(lengths, pass_tokens=512) == [[0, 2], [1, *range(3, 105)]]


def pack_best_fit_plainly(lengths: list[int], capacity: int, max_rows: int) -> list[int]:
    """Return the sums of groups: each row, the longest first, in the fullest group that has room for it."""
    sums, counts = [], []
    for length in sorted(lengths, reverse=True):
        open_groups = [
            group
            for group, total in enumerate(sums)
            if total + length <= capacity and counts[group] < max_rows
        ]
        if open_groups:
            best = max(open_groups, key=sums.__getitem__)
            sums[best] += length
            counts[best] += 1
        else:
            sums.append(length)
            counts.append(1)
    return sums


@given(st.lists(st.integers(0, 60), min_size=1, max_size=80))
def test_packing_is_the_plain_best_fit(lengths) -> None:
    capacity = 64
    groups = _pack_best_fit(np.asarray(lengths), capacity, len(lengths))
    sums = [sum(lengths[row] for row in group) for group in groups]
    assert sorted(sums) == sorted(pack_best_fit_plainly(lengths, capacity, len(lengths)))
