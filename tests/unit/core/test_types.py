"""The wire format: what is decoded is what was encoded."""

from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest

from hpc_rl.core import types
from hpc_rl.core.types import Batch, Trajectory, TrajectoryGroup, decode, encode


def make_trajectory(length: int, **more) -> Trajectory:
    draw = np.random.default_rng(length)
    return Trajectory(
        ids=draw.integers(0, 1 << 17, length).astype(np.int32),
        loss_mask=draw.random(length) < 0.5,
        logprobs=-draw.random(length).astype(np.float32),
        lineages=np.zeros(length, np.int32),
        steps=np.full(length, 7, np.int32),
        reward=0.5,
        finish_reason="stop",
        **more,
    )


def assert_same(got, wanted):
    for field in fields(Trajectory):
        one, other = getattr(got, field.name), getattr(wanted, field.name)
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype and np.array_equal(one, other), field.name
            one[...] = one  # a trainer may write
        else:
            assert one == other, field.name


FLOATS = np.arange(4, dtype=np.float32)
GROUPS = {
    "plain": [make_trajectory(4), make_trajectory(1), make_trajectory(9)],
    "some fields of some": [
        make_trajectory(4, advantages=FLOATS, stats={"reward/format": 1.0}),
        make_trajectory(3),
        make_trajectory(4, advantages=FLOATS, zero_advantage=True, has_logprobs=False),
    ],
    "matrices": [
        make_trajectory(
            2, teacher_top_ids=np.ones((2, 3), np.int32), teacher_top_logprobs=np.ones((2, 3), "f4")
        ),
        make_trajectory(
            5, teacher_top_ids=np.ones((5, 3), np.int32), teacher_top_logprobs=np.ones((5, 3), "f4")
        ),
    ],
    "arrays that do not fit together": [
        make_trajectory(2, teacher_top_ids=np.ones((2, 3), np.int32)),
        make_trajectory(2, teacher_top_ids=np.ones((2, 4), np.int32)),
    ],
    "types that differ": [make_trajectory(2), replace(make_trajectory(2), logprobs=np.zeros(2))],
    "nothing": [],
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_batch_arrives_as_it_was_sent(kind):
    group = TrajectoryGroup(3, GROUPS[kind], {"prompt": "1+2="}, ["long"])
    got = decode(encode(Batch(5, [group, group])))
    assert got.step == 5 and len(got.groups) == 2
    for one in got.groups:
        assert (one.index, one.columns, one.shortened) == (3, {"prompt": "1+2="}, ["long"])
        assert len(one.trajectories) == len(group.trajectories)
        for mine, theirs in zip(one.trajectories, group.trajectories, strict=True):
            assert_same(mine, theirs)


def test_the_trajectories_of_a_group_share_their_arrays():
    """Eight short completions: the numbers are most of the bytes."""
    group = TrajectoryGroup(0, [make_trajectory(12) for _ in range(8)])
    assert len(encode(group)) < 8 * 12 * (4 + 1 + 4 + 4 + 4) + 600


def test_groups_of_older_logs_are_read(monkeypatch):
    group = TrajectoryGroup(3, GROUPS["plain"])
    monkeypatch.setattr(types, "_join_trajectories", lambda rows: None)
    raw = encode(group)
    monkeypatch.undo()
    assert isinstance(msgpack.unpackb(raw)["v"]["trajectories"], list)
    for mine, theirs in zip(decode(raw).trajectories, group.trajectories, strict=True):
        assert_same(mine, theirs)
