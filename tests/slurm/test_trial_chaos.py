"""A real trial on a real Slurm of four nodes, with kills of its processes and nodes, preemptions and requeues
at random: it ends by itself, done; the promises of the batch log hold, and in the deterministic mode its
weights are those of a quiet run.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import EVENTS, Chaos
from kill_anything import EXACT, READY, Killed, Trials, make_workplace, new_luck, short_name

from hpc_rl.core.files import JsonLines
from hpc_rl.status.trial_status import load_status

pytestmark = pytest.mark.timeout(900)
FOUR_NODES = {"cluster.n_nodes": 4, "allocation_mode": "embedded:d2+fsdp:d2"}
ONE_NODE = {"allocation_mode": "embedded:d2+fsdp:d2"}
OFTEN = {"recover.freq_steps": 4, "recover.keep": 50}
NUM_STEPS = 30
SOAK_S = 30 * 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def start(cluster, folder, request, monkeypatch) -> Iterator:
    monkeypatch.setenv(
        "HPC_RL_WATCH_S", "1"
    )  # the watch for a dead first node, which the batch script inherits
    trials = Trials(folder, short_name(request.node.name))

    def start(options: dict, total_steps: int, quiet: bool = False) -> Killed:
        if quiet:
            return trials.start({**options, **ONE_NODE}, "-quiet", total_steps=total_steps)
        one = Chaos(
            folder,
            trials.name,
            {**options, **FOUR_NODES},
            total_steps=total_steps,
            held=True,
            cluster=cluster,
        )
        trials.started.append(one)
        one.submit()
        return one

    yield start
    trials.end_all()


def events_of(one: Chaos) -> list[str]:
    """What the supervisors of all attempts wrote down."""
    return [
        row["event"]
        for attempt in one.trial_attempts()
        for row in JsonLines(one.trial.attempt(attempt).events).poll()
    ]


def check(one: Chaos) -> None:
    one.finish().promises.check()
    story = load_status(one.trial)
    assert story.state == "done"
    assert [row["step"] for row in story.history.steps] == list(range(1, one.total_steps + 1)), (
        "each step once"
    )


def all_events(luck: random.Random) -> list[str]:
    """In any order, but a job that lost a node is started again by the next: until then Slurm may give no
    place to its steps, which takes two minutes to be sure of (a soak test does).
    """
    events = [event for event in luck.sample(EVENTS, len(EVENTS)) if event != "server node"]
    events.insert(events.index(luck.choice(("requeue", "preempt", "first node"))), "server node")
    return events


@pytest.mark.soak
def test_chaos_for_two_minutes_changes_no_bit(start):
    luck = new_luck()
    options = {**EXACT, **OFTEN}
    quiet = start(options, NUM_STEPS, quiet=True)  # trains beside it, without Slurm
    one = start(options, NUM_STEPS)
    for event in all_events(luck):
        one.between(luck, 2)
        if one.over:
            break
        one.strike(event, luck)
    assert len(one.events) >= 5
    check(one)
    assert one.weights() == quiet.finish().weights() != one.base_weights()


@pytest.mark.soak
def test_the_first_node_dies_after_a_requeue_from_a_dead_node(start):
    """Slurm 22.05 then goes on listing the node that died last as the job's."""
    luck = new_luck()
    one = start(READY, NUM_STEPS)
    for event in ("server node", "requeue", "first node"):
        one.between(luck, 2)
        one.strike(event, luck)
    check(one)
    assert [row["event"] for row in JsonLines(one.trial.job_state(one.job_id)).poll()].count(
        "first_node_lost"
    ) >= 1


@pytest.mark.soak
def test_a_job_that_lost_a_node_and_places_no_step_is_exchanged(start):
    """Slurm 22.05 does not take back the cores of steps that ran when the job lost a node: they can't be
    started again.
    """
    luck = new_luck()
    one = start(READY, NUM_STEPS)
    one.between(luck, 2)
    one.strike("server node", luck)
    one.until(lambda: "gave_up" in events_of(one))  # only now has Slurm made the job smaller
    for event in ("supervisor", "trainer"):
        one.between(luck, 2)
        one.strike(event, luck)
    check(one)
    assert "unplaced" in events_of(one) and "hung" not in events_of(one)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("options", [EXACT, READY], ids=["exact", "ready"])
def test_chaos_for_half_an_hour(start, options):
    luck = new_luck()
    options = {**options, **OFTEN}
    one = start(options, 400)
    end = time.monotonic() + SOAK_S
    while time.monotonic() < end and not one.over:
        one.between(luck, 12)
        one.strike(luck.choice(EVENTS), luck)
    assert len(one.events) >= 20
    check(one)
    if options["rollout.max_head_offpolicyness"] == 0:
        quiet = start(options, 400, quiet=True).finish()
        assert one.weights() == quiet.weights()
