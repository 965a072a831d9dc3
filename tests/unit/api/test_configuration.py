"""Configurations from Python: options of every kind, checks, and what a notebook shows."""

from pathlib import Path

import numpy as np
import pytest
from command_line import small_trial

import hpc_rl
from hpc_rl.api.configuration import format_options


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    shell = small_trial(tmp_path, "{type: local}")
    monkeypatch.chdir(shell.here)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return shell.here / "grpo.yaml"


def test_options_have_python_values(file, tmp_path):
    config = hpc_rl.load(
        file,
        seed=3,
        trial_name="010",
        actor={"optimizer": {"lr": 1e-6}},
        launcher={"env": {"A": "1"}},
        **{
            "gconfig.temperature": np.float32(0.5),
            "tokenizer_path": tmp_path / "model",
            "valid_dataset": None,
        },
    )
    assert (config["seed"], config["trial_name"]) == (3, "010")
    assert config["actor.optimizer.lr"] == 1e-6
    assert config["gconfig.temperature"] == 0.5
    assert config["gconfig.max_new_tokens"] == 4, "of the file"
    assert config["tokenizer_path"] == str(tmp_path / "model")
    assert config["launcher.env"] == {"A": "1"}
    assert config.config.actor.optimizer.lr == 1e-6
    assert "grpo.yaml:" in config.origins["gconfig.max_new_tokens"]
    assert "actor.optimizer.lr" in config._repr_html_()
    other = config.with_options(seed=4)
    assert (other["seed"], config["seed"], other["actor.optimizer.lr"]) == (4, 3, 1e-6)
    with pytest.raises(KeyError):
        config["actor.lr"]


def test_wrong_options_are_refused_together(file):
    with pytest.raises(hpc_rl.ConfigError) as caught:
        hpc_rl.load(file, sede=3, **{"gconfig.n_samples": "many"})
    assert [one.option for one in caught.value.refusals] == ["sede", "gconfig.n_samples"]
    with pytest.raises(hpc_rl.ConfigError, match="seed can't take this set"):
        hpc_rl.load(file, seed={1, 2})


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), ("1e-6", '"1e-6"'), ([1, "a"], '[1, "a"]'), (float("inf"), ".inf")],
)
def test_values_are_written_as_yaml(value, text):
    assert format_options({"a.b": value}) == [f"a.b={text}"]


def test_a_check_reports_what_the_command_reports(file):
    found = hpc_rl.check(file)
    assert found.ok and bool(found) and not found.refusals
    found.require()
    names = [row["name"] for row in found.rows]
    assert {"configuration", "plan", "state"} <= set(names)
    wrong = hpc_rl.check(hpc_rl.load(file), **{"actor.path": "/nowhere", "seed": -1})
    assert not wrong.ok
    assert any("seed" in line for line in wrong.refusals) and any(
        "/nowhere" in line for line in wrong.refusals
    )
    with pytest.raises(hpc_rl.ConfigError, match="/nowhere"):
        wrong.require()
    assert "refused" in wrong._repr_html_()


def test_a_configuration_shows_no_secret(file):
    config = hpc_rl.load(file, launcher={"env": {"WANDB_API_KEY": "hunter2-hunter2"}})
    assert "hunter2" not in config._repr_html_() + str(config.to_dict())
