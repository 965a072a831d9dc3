"""Tuning: a badly divided trial gets the better split, with a range; options that help nothing are not named."""

from dataclasses import replace

import pytest
import yaml
from simulated_trials import COSTS, make_small, make_units

from hpc_rl.cli.tune import describe, format_file, format_overrides
from hpc_rl.simulate import tune as module
from hpc_rl.simulate.result import run
from hpc_rl.simulate.setup import Faults
from hpc_rl.simulate.tune import Advice, compute_rate, compute_young_daly, draw_costs, tune

TOTAL = 8
SLOW = replace(COSTS, decode_s=0.05, decode_sequence_s=0.004, train_s=0.2, train_token_s=0.004)
BAD = make_small(num_servers=1, num_ranks=TOTAL - 1, max_concurrent=32)
SPLITS = [
    (f"d{count}", replace(BAD, units=make_units(count, TOTAL - count), n_nodes=TOTAL))
    for count in range(1, TOTAL)
]


def find(advice: list[Advice], option: str) -> Advice | None:
    return next((one for one in advice if one.option == option), None)


def test_a_badly_divided_trial_gets_the_best_split():
    advice = tune(BAD, "d1", SLOW, Faults(), lambda: SPLITS, num_draws=3, with_learning=False)
    split = find(advice, "allocation_mode")
    assert split is not None and split.low > 0.2 and split.low <= split.gain <= split.high
    room = find(advice, "rollout.max_concurrent_rollouts")
    rules = replace(BAD.rules, max_concurrent=room.value if room else 32)
    rates = {name: compute_rate(replace(one, rules=rules), SLOW, 0) for name, one in SPLITS}
    assert rates[split.value] >= 0.97 * max(rates.values())


def test_a_good_trial_is_left_alone():
    advice = tune(BAD, "d1", SLOW, Faults(), lambda: SPLITS[:1], num_draws=2, with_learning=False)
    assert find(advice, "allocation_mode") is None


def test_changes_of_what_is_learned_are_marked():
    advice = tune(make_small(eta=0), "d2", SLOW, Faults(), num_draws=2)
    assert any(one.changes_learning for one in advice)
    assert not find(advice, "actor.weight_update_mode"), "its cost was measured for one mode alone"
    text = "\n".join(describe(advice))
    assert "changes what is learned" in text


def test_young_and_daly_by_hand():
    # sqrt(2 * 20 * (72000 + 0)) - 20
    assert compute_young_daly(20.0, 0.0, 72_000.0) == pytest.approx(1697.06 - 20.0, abs=0.1)
    assert compute_young_daly(20.0, 0.0, 1.0) == 20.0


def test_rare_checkpoints_under_failures_are_made_more_often():
    setup = make_small(num_servers=2, num_ranks=4, total_steps=400, save_every=100)
    faults = Faults(mtbf_s=1000.0, notice_s=5.0, requeue_s=5.0)
    advice = find(tune(setup, "d2", COSTS, faults, num_draws=2, with_learning=False), "recover.freq_steps")
    assert advice is not None and advice.value < 100 and advice.gain > 0.01
    assert "Young and Daly" in advice.reason and advice.now == 100


def test_costs_are_drawn_around_their_values():
    measured = COSTS.replace_measured("steps", train_s=1.0)
    drawn = [draw_costs(measured, seed) for seed in range(1, 60)]
    assert draw_costs(measured, 0) == measured
    narrow, wide = ([getattr(one, name) for one in drawn] for name in ("train_s", "save_s"))
    assert max(narrow) / min(narrow) < 1.5 < max(wide) / min(wide)


def test_options_become_a_file_and_arguments():
    numbers = {"gain": 0.5, "low": 0.4, "high": 0.6}
    found = [
        Advice(option="allocation_mode", now="a", value="sglang:d6+fsdp:d2", **numbers),
        Advice(option="rollout.max_concurrent_rollouts", now=8, value=64, **numbers),
    ]
    assert format_overrides(found) == [
        "allocation_mode=sglang:d6+fsdp:d2",
        "rollout.max_concurrent_rollouts=64",
    ]
    expected = {"allocation_mode": "sglang:d6+fsdp:d2", "rollout": {"max_concurrent_rollouts": 64}}
    assert yaml.safe_load(format_file("one", found)) == expected


def test_rare_failures_of_a_short_trial_are_simulated_over_its_own_steps(monkeypatch):
    """Young and Daly's interval may be a thousand times as long as the trial."""
    simulated = []
    monkeypatch.setattr(
        module, "run", lambda setup, *rest, **more: simulated.append(setup) or run(setup, *rest, **more)
    )
    tune(make_small(), "d2", COSTS, Faults(mtbf_s=60 * 86400.0), num_draws=1, with_learning=False)
    assert {setup.total_steps for setup in simulated} == {20}
