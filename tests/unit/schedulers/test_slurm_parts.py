"""Arrays and heterogeneous jobs, which Slurm lists in parts, under the id that was submitted."""

from __future__ import annotations

import pytest

from hpc_rl.schedulers.base import JobState, State
from hpc_rl.schedulers.slurm_parts import fold, whole


@pytest.mark.parametrize(
    ("job_id", "expected"),
    [("12", "12"), ("12_0", "12"), ("12_[1-3%2]", "12"), ("12+1", "12"), ("local-7", "local-7")],
)
def test_a_part_belongs_to_its_job(job_id, expected):
    assert whole(job_id) == expected


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([State.RUNNING, State.PENDING], State.RUNNING),
        ([State.DONE, State.PENDING], State.PENDING),
        ([State.DONE, State.FAILED], State.FAILED),
        ([State.DONE, State.DONE], State.DONE),
        ([State.CANCELLED, State.RUNNING], State.RUNNING),
    ],
)
def test_a_job_lives_while_any_part_may(states, expected):
    parts = [JobState(f"12_{number}", state, nodes=f"n{number}") for number, state in enumerate(states)]
    found = fold([*parts, JobState("9", State.RUNNING)])
    assert found["12"].state is expected
    assert found["9"].state is State.RUNNING
    assert found["12_1"].state is states[1]
