"""`hpc-rl simulate` and `hpc-rl tune` from the command line."""

import getpass
import json

import pytest
import yaml
from simulated_trials import write_history

from hpc_rl.cli.__main__ import main
from hpc_rl.cli.simulate import parse_duration_s
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.simulate.tune import Advice


def test_a_configuration_is_simulated(config, capsys):
    assert main(["simulate", str(config), "--json", "--draws", "2", *SPLIT]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["allocation"] == "embedded:d2+fsdp:d2" and found["predicted"]["steps"] == 10
    low, high = found["spread"]["makespan_s"]
    assert low < high
    assert found["costs"]["train_s"]["origin"] == "default"
    assert found["costs"]["server_sequences"]["origin"] == "embedded.max_running_requests"
    buckets = found["predicted"]["buckets"]
    assert sum(buckets.values()) == pytest.approx(found["predicted"]["allocation_s"])


def test_the_text_names_bottleneck_and_defaults(config, capsys):
    assert main(["simulate", str(config), "--draws", "1", "--mtbf", "30d"]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "bottleneck" in printed and "All other costs are defaults" in printed


def test_more_nodes_and_a_map(config, tmp_path, capsys):
    page = tmp_path / "map.html"
    argv = ["simulate", str(config), "-N", "2", "allocation_mode=embedded:d4+fsdp:d4", "--draws", "1"]
    argv += ["launcher.type=slurm", "train_dataset.batch_size=32"]
    assert main([*argv, "--html", str(page)]) == ExitCode.DONE
    assert "on 2 nodes" in capsys.readouterr().out
    assert '"heatmap"' in page.read_text()


def test_only_pipelines_are_simulated(config, capsys):
    assert main(["simulate", str(config), "trainer=sft", "model.path=/m"]) != ExitCode.DONE
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2592000.0), ("1.5h", 5400.0), ("90", 90.0), ("5m", 300.0)]
)
def test_durations(text, seconds):
    assert parse_duration_s(text) == seconds


def test_no_draws_are_a_usage_error(config, capsys):
    assert main(["simulate", str(config), "--draws", "0"]) == ExitCode.USAGE
    assert "an integer, at least 1" in capsys.readouterr().err


def test_a_wrong_duration_is_a_usage_error(config, capsys):
    assert main(["simulate", str(config), "--mtbf", "soon"]) == ExitCode.USAGE
    assert "30d, 12h, 5m or 90s" in capsys.readouterr().err


BUSY = ("train_dataset.batch_size=24", "embedded.max_running_requests=8")
SPLIT = ("allocation_mode=embedded:d2+fsdp:d2", "train_dataset.batch_size=24")


@pytest.fixture
def trained(config) -> str:
    """The directory of a trial with one slow server and three ranks that wait."""
    assert main(["render", str(config), "allocation_mode=embedded:d1+fsdp:d3", *BUSY]) == 0
    trial = Trial.of(config.parent / "runs", getpass.getuser(), "sums", "small")
    write_history(trial, wait_s=60.0, train_s=2.0, iteration_s=1.0)
    return str(trial.dir)


def test_a_trial_is_measured_and_divided_better(trained, capsys):
    capsys.readouterr()
    assert main(["tune", trained, "--json", "--draws", "2"]) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    advice = {one["option"]: one for one in found["advice"]}
    split = advice["allocation_mode"]
    assert split["now"] == "embedded:d1+fsdp:d3" and split["value"] != split["now"] and split["low"] > 0
    assert f"allocation_mode={split['value']}" in found["overrides"]
    assert found["costs"]["decode_s"]["origin"] != "default"


def test_the_options_go_to_a_file(trained, tmp_path, capsys):
    path = tmp_path / "tuned.yaml"
    assert main(["tune", trained, "--draws", "1", "--apply", str(path)]) == ExitCode.DONE
    assert yaml.safe_load(path.read_text())["allocation_mode"].startswith("embedded:d")
    assert "train_dataset" not in path.read_text(), "changes of what is learned need --learning"


def test_a_simulation_takes_its_costs_from_trials(trained, config, capsys):
    argv = ["simulate", str(config), "--from", trained, "--json", "--draws", "1"]
    assert main([*argv, *SPLIT]) == ExitCode.DONE
    printed = capsys.readouterr().out
    found = json.loads(printed[printed.index("{") :])
    assert found["costs"]["train_token_s"]["origin"].endswith("steps")


def test_nothing_to_apply_is_said(trained, tmp_path, capsys, monkeypatch):
    path = tmp_path / "tuned.yaml"
    numbers = {"gain": 0.1, "low": 0.05, "high": 0.2}
    ahead = Advice(option="rollout.max_head_offpolicyness", now=1, value=4, **numbers)
    for found, why in (([ahead], "add --learning"), ([], "no options")):
        monkeypatch.setattr("hpc_rl.cli.tune.tune", lambda *_, found=found, **__: found)
        assert main(["tune", trained, "--apply", str(path)]) == ExitCode.DONE
        assert why in capsys.readouterr().err
    assert not path.exists()
