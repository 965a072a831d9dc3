"""kill -9 of each process of a real trial on this machine, one after the other at random steps: the trial
ends by itself, done, and the promises of the batch log hold (DESIGN, section 4).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_anything import (
    EXACT,
    IN_ORDER,
    NUM_ROWS,
    READY,
    SHARED,
    VICTIMS,
    Killed,
    Trials,
    make_workplace,
    new_luck,
    short_name,
    shuffled,
)

from hpc_rl.core.trial import load_json

pytestmark = pytest.mark.timeout(600)
KEPT = {"recover.keep": 50}  # only what comes before the first generation is trimmed


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def trials(folder: Path, request) -> Iterator[Trials]:
    trials = Trials(folder, short_name(request.node.name))
    yield trials
    trials.end_all()


def test_each_process_killed_once(trials):
    luck = new_luck()
    one = trials.start(IN_ORDER, held=True)
    one.kill_each(shuffled(luck), luck)
    assert len(one.kills) == 5
    one.finish().promises.check()


def three_epochs(trials, folder: Path, options: dict, luck) -> Killed:
    data = {
        "train_dataset.path": folder / "task" / "few.jsonl",
        "recover.freq_steps": 3,
        "recover.retries": 200,
        **KEPT,
    }
    one = trials.start({**options, **data}, total_steps=3 * NUM_ROWS // 4, held=True)
    one.until(lambda: one.find("supervisor"))
    return one


def test_three_kills_at_any_instant_of_three_epochs(trials, folder):
    luck = new_luck()
    one = three_epochs(trials, folder, READY, luck)
    one.kill_at_random(3, luck, 3.0)
    assert len(one.kills) == 3
    one.finish().promises.check()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thirty_three_kills_and_few_retries(trials):
    """More kills of the supervisor than `recover.retries`, with checkpoints between them."""
    luck = new_luck()
    options = {**IN_ORDER, **KEPT, "recover.retries": 3, "recover.freq_steps": 1}
    one = trials.start(options, total_steps=150, held=True)
    one.kill_each(shuffled(luck, 7)[:33], luck)
    assert len(one.kills) == 33 and sum(what == "supervisor" for what, _ in one.kills) > 5
    one.finish().promises.check()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("options", [READY, IN_ORDER], ids=["ready", "in_order"])
def test_two_hundred_kills_at_any_instant_of_three_epochs(trials, folder, options):
    """Trial after trial, until there were so many."""
    luck, kills = new_luck(), 0
    while kills < 200:
        trials.name = f"kills-{options.get('rollout.batch_order', 'ready')}-{kills}"
        one = three_epochs(trials, folder, options, luck)
        one.kill_at_random(25, luck, 6.0)
        kills += len(one.kills)
        one.finish().promises.check()
        assert one.kills


@pytest.mark.soak
def test_in_order_and_synchronous_kills_change_no_weight(trials):
    luck = new_luck()
    whole = trials.start(EXACT, "-whole").finish()
    whole.promises.check()
    killed = trials.start(EXACT, held=True)
    killed.kill_each([*shuffled(luck), "server+trainer"], luck)
    assert len(killed.kills) == 6
    killed.finish().promises.check()
    assert killed.weights() == whole.weights() != killed.base_weights()


@pytest.mark.soak
def test_kills_in_both_phases_of_shared_units_change_no_weight(trials):
    luck = new_luck()
    whole = trials.start(EXACT, "-whole").finish()
    killed = trials.start(SHARED, held=True)
    pairs = [(victim, holder) for victim in VICTIMS for holder in ("trainer", "servers")]
    for victim, holder in luck.sample(pairs, len(pairs)):
        killed.kill_in_turn(victim, holder, luck)
    assert len(killed.kills) == len(pairs)
    killed.finish().promises.check()
    assert killed.weights() == whole.weights() != killed.base_weights()


@pytest.mark.soak
def test_the_retry_budget_ends_a_trial_that_makes_no_progress(trials):
    one = trials.start({**IN_ORDER, "recover.retries": 1, "recover.freq_steps": 1000}, total_steps=1000)
    one.kill_each(["trainer"] * 2, new_luck())
    one.until(lambda: one.over)
    assert len(one.kills) == 2
    ended = load_json(one.trial.attempt(f"{one.job_id}.0").ended)
    assert ended["exit_code"] == 70
    assert "(2 failures in a row without a new checkpoint; recover.retries allows 1; " in ended["reason"]
    assert not one.trial.done.exists()


ORDERS = {
    "ready": READY,
    "hard": {**READY, **KEPT, "rollout.staleness_bound": "hard"},
    "in_order": {**IN_ORDER, **KEPT},
}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("order", ORDERS)
def test_each_process_killed_again_and_again(trials, order, number):
    luck = new_luck()
    one = trials.start(ORDERS[order], total_steps=60, held=True)
    one.kill_each(shuffled(luck, 3), luck)
    assert len(one.kills) >= 10
    one.finish().promises.check()


@pytest.fixture(scope="module")
def long_whole(folder: Path) -> Iterator[Killed]:
    trials = Trials(folder, "long-whole")
    yield trials.start(EXACT, total_steps=60).finish()
    trials.end_all()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", [*VICTIMS, "server+trainer", "any"])
def test_the_same_weights_whatever_is_killed_ten_times(trials, long_whole, victim):
    luck = new_luck()
    count = 10
    often = (
        {"recover.freq_steps": 1} if "+" in victim else {}
    )  # five deaths of the server without progress are the end
    one = trials.start({**EXACT, **often}, total_steps=60, held=True)
    one.kill_each(shuffled(luck, 2) if victim == "any" else [victim] * count, luck)
    assert len(one.kills) == count
    one.finish().promises.check()
    assert one.weights() == long_whole.weights()
