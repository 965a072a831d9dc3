"""The light half of `hpc-rl checkpoint`: what it refuses, what it leaves, and what the half with torch may
rely on.
"""

import getpass
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.checkpoint.decide import Situation
from hpc_rl.checkpoint.generation import Commit, Manifest
from hpc_rl.checkpoint.retention import Holds
from hpc_rl.checkpoint.start_facts import decide_start
from hpc_rl.cli.__main__ import main
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.trials import conversion
from hpc_rl.trials.lock import TrialLock

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
    making.record_rank(0, [])
    who = {"attempt": "7.0", "incarnation": 0, "submission": "7", "version": f"0.{step}", "metrics": numbers}
    making.commit(Manifest(step=step, lineage=0, num_ranks=1, config_hash="c", **who))


@pytest.fixture
def torch_half(monkeypatch):
    """`torch_half(does)` takes the place of the process with torch; `does` gets its arguments by name."""

    def put(does) -> None:
        def hand_over(action, trial, step, *rest, **_more):
            return does(dict(zip(rest[::2], rest[1::2], strict=True))) or 0

        monkeypatch.setattr(conversion, "convert", hand_over)

    return put


def write_weights(given: dict[str, str]) -> None:
    (Path(given["--to"]) / "model.safetensors").write_text("weights")


def test_the_list_shows_what_is_evaluated_not_the_first_by_name(trial, capsys):
    commit(trial, 9, eval_asked_again=3.0, eval_num_prompts=200.0, eval_reward=0.75)
    assert main(["checkpoint", "list", str(trial.dir)]) == 0
    head, newest, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[5] == "eval_reward" and "0.75" in newest.split()
    assert main(["checkpoint", "list", str(trial.dir), "--metric", "eval_asked_again"]) == 0
    assert capsys.readouterr().out.split()[5] == "eval_asked_again"


def test_an_export_touches_nothing_beside_it(trial, tmp_path, torch_half):
    (tmp_path / ".model.tmp").mkdir()
    (tmp_path / ".model.tmp" / "thesis.txt").write_text("mine")
    before = set(os.listdir(tmp_path))
    torch_half(write_weights)
    assert main(["checkpoint", "export", str(trial.dir), "--to", str(tmp_path / "model")]) == 0
    assert set(os.listdir(tmp_path)) == before | {"model"}
    assert sorted(os.listdir(tmp_path / "model")) == ["README.md", "model.safetensors"]
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


def test_what_is_exported_is_held_before_torch_is_there(trial, tmp_path, torch_half):
    held: set[int] = set()
    torch_half(lambda given: held.update(Holds(trial).steps()) or write_weights(given))
    assert main(["checkpoint", "export", str(trial.dir), "--to", str(tmp_path / "model")]) == 0
    assert held == {6} and not Holds(trial).steps()


def test_the_root_is_no_place_for_an_export(trial, torch_half, capsys):
    torch_half(write_weights)
    assert main(["checkpoint", "export", str(trial.dir), "--to", "/"]) == ExitCode.CANNOT_WRITE
    assert "hpc-rl: / " in capsys.readouterr().err


