"""What a log line says of its origin, and what it never says."""

import logging

import pytest

from hpc_rl import log


@pytest.fixture(autouse=True)
def root_as_it_was():
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], root.level = before[0], before[1]


def test_tokens_are_in_no_message_argument_or_traceback(capsys):
    log.setup("server", "0/1", ["s3cret", ""])
    try:
        raise ValueError("GET /t/s3cret/generate")
    except ValueError:
        logging.getLogger("x").exception(
            "no answer from %s: %s", "/t/s3cret", {"Authorization": "Bearer s3cret"}
        )
    said = capsys.readouterr().err
    assert "s3cret" not in said
    assert said.count("***") == 4  # message, argument, the line of code, the exception
    assert " server 0/1 " in said.splitlines()[0] and "Traceback" in said


def test_a_message_can_neither_forge_a_record_nor_drive_a_terminal(capsys):
    log.setup("rollout", 0, ["one-secret"])
    forged = "2026-01-01 00:00:00,000 trainer 0 host ERROR all is lost"
    logging.getLogger("x").warning("reward: %s", f"\x1b[31mred\x07\r\n{forged}\n\x9b2J one-secret\u202e")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("    ")] == lines[:1]
    assert forged in lines[1] and "***" in lines[2]
    assert not [char for line in lines for char in line if not char.isprintable()]
    logging.getLogger("x").warning("half a pair: %s", "\ud800")
    assert capsys.readouterr().err.endswith("\\ud800\n")
