"""Submission imports the user's rewards and workflow and calls each reward once, before anything is queued."""

import pytest

from hpc_rl.cli.__main__ import main

pytestmark = pytest.mark.usefixtures("state_home", "scheduler")

CODE = """
import os, sys
def good(prompt, completion, answer, **columns):
    print("noise")
    return {"reward": 1.0, "right": completion == answer}
def of_trl(completions, answer, **kwargs):
    return [1.0]
def misspelt(prompt, completion, **columns):
    return columns["anwser"]
def picky(prompt, completion, **columns):
    return float(completion)
def text(prompt, completion, **columns):
    return "yes"
def ends(prompt, completion, **columns):
    os._exit(3)
async def later(prompt, completion, **columns):
    return 0.5
def ranks(prompt, completions, **columns):
    return [1.0] * len(completions)
ranks.batched = True
async def run(prompt, generate):
    return None
def sync(prompt):
    return None
"""


def submit(config, capsys, **options: str) -> tuple[int, str]:
    given = [f"rollout.{name}={value}" for name, value in options.items()]
    code = main(["submit", "--config", str(config), "--dry_run", *given])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.fixture(autouse=True)
def own_code(config, monkeypatch):
    monkeypatch.chdir(config.parent)
    (config.parent / "mine.py").write_text(CODE)
    (config.parent / "broken.py").write_text("def reward(:\n")


def test_sound_code_of_every_kind_is_taken(config, capsys):
    code, said = submit(config, capsys, reward_fn="mine:good,mine:later,mine:ranks", workflow="mine:run")
    assert code == 0 and "mine" not in said.partition("plan ")[0]


def test_all_mistakes_are_refused_at_once_with_their_places(config, capsys):
    names = "mine:nope, absent:reward, broken:reward, mine:of_trl, mine:misspelt, mine:text"
    code, said = submit(config, capsys, reward_fn=names, workflow="mine:sync")
    assert code == 64
    for words in (
        "'mine:nope' can't be imported: module 'mine' has no attribute 'nope'",
        "'absent:reward' can't be imported: No module named 'absent'",
        "'broken:reward' can't be imported: SyntaxError",
        "mine:of_trl is called with prompt, completion, answer, and can't be",
        "raises KeyError: 'anwser' (mine.py:9, in misspelt)",
        "does not return a reward: the reward is 'yes' (str); allowed: a finite number",
        "rollout.workflow mine:sync must be run(prompt, generate)",
    ):
        assert words in said


def test_code_that_ends_its_process_is_refused(config, capsys):
    code, said = submit(config, capsys, reward_fn="mine:ends")
    assert code == 64 and "end the process that imports them, with code 3" in said


def test_what_only_this_completion_raises_is_a_note(config, capsys):
    code, said = submit(config, capsys, reward_fn="mine:picky")
    assert code == 0
    assert "note: rollout.reward_fn mine:picky" in said and "ValueError" in said and "mine.py:11" in said


def test_another_environment_is_not_tried(config, capsys):
    code = main(["submit", "--config", str(config), "--dry_run", "rollout.reward_fn=mine:nope",
                 "launcher.setup=module load cuda"])  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "not tried here: the job has an environment of its own" in out
