"""Trials whose trainer compiles its layers: one that is killed and resumed equals the unbroken one."""

import signal
from pathlib import Path

import pytest
from toy_trials import make_toy
from trainer_processes import Roles, make_trial, write_plan

from hpc_rl.core.trial import Trial

OPTIONS = [
    "total_train_steps=12",
    "train_dataset.batch_size=16",
    "model.enable_torch_compile=true",
    "model.gradient_checkpointing=true",
    "recover.freq_steps=3",
]


def make(folder: Path, name: str, mode: str) -> Trial:
    trial = make_trial(folder, name, "sft", [*OPTIONS, f"recover.mode={mode}"])
    write_plan(trial, "sft", 1)
    return trial


def has_compiled_layers(cache: Path) -> bool:
    """Return whether a norm was compiled; the trial of the compiler has none."""
    return any("rsqrt" in path.read_text() for path in cache.rglob("*.cpp"))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_compiled_trial_that_is_killed_equals_an_unbroken_one(tmp_path, monkeypatch):
    toy = make_toy(tmp_path, "base")
    whole, broken = make(toy, "whole", "disabled"), make(toy, "broken", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "first"))
    with Roles(whole, "1.0") as roles:
        log = roles.log("trainer")
        assert roles.ended(roles.trainer()) == [0]
    assert "layers are compiled" in log.read_text()
    unbroken = roles.rows()
    assert has_compiled_layers(tmp_path / "first")
    with Roles(broken, "1.0") as roles:
        first = roles.trainer(stays_at=11)
        roles.wait_for_step(7)
        Roles.kill(first)
        assert roles.ended(first) == [-signal.SIGKILL]
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "second"))  # compiled again
        assert roles.ended(roles.trainer()) == [0]
    resumed = roles.rows(1)
    assert has_compiled_layers(tmp_path / "second")
    assert 4 <= resumed[0]["step"] <= 10
    numbers = [[(row["loss"], row["grad_norm"]) for row in rows] for rows in (unbroken, resumed)]
    assert numbers[1] == numbers[0][-len(resumed) :]
    finals = [trial.exports / "final" / "model.safetensors" for trial in (whole, broken)]
    assert finals[0].read_bytes() == finals[1].read_bytes()
