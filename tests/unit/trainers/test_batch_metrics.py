"""Metrics of a batch that are counted over all rows at once."""

import numpy as np

from hpc_rl.core.types import Trajectory
from hpc_rl.trainers.batch_metrics import MadeTokens


def make_row(mask: list[bool], steps: list[int], lineage: int = 0) -> Trajectory:
    made = np.array(mask, dtype=bool)
    return Trajectory(
        ids=np.zeros(len(mask), np.int32),
        loss_mask=made,
        logprobs=np.zeros(len(mask), np.float32),
        lineages=np.where(made, lineage, -1).astype(np.int32),
        steps=np.where(made, steps, -1).astype(np.int32),
        reward=0.0,
        finish_reason="stop",
    )


def test_made_tokens_are_those_of_each_row():
    rows = [
        make_row([False, True, True], [0, 7, 5]),
        make_row([False, False], [0, 0]),
        make_row([True, False, True, True], [9, 0, 8, 9], lineage=1),
        make_row([], []),
    ]
    made = MadeTokens.of(rows)
    assert made.count_R.tolist() == [int(row.loss_mask.sum()) for row in rows] == [2, 0, 3, 0]
    assert made.oldest_R.tolist() == [row.oldest_step() for row in rows] == [5, 0, 8, 0]
    assert made.is_of_other_lineage(0) and MadeTokens.of(rows[:2]).is_of_other_lineage(0) is False


def test_no_rows_have_no_tokens():
    made = MadeTokens.of([])
    assert len(made.count_R) == len(made.oldest_R) == 0 and not made.is_of_other_lineage(0)