def test_an_export_that_is_terminated_leaves_nothing(trial, tmp_path):
    there = tmp_path / "model"
    command = f"""
import os, signal, sys
from hpc_rl.trials import conversion
from hpc_rl.cli.__main__ import main
def torch_half(*_given, **_more):
    print(*os.listdir({str(tmp_path)!r}))
    os.kill(os.getpid(), signal.SIGTERM)
conversion.convert = torch_half
sys.exit(main(["checkpoint", "export", {str(trial.dir)!r}, "--to", {str(there)!r}]))
"""
    before, generations = set(os.listdir(tmp_path)), set(os.listdir(trial.recover))
    ended = subprocess.run([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == ExitCode.KILLED_BY_SYSTEM and ".model." in ended.stdout
    assert set(os.listdir(tmp_path)) == before and set(os.listdir(trial.recover)) == generations


@pytest.mark.parametrize("place", ["{tmp}/file/model", "/proc/model", "/proc/1/model/deeper"])
def test_an_export_that_can_not_be_written_says_where(trial, tmp_path, torch_half, capsys, place):
    (tmp_path / "file").write_text("not a folder")
    there = place.format(tmp=tmp_path)
    assert main(["checkpoint", "export", str(trial.dir), "--to", there]) == ExitCode.CANNOT_WRITE
    assert f"hpc-rl: {there} can't be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["verify", "--step", "4"], ["export", "--step", "4"], ["export", "--best", "fun"]]
)
def test_a_generation_that_is_not_there(trial, capsys, command):
    assert main(["checkpoint", command[0], str(trial.dir), *command[1:]]) == ExitCode.NOTHING_TO_RESUME
    assert "Sound ones: 6, 3." in capsys.readouterr().err


@pytest.fixture
def rendered(config, tmp_path) -> Trial:
    """sums/small, rendered and never submitted."""
    assert main(["render", "--config", str(config)]) == 0
    return Trial.of(tmp_path / "runs", getpass.getuser(), "sums", "small")


def test_the_help_says_how_a_trial_that_was_only_rendered_is_named(rendered, capsys):
    assert main(["checkpoint", "list", "small"]) == ExitCode.REFUSED
    assert main(["checkpoint", "list", str(rendered.dir)]) == 0
    assert main(["checkpoint", "import", "--help"]) == 0
    assert "is named by its path" in capsys.readouterr().out


def test_an_import_keeps_the_trial_from_starts_and_other_imports(
    rendered, config, scheduler, torch_half, capsys
):
    importing = ["checkpoint", "import", str(rendered.dir), str(config.parent / "model")]

    def meanwhile(given):
        for command in (importing, ["submit", "--config", str(config)]):
            assert main(command) == ExitCode.STOPPED
            assert (
                f"is being given an imported checkpoint by process {os.getpid()}" in capsys.readouterr().err
            )
        commit(rendered, 0)

    torch_half(meanwhile)
    assert main(importing) == 0
    assert main(importing) == ExitCode.FAILED  # it lies there now
    assert main(["submit", "--config", str(config)]) == 0
    assert main(importing) == ExitCode.STOPPED  # it runs now


def test_a_step_past_the_end_of_the_trial_is_not_imported(rendered, config, torch_half, capsys):
    torch_half(lambda given: pytest.fail("nothing is imported"))
    importing = ["checkpoint", "import", str(rendered.dir), str(config.parent / "model"), "--step", "11"]
    assert main(importing) == ExitCode.REFUSED
    said = capsys.readouterr().err
    assert "ends at step 10, before checkpoint 11; allowed: an end at" in said
    assert main(["render", "--config", str(config), "total_train_steps=null", "total_train_epochs=4"]) == 0
    assert main(importing) == ExitCode.REFUSED
    assert "trial sums/small ends at step 4, before checkpoint 11" in capsys.readouterr().err
    rendered.config_json.write_text("[]")
    assert main(importing) == ExitCode.REFUSED
    assert "config.json is missing or damaged" in capsys.readouterr().err
    assert main(["render", "--config", str(config), "total_train_steps=12"]) == 0
    torch_half(lambda given: commit(rendered, 11))
    assert main(importing) == 0


def test_an_import_rescues_a_trial_whose_generations_are_all_damaged(rendered, config, torch_half, capsys):
    """At a step before, at and after that of a damaged one; a sound one would be taken instead."""
    model = str(config.parent / "model")
    commit(rendered, 8)
    assert main(["checkpoint", "import", str(rendered.dir), model, "--step", "7"]) == ExitCode.FAILED
    assert "has checkpoint 8, from which `hpc-rl recover` would resume instead" in capsys.readouterr().err
    (rendered.generation(8) / "manifest.json").unlink()
    commit(rendered, 6)
    (rendered.generation(6) / "rank_0.ok").write_bytes(
        bytes((rendered.generation(6) / "rank_0.ok").stat().st_size)
    )
    rendered.batches.mkdir(exist_ok=True)
    for number in (6, 7, 8, 9):
        (rendered.batches / f"{number:08d}.seal").write_text("{}")
    for step in (5, 6, 7, 8, 9):
        torch_half(lambda given, step=step: commit(rendered, step))
        assert main(["checkpoint", "import", str(rendered.dir), model, "--step", str(step)]) == 0
        decision, passed_over = decide_start(
            rendered, rendered.attempt("1.0"), 0, Situation("resume", "resume")
        )
        assert (decision.action, decision.step) == ("load", step)
        assert {one.step for one in passed_over} == {6, 8} - set(range(step + 1))
        shutil.rmtree(rendered.generation(step))


def test_a_batch_log_that_was_trimmed_further_than_it_goes_is_told_as_that(rendered, config, capsys):
    rendered.batches.mkdir(exist_ok=True)
    for number in (49, 50):
        (rendered.batches / f"{number:08d}.seal").write_text("{}")
    write_json(rendered.trimmed, {"step": 100000})
    assert (
        main(["checkpoint", "import", str(rendered.dir), str(config.parent / "model"), "--step", "7"])
        == ExitCode.FAILED
    )
    assert "because those up to 100000 were deleted. Import into another trial" in capsys.readouterr().err


def test_a_claim_that_takes_long_is_renewed(rendered, monkeypatch, capfd):
    """By a half with torch that only waits: for other hosts the claim would be stale after some minutes."""
    renewed: list[float] = []
    renew = TrialLock.renew

    def renew_old(claim):
        os.utime(rendered.submitting, (0, 0))
        renew(claim)
        renewed.append(rendered.submitting.stat().st_mtime)

    monkeypatch.setattr(TrialLock, "renew", renew_old)
    monkeypatch.setattr(conversion, "RENEW_EVERY_S", 0.05)
    real = subprocess.Popen
    waits = [sys.executable, "-c", "import time; time.sleep(0.3)"]
    monkeypatch.setattr(subprocess, "Popen", lambda _command, **options: real(waits, **options))
    (rendered.dir / "hf").mkdir()
    (rendered.dir / "hf" / "config.json").write_text("{}")
    assert main(["checkpoint", "import", str(rendered.dir), str(rendered.dir / "hf"), "--step", "7"]) == 0
    assert len(renewed) > 1 and all(renewed)
