"""fork: a new trial begins with a checkpoint of another one, which stays as it is."""

import json
import os
import subprocess

import pytest

from hpc_rl.checkpoint import generation
from hpc_rl.cli.__main__ import main
from hpc_rl.config.options.experiment import Config
from hpc_rl.core.trial import Trial, load_json, load_object
from hpc_rl.datasets.rows import load_rows
from hpc_rl.schedulers.base import State
from hpc_rl.trials import trial_index
from hpc_rl.trials.first_start import FirstStart, Recovery

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.fixture
def trial(config, scheduler, capsys, make_generation) -> Trial:
    """sums/small with checkpoints 3 and 6; it still runs."""
    assert main(["submit", "--config", str(config)]) == 0
    scheduler.answers["job-1"] = State.RUNNING
    trial = trial_index.resolve("small")
    for step in (3, 6):
        make_generation(trial, step, data=load_rows(config.parent / "train.jsonl").fingerprint)
    capsys.readouterr()
    return trial


def files_of(trial: Trial) -> dict[str, bytes]:
    paths = [path for path in trial.dir.rglob("*") if path.is_file() and not path.name.startswith(".hold")]
    return {str(path): path.read_bytes() for path in paths}


def test_a_fork_starts_from_the_checkpoint_under_its_own_options(trial, scheduler, capsys):
    before = files_of(trial)
    command = ["fork", "small", "other", "--from", "3", "seed=7", "actor.optimizer.lr=5e-4"]
    assert main([*command, "--dry_run"]) == 0
    told = capsys.readouterr().out
    assert "at checkpoint 3\nchanged    seed: " in told and "trainer     1 process" in told
    assert len(scheduler.calls) == 1 and not (trial.dir.parent / "other").exists()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "fork       of sums/small at checkpoint 3" in said and "seed: " in said and "checkpoint 3" in said
    fork = trial_index.resolve("other")
    assert scheduler.calls[-1] == ("submit", "job-2") and files_of(trial) == before
    [found] = generation.scan(fork)
    assert not generation.verify(found).problem and found.step == 3
    config = load_json(fork.config_json)
    assert (config["seed"], config["trial_name"], config["actor"]["optimizer"]["lr"]) == (7, "other", 5e-4)
    source, copy = (os.stat(one.generation(3) / "state") for one in (trial, fork))
    assert source.st_ino == copy.st_ino  # nothing was copied
    assert main(["status", "other", "--offline"]) == 0
    assert "forked from sums/small, checkpoint 3" in capsys.readouterr().out


def test_the_start_of_a_fork_loads_that_checkpoint_and_trains_on_other_rows(trial, config, capsys):
    rows = config.parent / "other.jsonl"
    rows.write_text((config.parent / "train.jsonl").read_text() * 2)
    assert main(["fork", "small", "x/other", f"train_dataset.path={rows}"]) == 0
    fork = trial_index.resolve("x/other")
    start = FirstStart(fork, _config(fork), Recovery())
    assert (start.decision.action, start.decision.step) == ("load", 6)
    start.check()


def _config(trial: Trial) -> Config:
    from hpc_rl.config.load.stored import from_dict

    return from_dict(load_object(trial.config_json))


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--from", "4"], 3, "has no sound checkpoint 4. Allowed: 6, 3."),
        (["actor.dtype=float16"], 64, "actor.dtype can't change from "),
        (["actor.optimizer.lr=x"], 64, "actor.optimizer.lr"),
        (["total_train_steps=6"], 64, "the fork would end at step 6, which checkpoint 6 has reached already"),
    ],
)
def test_a_refused_fork_leaves_nothing(trial, scheduler, capsys, more, code, words):
    assert main(["fork", "small", "other", *more]) == code
    assert words in capsys.readouterr().err
    assert len(scheduler.calls) == 1 and not trial.dir.with_name("other").exists()


def test_a_damaged_checkpoint_is_not_forked_and_an_existing_trial_not_touched(trial, capsys):
    (trial.generation(6) / "state").write_text("STATE of 6")
    assert main(["fork", "small", "other", "--from", "6"]) == 3
    assert "Allowed: 3." in capsys.readouterr().err and not trial.dir.with_name("other").exists()
    before = files_of(trial)
    assert main(["fork", "small", "small"]) == 75
    assert "exists already" in capsys.readouterr().err and files_of(trial) == before


def test_config_diff_of_two_trials_tells_their_options_and_their_code(
    trial, config, scheduler, capsys, monkeypatch
):
    monkeypatch.chdir(config.parent)
    commit = "git -c user.name=n -c user.email=e commit -q --allow-empty -m first"
    subprocess.run(f"git init -q && {commit}", shell=True, check=True)
    reward = config.parent / "own_reward_of_fork.py"
    for name, body in (("a", "return 1.0"), ("b", "return 0.0")):
        reward.write_text(f"def reward(prompt, completion, **columns):\n    {body}\n")
        more = ["rollout.reward_fn=own_reward_of_fork:reward"] + (["seed=7"] if name == "b" else [])
        assert main(["fork", "small", name, *more]) == 0
    capsys.readouterr()
    assert main(["config", "diff", "a", "b"]) == 1
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert {"seed", "trial_name", "rollout.reward_fn code"} <= lines.keys()
    assert lines["rollout.reward_fn code"].count(f"{reward} (sha256 ") == 2
    about = json.loads(trial_index.resolve("a").provenance_json.read_text())
    assert about["workdir_git"] == about["code"]["rollout.reward_fn"]["git"] != about["git"]
    assert len(about["workdir_git"]["commit"]) == 40
    assert main(["config", "diff", "a", "a"]) == 0
    both = "rollout.reward_fn=contains,own_reward_of_fork:reward"
    assert main(["fork", "small", "c", both, "seed=7"]) == 0
    capsys.readouterr()
    assert main(["config", "diff", "b", "c"]) == 1
    assert "code" not in capsys.readouterr().out
