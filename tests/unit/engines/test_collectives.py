"""What the reports of the ranks say about their nodes."""

import pytest

from hpc_rl.engines.shared.collectives import Link, RankReport, judge, list_shifts

NODES = ["a", "a", "b", "b", "c", "c", "d", "d"]


def reports(
    seconds=lambda sender, receiver: 0.001, wrong=lambda sender, receiver: False
) -> list[RankReport | None]:
    """What eight ranks of four nodes find."""
    return [
        RankReport(
            [Link((r - s) % 8, seconds((r - s) % 8, r), wrong((r - s) % 8, r)) for s in list_shifts(NODES)],
            0.01,
        )
        for r in range(8)
    ]


def test_each_rank_sends_within_its_node_to_the_next_and_half_way_around():
    assert list_shifts(NODES) == [1, 2, 4]
    assert list_shifts(["a"] * 4) == [1, 2] and list_shifts(["a", "b"]) == [1]


def test_all_is_well():
    found = judge(NODES, reports(), 1_000_000)
    assert not found.bad and not found.slow
    assert "a sum of 1.0 MB over 8 ranks takes 10.0 ms" in found.summary and "1.00 GB/s" in found.summary


@pytest.mark.parametrize(
    ("wrong", "bad"),
    [
        (lambda sender, receiver: 4 in (sender, receiver), {"c"}),  # a rank
        (lambda sender, receiver: (sender, receiver) == (1, 2), {"a", "b"}),  # a link has two ends
    ],
)
def test_wrong_numbers_are_blamed_on_the_node_that_all_broken_links_have(wrong, bad):
    assert set(judge(NODES, reports(wrong=wrong), 1000).bad) == bad


def test_an_error_is_quoted():
    found = reports(wrong=lambda sender, receiver: True)
    found[1].error = "NCCL error: unhandled system error\nmore"
    assert judge(NODES, found, 1000).summary == " (NCCL error: unhandled system error)"


def test_a_wrong_sum_is_told_where_all_links_are_right():
    found = reports()
    found[6].sum_wrong = True
    assert set(judge(NODES, found, 1000).bad) == {"d"}


def test_a_rank_that_hangs_is_blamed_and_not_those_that_wait_for_it():
    found = reports(wrong=lambda sender, receiver: sender == 3)
    found[3] = None
    assert set(judge(NODES, found, 1000).bad) == {"b"}


def test_a_node_whose_fastest_link_is_slow_is_named():
    def seconds(sender: int, receiver: int) -> float:
        names = {NODES[sender], NODES[receiver]}
        return 0.1 if "b" in names and len(names) == 2 else 0.001

    found = judge(NODES, reports(seconds), 1_000_000)
    assert set(found.slow) == {"b"} and "0.01 GB/s to other nodes, where 1.00" in found.slow["b"]
    inside = judge(NODES, reports(lambda s, r: 0.1 if {s, r} == {4, 5} else 0.001), 1_000_000)
    assert set(inside.slow) == {"c"} and "between its GPUs" in inside.slow["c"]


def test_two_nodes_have_no_median_to_be_slower_than():
    two = [RankReport([Link(1, 9.0)], 0.01), RankReport([Link(0, 0.001)], 0.01)]
    assert not judge(["a", "b"], two, 1000).slow
