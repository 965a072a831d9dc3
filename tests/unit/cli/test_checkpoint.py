"""The light half of `hpc-rl checkpoint`: what it refuses, what it leaves, and what the half with torch may rely on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_rl.checkpoint.generation import Commit
from hpc_rl.checkpoint.manifest import Manifest
from hpc_rl.cli import checkpoint
from hpc_rl.cli.__main__ import main
from hpc_rl.errors import ExitCode
from hpc_rl.trial import Trial

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def trial(fake_trial) -> Trial:
    """exp/t1 with generations 3 and 6."""
    for step in (3, 6):
        commit(fake_trial.trial, step)
    return fake_trial.trial


def commit(trial: Trial, step: int, **numbers: float) -> None:
    making = Commit(trial, step, "7.0", 0)
    making.begin()
    making.rank_done(0, [])
    who = {"attempt": "7.0", "incarnation": 0, "submission": "7", "version": f"0.{step}", "metrics": numbers}
    making.commit(Manifest(step=step, lineage=0, num_ranks=1, config_hash="c", **who))


@pytest.fixture
def torch_half(monkeypatch):
    """`torch_half(does)` takes the place of the process with torch; `does` gets its arguments by name."""

    def put(does) -> None:
        def hand_over(action, trial, step, *rest, **_more):
            return does(dict(zip(rest[::2], rest[1::2], strict=True))) or 0

        monkeypatch.setattr(checkpoint, "_hand_over", hand_over)

    return put


def write_weights(given: dict[str, str]) -> None:
    (Path(given["--to"]) / "model.safetensors").write_text("weights")


def test_an_export_touches_nothing_beside_it(trial, tmp_path, torch_half):
    (tmp_path / ".model.tmp").mkdir()
    (tmp_path / ".model.tmp" / "thesis.txt").write_text("mine")
    before = set(os.listdir(tmp_path))
    torch_half(write_weights)
    assert main(["checkpoint", "export", str(trial.dir), "--to", str(tmp_path / "model")]) == 0
    assert set(os.listdir(tmp_path)) == before | {"model"} and os.listdir(tmp_path / "model") == ["model.safetensors"]
    assert (tmp_path / ".model.tmp" / "thesis.txt").read_text() == "mine"


def test_an_export_that_fails_leaves_nothing(trial, tmp_path, torch_half):
    before = set(os.listdir(tmp_path))
    torch_half(lambda given: write_weights(given) or ExitCode.FAILED)
    assert main(["checkpoint", "export", str(trial.dir), "--to", str(tmp_path / "model")]) == ExitCode.FAILED
    assert set(os.listdir(tmp_path)) == before


def test_of_two_exports_to_one_place_the_first_to_end_stays(trial, tmp_path, torch_half, capsys):
    there = tmp_path / "model"

    def meanwhile(given):
        write_weights(given)
        torch_half(write_weights)
        assert main(["checkpoint", "export", str(trial.dir), "--step", "3", "--to", str(there)]) == 0
        (there / "whose").write_text("the first")

    before = set(os.listdir(tmp_path))
    torch_half(meanwhile)
    assert main(["checkpoint", "export", str(trial.dir), "--to", str(there)]) == ExitCode.CANNOT_WRITE
    assert f"{there} exists and is not overwritten" in capsys.readouterr().err
    assert (there / "whose").read_text() == "the first" and set(os.listdir(tmp_path)) == before | {"model"}
