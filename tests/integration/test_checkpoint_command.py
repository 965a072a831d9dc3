"""`hpc-rl checkpoint` on a trial that was trained: list, verify, export to and import from Hugging Face
format.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_trials import make_toy
from trainer_processes import Roles, make_trial, write_plan

from hpc_rl.checkpoint.generation import scan
from hpc_rl.cli.__main__ import main
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial

pytestmark = pytest.mark.timeout(600)
OPTIONS = [
    "total_train_steps=4",
    "train_dataset.batch_size=8",
    "recover.mode=auto",
    "recover.freq_steps=1",
    "saver.freq_steps=3",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trial:
    """An SFT trial of two ranks, of whose four steps the last three left generations; step 3 was exported by
    the trainer.
    """
    folder = make_toy(tmp_path_factory.mktemp("toy"), "base")
    held_out = f"valid_dataset.path={folder / 'task' / 'sft.jsonl'}"
    trial = make_trial(
        folder, "trained", "sft", [*OPTIONS, "recover.keep=3", held_out, "evaluator.freq_steps=1"]
    )
    write_plan(trial, "sft", 2)
    with Roles(trial, "1.0") as roles:
        assert roles.ended(roles.trainer(2), timeout_s=400) == [0, 0]
    return trial


@pytest.fixture
def trial(trained, tmp_path) -> Trial:
    """A copy that a test may spoil."""
    return Trial(Path(shutil.copytree(trained.dir, tmp_path / "trial")))


def test_list_and_verify(trial, capsys):
    assert main(["checkpoint", "list", str(trial.dir)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "lineage", "ranks", "size", "saved", "eval_loss", "state"]
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [
        ("4", "sound"),
        ("3", "sound"),
        ("2", "sound"),
    ]
    assert main(["checkpoint", "verify", str(trial.dir)]) == 0
    assert "checkpoint 2: every file" in capsys.readouterr().out


def test_every_file_that_is_damaged_is_named(trial, capsys):
    files = sorted(path for path in trial.generation(4).iterdir())
    assert [path.name for path in files] == [
        "actor-rank-00000.safetensors", "actor-rank-00001.safetensors", "config.json", "manifest.json", "rank_0.ok", "rank_1.ok",
    ]  # fmt: skip
    for path in files:
        good = path.read_bytes()
        for at in (0, len(good) // 2, len(good) - 2):
            path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            assert main(["checkpoint", "verify", str(trial.dir), "--step", "4", "--json"]) == 1
            (result,) = json.loads(capsys.readouterr().out)
            assert len(result["problems"]) == 1 and result["problems"][0].startswith(path.name), result
        os.truncate(path, len(good) // 2)
        assert main(["checkpoint", "verify", str(trial.dir)]) == 1
        out = capsys.readouterr().out
        assert f"checkpoint 4: {path.name}" in out and "checkpoint 3: every file" in out
        path.unlink()
        assert main(["checkpoint", "list", str(trial.dir), "--json"]) == 0
        newest = json.loads(capsys.readouterr().out)["checkpoints"][0]
        assert not newest["sound"] and (
            path.name in newest["problem"] or newest["problem"] == "has no manifest"
        )
        path.write_bytes(good)
    assert main(["checkpoint", "verify", str(trial.dir)]) == 0


def test_an_export_of_a_generation_is_the_trainers_own_export_of_that_step(trial, tmp_path, capfd):
    there = tmp_path / "out" / "model"
    assert main(["checkpoint", "export", str(trial.dir), "--step", "3", "--to", str(there)]) == 0
    assert "checkpoint 3" in capfd.readouterr().out
    own = trial.exports / "step-00000003"
    for path in own.iterdir():
        if path.name != "hpc_rl.json":
            assert (there / path.name).read_bytes() == path.read_bytes(), path.name
    assert main(["checkpoint", "export", str(trial.dir), "--to", str(there)]) == ExitCode.CANNOT_WRITE
    assert not [name for name in os.listdir(trial.recover) if name.startswith(".")]


def test_an_export_of_damage_fails_and_names_the_file(trial, tmp_path, capfd):
    path = trial.generation(4) / "actor-rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    assert main(["checkpoint", "export", str(trial.dir), "--to", str(tmp_path / "model")]) != 0
    assert "actor-rank-00001.safetensors" in capfd.readouterr().err
    assert not (tmp_path / "model").exists()


def test_an_imported_checkpoint_is_what_a_trial_goes_on_from(trial, tmp_path, capfd):
    source = trial.exports / "final"
    assert main(["checkpoint", "import", str(trial.dir), str(source)]) == ExitCode.FAILED
    assert "checkpoint 4, from which `hpc-rl recover` would resume instead" in capfd.readouterr().err
    fresh = Trial(tmp_path / "fresh")
    fresh.make_dirs()
    fresh.make_secret()
    for name in ("config.json", "plan.json"):
        shutil.copyfile(trial.dir / name, fresh.dir / name)
    assert main(["checkpoint", "import", str(fresh.dir), str(source)]) == 0
    (found,) = scan(fresh)
    assert (found.step, found.problem) == (0, "")
    assert main(["checkpoint", "export", str(fresh.dir), "--to", str(tmp_path / "back")]) == 0
    one, other = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    with Roles(fresh, "2.0") as roles:
        first = roles.trainer(1, stays_at=3)
        roles.wait_for_step(1, timeout_s=240)
        Roles.kill(first)
        assert roles.ended(first) == [-signal.SIGKILL]
        assert "loading checkpoint 0" in roles.trial.attempt("2.0").log("trainer", 0, 0, 0).read_text()


def test_the_half_with_torch_ends_with_the_command(trial, tmp_path):
    """Killed, the command holds nothing any more: neither the generation nor the trial."""
    command = [
        sys.executable,
        "-m",
        "hpc_rl.tools.convert",
        "export",
        "--trial_dir",
        str(trial.dir),
        "--step",
        "3",
    ]
    (tmp_path / "model").mkdir()
    done = subprocess.run([*command, "--to", str(tmp_path / "model")], stdin=subprocess.DEVNULL)
    assert done.returncode == ExitCode.KILLED_BY_SYSTEM and not os.listdir(tmp_path / "model")


def test_the_help_teaches():
    done = subprocess.run(
        [sys.executable, "-m", "hpc_rl.cli", "checkpoint", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    for words in ("list", "verify", "export", "import", "hpc-rl checkpoint export my-trial --to"):
        assert words in done.stdout
