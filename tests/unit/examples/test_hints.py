"""The toy of teacher training: its questions, and what the warm-ups may and may not know."""

import json
from collections import Counter
from pathlib import Path

import pytest

from hpc_rl.examples import hints, toy


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hints")
    hints.make_task(folder, seed=3)
    return folder


def rows(task: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (task / f"{name}.jsonl").read_text().splitlines()]


def secret(row: dict[str, str]) -> int:
    return (int(row["answer"]) - int(row["prompt"][1])) % 10


def test_a_quarter_of_the_questions_is_held_out_and_no_cue_is_missing(task):
    train, heldout = rows(task, "train"), rows(task, "heldout")
    assert (len(train), len(heldout)) == (54, 18)
    assert {row["prompt"] for row in train + heldout} == set(hints.QUESTIONS)
    assert set(Counter(row["prompt"][0] for row in heldout).values()) == {2, 3}


def test_each_cue_has_a_secret_of_its_own(task):
    of_cues = {(row["prompt"][0], secret(row)) for row in rows(task, "train") + rows(task, "heldout")}
    assert len(of_cues) == len({number for _, number in of_cues}) == len(hints.CUES)


def test_the_hint_is_not_the_answer(task):
    assert all(int(row["answer"]) != secret(row) for row in rows(task, "train") + rows(task, "heldout"))


def test_the_student_can_use_a_hint_and_knows_no_secret(task):
    made = rows(task, "student-sft")
    guessed = [row for row in made if row["prompt"].startswith("|")]
    assert len(guessed) * 5 == len(made)
    for row in made:
        hint, _, question = row["prompt"].rstrip("=").partition("|")
        assert not hint or int(row["completion"]) == (int(question[1]) + int(hint)) % 10
    assert set(Counter((row["prompt"], row["completion"]) for row in guessed).values()) == {1}
    assert len(Counter(row["completion"] for row in guessed)) == 10


def test_the_teacher_writes_each_digit_as_often(task):
    made = rows(task, "teacher-sft")
    pairs = Counter((row["prompt"][:2], row["completion"]) for row in made)
    assert set(pairs.values()) == {1}
    assert len(pairs) == 10 * len(hints.QUESTIONS)
    assert all(row["prompt"][2] + row["prompt"][4] == "?;" for row in made)


def test_the_task_follows_from_the_seed(task, tmp_path):
    for seed in (3, 4):
        hints.make_task(tmp_path / str(seed), seed)
    assert rows(task, "train") == rows(tmp_path / "3", "train") != rows(tmp_path / "4", "train")


def test_each_character_of_the_task_is_a_token(task):
    tokenizer = toy.make_tokenizer(hints.ALPHABET)
    assert len(hints.ALPHABET) == 22
    for name in ("train", "heldout", "student-sft", "teacher-sft"):
        for row in rows(task, name):
            text = "".join(row.values())
            assert len(tokenizer(text)["input_ids"]) == len(text)
            assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
