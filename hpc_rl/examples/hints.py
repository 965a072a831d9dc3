"""The toy of teacher training: a student that can use a hint, and questions that it can't answer without one.

A question `c5` is a cue letter and a digit; the answer is the digit plus the secret of the cue, modulo 10.
The student reads `k|c5=` and answers (5 + k) mod 10: it was trained on random hints, so it knows no secret,
and without a hint (`|c5=`) it guesses. The teacher reads `c5?p;`, where p is the student's answer to the bare
question, and writes a hint. At first it writes each digit equally often; it has to find the secrets. The hint
differs from the answer, because the digit of a question is at least 1.
"""

import random
from itertools import product
from pathlib import Path

from hpc_rl.examples.toy import make_model, write_rows

ALPHABET = "0123456789abcdefgh|=;?"
CUES = "abcdefgh"
DIGITS = "0123456789"
NUMBERS = DIGITS[1:]  # of a question
QUESTIONS = [cue + number for cue, number in product(CUES, NUMBERS)]
HINTED_SHARE = 4  # hinted rows of the student for each row without a hint


def make(folder: Path, seed: int) -> None:
    """Make task/ and base/, the random model of both, student and teacher."""
    make_task(folder / "task", seed)
    make_model(folder / "base", seed, ALPHABET)


def make_task(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl (54 questions) and heldout.jsonl (18, two or three of each cue): prompt, answer.

    Also writes student-sft.jsonl and teacher-sft.jsonl (prompt, completion), which know no secret: with every
    question, all hints, guesses and digits of the teacher are equally frequent.
    """
    draw = random.Random(seed)
    secrets = dict(zip(CUES, draw.sample(range(10), len(CUES)), strict=True))
    shuffled = [cue + number for cue in CUES for number in draw.sample(NUMBERS, len(NUMBERS))]
    heldout = shuffled[::4]
    train = [question for question in shuffled if question not in heldout]
    hinted = [
        _make_row(f"{hint}|{question}=", _shift(question, int(hint))) for hint, question in _list_questions()
    ]
    guessed = [_make_row(f"|{question}=", guess) for guess, question in _list_questions()]
    taught = [_make_row(f"{question}?{draw.choice(DIGITS)};", hint) for hint, question in _list_questions()]
    files = {
        name: [{"prompt": one, "answer": _shift(one, secrets[one[0]])} for one in questions]
        for name, questions in (("train", train), ("heldout", heldout))
    }
    files |= {"student-sft": HINTED_SHARE * hinted + guessed, "teacher-sft": taught}
    write_rows(folder, files)


def _list_questions() -> list[tuple[str, str]]:
    """Return each digit with each question, 720 pairs."""
    return list(product(DIGITS, QUESTIONS))


def _make_row(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def _shift(question: str, by: int) -> str:
    """Return the answer to a question whose cue has the secret `by`."""
    return str((int(question[1]) + by) % 10)
