"""Steps as ranges."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.core.steps import format_ranges, join_steps


@given(st.sets(st.integers(0, 60)))
def test_ranges_contain_exactly_the_steps(steps):
    ranges = join_steps(steps)
    assert {step for first, last in ranges for step in range(first, last + 1)} == steps
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(ranges))


def test_the_text_is_compact():
    assert format_ranges(join_steps([63, *range(12, 61)])) == "12-60, 63"
    assert format_ranges([]) == ""
    many = format_ranges(join_steps(range(0, 40, 2)))
    assert many == "(12 earlier ranges), 24, 26, 28, 30, 32, 34, 36, 38"
