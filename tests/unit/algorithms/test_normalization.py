"""Normalization against vectors worked by hand and the ones of the reference implementation."""

import pytest
import torch

from hpc_rl.algorithms.normalization import Levels, normalize, number_groups

X = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1])


def close(got: torch.Tensor, want: list) -> None:
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=0)


def test_group_mean_and_group_deviation() -> None:
    close(
        normalize(X, Levels("group", "group"), number_groups(8, 4)),
        [0.99998, -0.99998, -0.99998, 0.99998, 0.0, 0, 0, 0],
    )


def test_batch_mean_and_batch_deviation() -> None:
    close(
        normalize(X, Levels("batch", "batch"), number_groups(8, 4)),
        [0.577337, -1.732011, -1.732011, 0.577337] + [0.577337] * 4,
    )


def test_mean_only_leaves_the_scale() -> None:
    close(
        normalize(torch.tensor([1.0, 3, 10, 20]), Levels("group", None), number_groups(4, 2)),
        [-1.0, 1, -5, 5],
    )


def test_without_a_mean_the_deviation_is_a_root_mean_square() -> None:
    close(normalize(torch.tensor([3.0, 4.0]), Levels(None, "batch")), [3 / 12.5**0.5, 4 / 12.5**0.5])


def test_group_mean_with_batch_deviation() -> None:
    # after the group means: -1 1 -5 5, whose mean square over the batch is 13
    close(
        normalize(torch.tensor([1.0, 3, 10, 20]), Levels("group", "batch"), number_groups(4, 2)),
        [x / 13**0.5 for x in (-1.0, 1, -5, 5)],
    )


def test_only_masked_tokens_count_and_others_become_zero() -> None:
    x = torch.tensor([[2.0, 99.0, 4.0], [6.0, 8.0, float("nan")]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    close(normalize(x, Levels("batch", None), mask=mask), [[-3.0, 0, -1], [1, 3, 0]])
    close(normalize(x, Levels("group", None), mask=mask), [[-1.0, 0, 1], [-1, 1, 0]])


def test_groups_are_known_by_their_number_and_may_differ_in_size() -> None:
    x = torch.tensor([1.0, 5, 3, 7, 2])
    close(normalize(x, Levels("group", None), torch.tensor([0, 1, 0, 1, 0])), [-1.0, -1, 1, 1, 0])
    # two prompts whose answers all earn the same teach nothing, whatever the sizes of their groups
    uneven = torch.tensor([0.0] * 6 + [1.0] * 10)
    close(normalize(uneven, Levels("group", "group"), torch.tensor([0] * 6 + [1] * 10)), [0.0] * 16)


def test_leave_one_out_and_unbiased_by_hand() -> None:
    # the others' means of 1 3 | 10 40 are 3 1 | 40 10
    close(
        normalize(
            torch.tensor([1.0, 3, 10, 40]),
            Levels("group", None, leave_one_out=True),
            number_groups(4, 2),
        ),
        [-2.0, 2, -30, 30],
    )
    # around the plain mean 2: squares 1 + 1, over 2 - 1
    close(
        normalize(torch.tensor([1.0, 3.0]), Levels("batch", "batch", eps=0.5, unbiased=True)),
        [-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)],
    )
    close(
        normalize(torch.tensor([5.0]), Levels("group", "group", leave_one_out=True, unbiased=True)),
        [5 / (5 + 1e-5)],
    )


def test_leave_one_out_counts_masked_entries_only() -> None:
    x, mask = torch.tensor([[2.0, 99.0], [4.0, 9.0]]), torch.tensor([[True, False], [True, True]])
    close(
        normalize(x, Levels("batch", None, leave_one_out=True), mask=mask), [[2 - 6.5, 0], [4 - 5.5, 9 - 3]]
    )


def test_remainder_rows_of_areal_are_divided_by_eps() -> None:
    close(
        normalize(torch.tensor([1.0, 3, 0.5]), Levels("group", "group"), number_groups(3, 2))[:2],
        [-0.99999, 0.99999],
    )
    assert normalize(torch.tensor([1.0, 3, 0.5]), Levels("group", "group"), number_groups(3, 2))[
        2
    ] == pytest.approx(0.5e5)


def test_sums_are_exact_where_float32_would_drift() -> None:
    x = torch.full((20_000,), 1e4) + torch.arange(20_000) % 2
    close(normalize(x, Levels("batch", None)).abs().mean(), 0.5)


def test_rows_that_share_an_entry_count_once() -> None:
    # two rows of one episode with reward 1, and one of another with reward 0
    x, group_B, share_B = (
        torch.tensor([1.0, 1, 0]),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([0.5, 0.5, 1]),
    )
    close(normalize(x, Levels("group", None), group_B, share_B=share_B), [0.5, 0.5, -0.5])
    close(normalize(x, Levels("group", "group"), group_B, share_B=share_B), [0.99998, 0.99998, -0.99998])
    alone = Levels("group", None, leave_one_out=True)
    close(normalize(x, alone, group_B, share_B=share_B), [1.0, 1.0, -1.0])
    tokens = torch.tensor([[1.0, 0], [1, 0], [0, 0]])
    mask = torch.tensor([[True, False], [True, False], [True, True]])
    third = -1 / 3  # the mean over 0.5 + 0.5 + 1 + 1 entries
    want = [[1 + third, 0], [1 + third, 0], [third, third]]
    close(normalize(tokens, Levels("batch", None), None, mask, share_B), want)
