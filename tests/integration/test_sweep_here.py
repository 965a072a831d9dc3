"""A sweep on this machine: trials one after the other, and the median rule stops a bad one."""

import json
from pathlib import Path

import pytest
from toy_trials import ROOT, hpc_rl, logs_of, make_toy, status, trial_of

OPTIONS = ("experiment_name=sums", "trial_name=toy", "launcher.type=local", "total_train_steps=8")
RATES = ("1e-2", "5e-3", "2e-3", "1e-9")  # the last one learns nothing
STOP_AT = 5


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_median_rule_stops_the_trial_that_learns_nothing(tmp_path: Path):
    make_toy(tmp_path / "quickstart", "base")
    rates = f"model.optimizer.lr={','.join(RATES)}"
    config = str(ROOT / "configs/quickstart/sft.yaml")
    words = [*OPTIONS, "callbacks=[]", rates, "--stop_early", str(STOP_AT), "--metric", "loss"]
    said = hpc_rl("sweep", config, *words, cwd=tmp_path, timeout_s=600).stdout
    assert said.count("submitted  ") == len(RATES), "one at a time"
    found = json.loads(hpc_rl("sweep", "--report", "toy", "--json", cwd=tmp_path).stdout)
    *good, bad = found["trials"]
    trial = trial_of(tmp_path, bad["name"])
    assert [(one["state"], one["step"]) for one in good] == [("done", 8)] * 3
    assert (bad["state"], bad["step"]) == ("cancelled", STOP_AT), logs_of(trial)
    assert f"loss up to step {STOP_AT}" in bad["reason"] and "the median of the other trials" in bad["reason"]
    assert found["best_trial"] != bad["name"] and found["num_over"] == len(RATES)
    assert found["groups"][-1]["options"] == {"model.optimizer.lr": RATES[-1]}
    hpc_rl("recover", bad["name"], "callbacks=[]", "--follow", cwd=tmp_path, timeout_s=300)
    done = status(tmp_path, bad["name"])
    assert (done["state"], done["step"]) == ("done", 8), "it goes on without the rule"
