"""samples: completions of a trial, from files that a trainer wrote, those of a given-up lineage excluded."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.cli.__main__ import main
from hpc_rl.core.types import Trajectory, TrajectoryGroup
from hpc_rl.stats.kept_samples import MAX_COLUMN_CHARS, MAX_ROW_CHARS, NOT_KEPT, SampleWriter, shorten_columns
from hpc_rl.stats.metrics_writers import JsonlWriter
from hpc_rl.trials import trial_index

pytestmark = pytest.mark.usefixtures("state_home")


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("a") + one - 1) for one in ids)


def trajectory(ids: list[int], prompt: int, reward: float, steps: list[int]) -> Trajectory:
    mask = np.arange(len(ids)) >= prompt
    return Trajectory(
        ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(ids), np.float32),
        lineages=np.where(mask, 0, -1).astype(np.int32),
        steps=np.array([-1] * prompt + steps, np.int32),
        reward=reward,
        finish_reason="stop",
        stats={"format": 1.0, "odd": float("nan")},
    )


def two_turns() -> Trajectory:
    one = trajectory([1, 2, 3, 4, 5, 6, 7], 2, 0.1, [5] * 5)
    one.loss_mask[4:6] = False  # e and f came between them
    return one


def group(index: int, *rewards: float) -> TrajectoryGroup:
    return TrajectoryGroup(index, [trajectory([1, 2, 3, 4], 2, reward, [5, 6]) for reward in rewards])


@pytest.fixture
def trial(fake_trial):
    """Lineage 0 made steps 1 to 3; lineage 1 continued from 2."""
    fake_trial.run_to(3)
    trial = fake_trial.trial
    for number, (from_step, steps) in enumerate([(0, (1, 2, 3)), (2, (3,))]):
        attempt = trial.attempt(f"{7 + number}.0")
        attempt.make_dirs()
        lines = JsonlWriter(attempt.samples(0))
        writer = SampleWriter(lines, letters, num_groups=1)
        for step in steps:
            first = group(10 * number + step, step / 10, 0.9)
            advantages = [np.array([9.0, 9.0, 0.5, 0.5], np.float32)]
            writer.write_step(step, [first, group(99, 0.0)], first.trajectories[:1], advantages)
        writer.write_evaluation(steps[-1], 0.25, [TrajectoryGroup(0, [two_turns()])])
        lines.close()
        fake_trial.lineage(number, from_step, attempt.id)
    trial_index.record_trial(trial)
    return trial


def ask(capsys, *argv: str) -> list[dict]:
    assert main(["samples", "t1", *argv, "--jsonl"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_newest_step_of_the_lineage_that_counts(trial, capsys):
    first, second = ask(capsys)
    assert (first["step"], first["prompt_index"], first["sample"], second["sample"]) == (3, 13, 0, 1)
    assert (first["prompt"], first["completion"], first["num_tokens"]) == ("ab", "cd", 2)
    assert (first["reward"], first["stats"], first["advantage"]) == (0.3, {"format": 1.0}, 0.5)
    assert (second["advantage"], first["finish_reason"], first["versions"]) == (None, "stop", ["0.5", "0.6"])


def test_which_ones_are_shown(trial, capsys):
    assert [row["reward"] for row in ask(capsys, "--step", "2")] == [0.2, 0.9]
    assert [row["reward"] for row in ask(capsys, "--worst", "-n", "2")] == [0.1, 0.2]
    assert [row["step"] for row in ask(capsys, "--best")] == [1, 2, 3, 3, 2, 1]
    assert [row["reward"] for row in ask(capsys, "--all", "--reward", "0.15..0.5")] == [0.2, 0.3]
    assert [row["step"] for row in ask(capsys, "--search", "D")] == [1, 1, 2, 2, 3, 3]
    assert ask(capsys, "--search", "dc") == []
    (row,) = ask(capsys, "--eval")
    assert (row["evaluation"], row["step"], row["completion"], row["given"]) == (True, 3, "cdefg", [[2, 4]])


def test_text_for_people_and_what_to_do_where_nothing_matches(trial, capsys):
    assert main(["samples", "t1", "-n", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "step 3, prompt 13, sample 0: reward 0.3 (format 1); advantage +0.5; 2 tokens; stop; weights 0.5, 0.6",
        "  prompt      | ab",
        "  completion  | cd",
    ]
    assert "1 of 2 completions" in err
    assert main(["samples", "t1", "--eval"]) == 0
    shown = capsys.readouterr().out.splitlines()[2:]
    assert shown == ["  completion  | cd", "  given       | ef", "  completion  | g"]
    assert main(["samples", "t1", "--step", "9"]) == 0
    assert "steps with completions: 1 to 3" in capsys.readouterr().out
    assert main(["samples", "t1", "--reward", "3"]) == 64
    assert "'3'; it must be A..B" in capsys.readouterr().err


def test_the_columns_of_the_row_stand_with_each_completion(fake_trial, capsys):
    fake_trial.run_to(1)
    writer = JsonlWriter(fake_trial.trial.attempt("7.0").samples(0))
    row = {"prompt": "p", "answer": "42", "tests": ["a", "b"], "story": "s" * 5000, "input_ids": [1]}
    columns, shortened = shorten_columns(row)
    one = TrajectoryGroup(3, [trajectory([1, 2, 3], 2, 0.5, [5])], columns, shortened)
    SampleWriter(writer, letters, num_groups=1).write_step(1, [one], [], [])
    writer.close()
    trial_index.record_trial(fake_trial.trial)
    (kept,) = ask(capsys)
    assert kept["columns"] == {"answer": "42", "tests": ["a", "b"], "story": "s" * MAX_COLUMN_CHARS}
    assert kept["shortened"] == ["story"]
    assert main(["samples", "t1"]) == 0
    shown = capsys.readouterr().out
    assert "row         | answer: 42\n" in shown and "(shortened)" in shown


@given(
    st.dictionaries(
        st.text(max_size=5), st.one_of(st.text(max_size=3000), st.lists(st.integers())), max_size=9
    )
)
def test_a_row_takes_a_bounded_place(row):
    columns, shortened = shorten_columns(row)
    assert columns.keys() == row.keys() - set(NOT_KEPT)
    assert sum(len(value) for value in columns.values() if isinstance(value, str)) <= MAX_ROW_CHARS
    assert all(columns[name] == row[name] for name in columns.keys() - set(shortened))
