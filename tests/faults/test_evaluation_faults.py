"""Evaluations beside the training of a real trial on this machine: their results are those of evaluations that
pause it, and kill -9 of each process loses and repeats no held-out prompt.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_anything import (
    EXACT,
    NUM_HELD_OUT,
    Killed,
    Trials,
    list_scored,
    make_workplace,
    new_luck,
    short_name,
)

from hpc_rl.stats.read import load_history

pytestmark = pytest.mark.timeout(600)
OWN = "embedded:d1+embedded[eval]:d1+fsdp:d1"
SETS = {
    "evaluator.freq_steps": 5,
    "evaluator.sets.short.n_samples": 4,
    "evaluator.sets.short.max_new_tokens": 2,
    "evaluator.sets.short.freq_steps": 10,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def trials(folder: Path, request) -> Iterator[Trials]:
    trials = Trials(folder, short_name(request.node.name))
    yield trials
    trials.end_all()


def of(folder: Path) -> dict[str, object]:
    """The options of the held-out sets."""
    return {**SETS, "evaluator.sets.short.path": folder / "task" / "heldout.jsonl"}


def measures(one: Killed) -> list[dict]:
    """The evaluations without what depends on time."""
    rows = load_history(one.trial).evaluations
    return [
        {name: row[name] for name in row if name not in ("time", "eval_s", "eval_asked_again")}
        for row in rows
    ]


@pytest.fixture(scope="module")
def paused(folder: Path) -> Iterator[Killed]:
    trials = Trials(folder, "paused")
    yield trials.start({**EXACT, **of(folder), "evaluator.blocking": True}, total_steps=12).finish()
    trials.end_all()


def test_each_set_is_evaluated_in_its_period_by_a_pool_of_its_own(trials, folder):
    one = trials.start({**EXACT, **of(folder), "allocation_mode": OWN}, total_steps=12).finish()
    rows = measures(one)
    assert [("eval_short/reward" in row, "eval_short/pass@4" in row) for row in rows] == [
        (True, True), (False, False), (True, True), (True, True)
    ]  # fmt: skip
    assert {row["eval_short/num_prompts"] for row in rows if "eval_short/reward" in row} == {NUM_HELD_OUT}


@pytest.mark.soak
@pytest.mark.parametrize("allocation", ["embedded:d1+fsdp:d1", "embedded:d2+fsdp:d1", OWN])
def test_results_are_those_of_evaluations_that_pause_training(trials, folder, paused, allocation):
    beside = trials.start({**EXACT, **of(folder), "allocation_mode": allocation}, total_steps=12).finish()
    assert measures(beside) == measures(paused)
    assert beside.weights() == paused.weights()


@pytest.mark.soak
def test_kills_lose_and_repeat_no_held_out_prompt(trials, folder):
    luck = new_luck()
    options = {
        **EXACT,
        **of(folder),
        "allocation_mode": OWN,
        "recover.freq_steps": 1,
        "recover.keep": 50,
    }
    one = trials.start(options, total_steps=12, held=True)
    one.kill_each(["server", "sequencer", "trainer", "worker", "supervisor", "server"], luck, most_steps=2)
    one.finish().promises.check()
    assert {name for _, name, _ in list_scored(one.trial)} == {"valid_dataset", "short"}
