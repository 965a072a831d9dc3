"""Options of `rollout` and `gconfig`: each does what it says."""

import numpy as np
import pytest

from hpc_rl.app.rollout import rules
from hpc_rl.config.loading.load import load
from hpc_rl.config.sections.inference import GenerationHyperparameters
from hpc_rl.rollout.batch_log.ledger import GroupRecord, RecordPlace
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.rollout.sequencer import Rules, Sequencer
from hpc_rl.rollout.server_pool import sampling
from hpc_rl.rollout.workflow import check_group
from hpc_rl.types import Trajectory, TrajectoryGroup


def test_sampling_says_what_is_not_neutral():
    assert sampling(GenerationHyperparameters(), [2]) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [2],
    }
    unusual = GenerationHyperparameters(
        stop=["\n\n"],
        frequency_penalty=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        top_p=0.9,
        top_k=50,
        stop_token_ids=[7],
    )
    assert sampling(unusual, [2]) == {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 50,
        "stop_token_ids": [7, 2],
        "stop": ["\n\n"],
        "frequency_penalty": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
    }


def test_rules_come_from_the_configuration():
    words = [
        "experiment_name=e",
        "trial_name=t",
        "train_dataset.path=/d",
        "actor.path=/m",
        "train_dataset.batch_size=4",
    ]
    more = ["rollout.queue_size=9", "rollout.max_head_offpolicyness=3", "rollout.max_concurrent_rollouts=5"]
    made = rules(load([], words + more).config)
    assert (made.queue_size, made.eta, made.max_concurrent, made.batch_size) == (9, 3, 5, 4)
    assert rules(load([], words).config).max_concurrent == 8
    assert rules(load([], [*words, "async_training=false"]).config).eta == 0


def test_the_queue_bounds_what_runs_and_what_waits():
    core = Sequencer(Rules(batch_size=4, max_concurrent=100, eta=10, queue_size=6))
    core.observe(0, 0)
    issued = core.issue()
    assert len(issued) == 6 and core.issue() == []
    for issue in issued[:2]:
        record = GroupRecord(
            index=issue.index,
            begun=0,
            oldest_step=0,
            oldest_lineage=0,
            num_trajectories=1,
            num_tokens=1,
            reward_sum=0.0,
        )
        core.finished(issue.ticket, record, RecordPlace(0, issue.index))
    assert core.issue() == []  # two are ready, four run


def group(**changes) -> TrajectoryGroup:
    whole = {
        "ids": np.array([5, 6, 7], np.int32),
        "loss_mask": np.array([False, True, True]),
        "logprobs": np.array([0, -1, -2], np.float32),
        "lineages": np.array([-1, 0, 0], np.int32),
        "steps": np.array([-1, 3, 3], np.int32),
        "reward": 1.0,
        "finish_reason": "stop",
    }
    return TrajectoryGroup(3, [Trajectory(**{**whole, **changes})])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([1, 2], "prompt 3: the workflow returned list"),
        (TrajectoryGroup(3, [{}]), "trajectory 0 is dict"),
        (group(ids=[5, 6, 7]), "ids must be a one-dimensional array of int32"),
        (group(logprobs=np.array([0, -1], np.float32)), "logprobs has 2 entries, ids has 3"),
        (group(logprobs=np.array([0, np.nan, -2], np.float32)), "logprobs must be finite"),
        (group(steps=np.array([-1, -1, 3], np.int32)), "must name a weight version"),
    ],
)
def test_a_group_that_can_not_be_trained_on_is_always_refused(made, words):
    with pytest.raises(Rejection, match=words):
        check_group(made, 3)
    check_group(group(), 3)


def test_a_group_of_another_size_is_refused_where_the_workflow_is_built_in():
    check_group(group(), 3)
    with pytest.raises(Rejection, match=r"prompt 3: the group has 1 trajectories; gconfig.n_samples is 4"):
        check_group(group(), 3, num_trajectories=4)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (group(loss_mask=np.zeros(3, bool)), "marks no token"),
        (group(logprobs=np.array([0, 1, -2], np.float32)), "logprobs must be at most 0"),
    ],
)
def test_what_the_strict_check_adds(made, words):
    check_group(made, 3)
    with pytest.raises(Rejection, match=words):
        check_group(made, 3, strict=True)
