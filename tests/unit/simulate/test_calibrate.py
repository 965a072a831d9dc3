"""Calibration: what the files of a trial tell comes back, and the rest stays at named defaults."""

import sys
from operator import mul

import pytest
from simulated_trials import LENGTHS, TOKEN_S, make_units, write_history
from toy_plans import toy_plan

from hpc_rl.core.errors import TrialStateError
from hpc_rl.core.trial import Trial, load_object, write_json
from hpc_rl.simulate.calibrate import calibrate, fit_decode, fit_line
from hpc_rl.simulate.costs import Costs

PROMPT = 3


def make_trial(root, name: str, ranks: int, num_steps: int = 12) -> Trial:
    """A trial whose steps take 0.5 s, and 1 ms for each token of a rank."""
    trial = Trial.of(root, "me", "exp", name)
    trial.make_dirs()
    plan = toy_plan(list(make_units(2, ranks)), sys.executable, allocation=f"embedded:d2+fsdp:d{ranks}")
    write_json(trial.plan_json, plan.to_json())
    write_history(trial, num_steps, ranks=ranks)
    return trial


def test_what_a_trial_tells_is_measured(tmp_path):
    costs = calibrate([make_trial(tmp_path, "one", ranks=2)])
    assert costs.train_s == pytest.approx(0.5) and costs.train_token_s == pytest.approx(0.001)
    assert costs.train_ranks == 2
    assert sorted(set(costs.lengths)) == list(LENGTHS) and costs.prompt_tokens == PROMPT
    # 12 tokens of a group in 0.4 s, two groups at once: three sequences on average
    assert costs.compute_token_s(3) == pytest.approx(TOKEN_S)
    assert (costs.publish_write_s, costs.publish_pause_s, costs.save_s) == (0.3, 0.02, 1.5)
    assert costs.log_s == pytest.approx(0.05)
    assert costs.start_job_s == 10.0 and costs.end_s == pytest.approx(4.0)
    assert costs.start_trainer_s == costs.start_server_s == pytest.approx(10.05)


def test_the_rest_stays_at_named_defaults(tmp_path):
    costs = calibrate([make_trial(tmp_path, "one", ranks=1)])
    assert {"evaluate_s", "file_byte_s", "train_scaling"} <= set(costs.list_defaults())
    assert not {"train_token_s", "decode_s", "lengths"} & set(costs.list_defaults())
    assert costs.origins["lengths"] == "40 completions in the batch log"


def test_several_numbers_of_ranks_measure_the_scaling(tmp_path):
    costs = calibrate([make_trial(tmp_path, f"r{ranks}", ranks) for ranks in (1, 4)])
    assert "train_scaling" in costs.origins
    assert costs.train_s == pytest.approx(0.5) and costs.train_token_s == pytest.approx(0.001)


def test_a_trial_without_steps_measures_nothing(tmp_path):
    trial = make_trial(tmp_path, "new", ranks=1, num_steps=2)
    with pytest.raises(TrialStateError, match="fewer than 3 steps"):
        calibrate([trial])


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1, 3), (2, 5), (3, 7)], (1.0, 2.0)),
        ([(1, 7), (2, 5), (3, 3)], (5.0, 0.0)),  # never a negative slope
        ([(1, 0), (2, 4), (3, 8)], (0.0, 2.0)),  # nor a negative intercept
        ([(100, 3), (101, 4)], None),  # too close to tell
        ([(5, 3)], None),
    ],
)
def test_a_line_has_no_negative_costs(points, line):
    found = fit_line(points)
    assert found == (None if line is None else pytest.approx(line))


def test_the_decode_speed_is_fitted_over_requests_at_several_loads(tmp_path):
    trials = [make_trial(tmp_path, name, ranks=1) for name in ("one", "two")]
    # (tokens, mean number of sequences) of requests whose iterations take 0.02 + 0.001 * sequences seconds
    for trial, requests in zip(trials, ([(10, 4), (30, 8)], [(20, 8), (20, 2)]), strict=True):
        x, y = zip(*((n, n * m) for n, m in requests), strict=True)
        s = [n * (0.02 + 0.001 * m) for n, m in requests]
        path = trial.attempt("job.0").server_use(0, 0)
        sums = [sum(map(mul, *pair)) for pair in ((x, x), (x, y), (y, y), (x, s), (y, s))]
        write_json(path, load_object(path) | {"decode": sums})
    costs = calibrate(trials)
    assert (costs.decode_s, costs.decode_sequence_s) == (pytest.approx(0.02), pytest.approx(0.001))


def test_one_level_of_load_is_divided_as_the_defaults_would(tmp_path):
    costs = calibrate([make_trial(tmp_path, "one", ranks=1)])
    assert costs.decode_s / costs.decode_sequence_s == pytest.approx(
        Costs().decode_s / Costs().decode_sequence_s
    )
    assert costs.origins["decode_s"].endswith("at one level of load")
    assert fit_decode([100.0, 400.0, 1600.0, 5.0, 20.0]) is None and fit_decode([0.0] * 5) is None


def test_servers_of_other_jobs_count_too(tmp_path):
    trial = make_trial(tmp_path, "one", ranks=1)
    path = trial.attempt("job.0").server_use(0, 0)
    other = trial.server_attempts / "8_0.0" / "use" / path.name
    other.parent.mkdir(parents=True)
    path.rename(other)
    assert calibrate([trial]).origins["decode_s"].startswith("20 requests")
    other.write_text('{"busy_s": 1.0, "requ')
    assert calibrate([trial]).origins["decode_s"].startswith("10 requests"), "a torn file is left out"
