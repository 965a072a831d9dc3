"""top: what a trial does now, in lines that fit the terminal."""

import time

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.core.trial import load_object, write_json
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.status.top_view import TrialEye, describe_trial, draw_sparkline
from hpc_rl.trials import trial_index


@pytest.fixture
def running(fake_trial):
    """A trial at step 12 of 100, with checkpoint 10, whose time limit is near."""
    fake_trial.run_to(12)
    trial = fake_trial.trial
    units = [{"role": "server", "index": 0, "pool": "rollout", "nodes": [0]}]
    write_json(trial.plan_json, {"units": units, "n_nodes": 1})
    write_json(trial.config_json, {"total_train_steps": 100, "recover": {"freq_steps": 5, "freq_secs": None}})
    attempt = trial.attempt("7.0")
    write_json(attempt.activity("trainer", 0, 0), {"doing": "wait", "step": 13})
    for role, host in (("trainer", "node-a"), ("server", "node-b")):
        write_json(attempt.process_record(role, 0, 0, 0), {"pid": 1, "host": host})
    write_json(attempt.rollout_report(0), {"time": time.time(), "running": 7, "ready": 3, "accepted": 70})
    fake_trial.event("7.0", "end_time", ends_at=time.time() + 7200)
    fake_trial.generation(10)
    row = {"step": 12, "time": 1_790_000_021.0, "version": "0.12", "lineage": 0, "reward": 0.12}
    split = {"wait_s": 1.0, "train_s": 2.0, "publish_s": 0.5, "step_s": 4.0}
    own = {"reward/format": 0.5, "agent/turns_until_the_answer": 3.0}
    fake_trial.row("7.0", {**row, **split, **own, "staleness_mean": 0.5, "staleness_max": 2})
    NameResolve(trial.names).lease(keys.server("rollout", 0), {"version": "0.12", "state": "serving"})
    return trial


def test_it_tells_everything_in_80_columns(running, fake_trial, scheduler_of_files):
    found = describe_trial(TrialEye(running).look(), 80)
    assert all(len(line) <= 80 for line in found)
    by_name = {line.split()[0]: line for line in found}
    assert "running  step 12/100" in found[0]
    assert "wall time left 1 h 59 min" in by_name["time"] or "wall time left 2 h" in by_name["time"]
    assert "checkpoint 10, next save at step 15" in by_name["time"]
    assert by_name["reward"].split()[1] == "0.12"
    assert by_name["reward"].split()[2][0] == "▁"
    assert by_name["reward"].endswith("█")
    assert by_name["held-out"].split()[1] == "0.31"
    assert by_name["reward/format"].split()[1:] == ["0.5", "▁"]
    assert by_name["agent/turns_until_the_answer"].split()[1:] == ["3", "▁"]
    assert "1.25 s: wait 7%, train 13%, publish 3%" in by_name["step"]  # of 11 steps of 1 s and one of 4 s
    assert by_name["staleness"].split() == ["staleness", "0.5", "(largest", "2)"]
    assert "7 prompts running, 3 groups ready" in by_name["rollout"]
    assert by_name["trainer-0"].split()[1:] == ["node-a", "wait,", "step", "13"]
    assert by_name["server-0"].split()[1:] == ["node-b", "serving,", "weights", "0.12"]
    units = load_object(running.plan_json)["units"]
    units.append({"role": "server", "index": 1, "pool": "judge", "nodes": [0]})
    write_json(running.plan_json, {"units": units, "n_nodes": 1})
    fake_trial.started("7.0", "server", index=1)
    NameResolve(running.names).lease(keys.server("judge", 1), {"version": "", "state": "serving"})
    found = [line.split() for line in describe_trial(TrialEye(running).look(), 80)]
    assert ["server-1", "(judge)", "serving"] in found  # its weights never change


def test_many_replicas_are_counted(running, fake_trial, scheduler_of_files):
    for index in range(1, 40):
        fake_trial.started("7.0", "server", index=index)
    found = describe_trial(TrialEye(running).look(), 80)
    assert any(line.startswith("39 server") and line.endswith("running") for line in found)
    assert len(found) < 20


@pytest.fixture
def scheduler_of_files(monkeypatch):
    """Nothing is known but files."""
    from hpc_rl.schedulers.base import SchedulerAnswer

    monkeypatch.setattr("hpc_rl.status.scheduler_view.query", lambda *_, **__: SchedulerAnswer())


def test_without_a_terminal_there_is_a_line_for_each_trial(make_fake_trial, tmp_path, state_home, capsys):
    for name in ("one", "two"):
        fake = make_fake_trial(tmp_path / "runs", name=name)
        fake.run_to(3)
        fake.ended("7.0", 70, "rollout-0 gave up")
        fake.script_said("7", "ended", code=70)
        trial_index.record_trial(fake.trial)
    assert main(["top", "one", "two"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("exp/one: failed")
    assert "step 3/100  reward 0.03" in second
    assert main(["top", "one", "--every_s", "0"]) == 64


def test_a_sparkline_has_the_shape_of_the_values():
    assert draw_sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([0, 0, 7, 7], 2) == "▁█"
    assert draw_sparkline([5, 5], 8) == "▁▁"
