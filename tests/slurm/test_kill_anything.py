"""kill -9 of each process of a real trial that runs as a job of four nodes: as in tests/faults, with two trainer ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kill_anything import IN_ORDER, READY, Trials, make_toy, new_luck, short_name, shuffled

pytestmark = pytest.mark.timeout(600)
FOUR_NODES = {"cluster.n_nodes": 4, "allocation_mode": "embedded:d2+fsdp:d2"}


@pytest.fixture
def trials(cluster, tmp_path, request) -> Iterator[Trials]:
    trials = Trials(make_toy(tmp_path), short_name(request.node.name))
    yield trials
    trials.end_all()


@pytest.mark.parametrize("options", [READY, IN_ORDER], ids=["ready", "in_order"])
def test_each_process_killed_once(trials, cluster, options):
    luck = new_luck()
    one = trials.start({**options, **FOUR_NODES}, scheduler="slurm")
    one.kill_each(shuffled(luck), luck)
    assert len(one.kills) == 5
    one.finish().promises.check()
    assert [path.name for path in one.trial.attempts.iterdir()] == [f"{one.job_id}.0"]  # it was never requeued


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [READY, IN_ORDER], ids=["ready", "in_order"])
def test_each_process_killed_again_and_again(trials, cluster, options):
    luck = new_luck()
    one = trials.start({**options, **FOUR_NODES}, scheduler="slurm", total_steps=60)
    one.kill_each(shuffled(luck, 3), luck)
    assert len(one.kills) >= 10
    one.finish().promises.check()
