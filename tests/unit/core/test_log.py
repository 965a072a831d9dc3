"""The prefix of log lines, and the secrets that they hide."""

import logging
from urllib.parse import quote

import pytest

from hpc_rl.core import log


@pytest.fixture(autouse=True)
def root_as_it_was():
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    log.configure("none")  # which has no secrets
    root.handlers[:], root.level = before[0], before[1]


def test_tokens_are_in_no_message_argument_or_traceback(capsys):
    log.configure("server", "0/1", ["s3cret", ""])
    try:
        raise ValueError("GET /t/s3cret/generate")
    except ValueError:
        headers = {"Authorization": "Bearer s3cret"}
        logging.getLogger("x").exception("no answer from %s: %s", "/t/s3cret", headers)
    said = capsys.readouterr().err
    assert "s3cret" not in said
    assert said.count("***") == 4  # message, argument, the line of code, the exception
    assert " server 0/1 " in said.splitlines()[0] and "Traceback" in said


@pytest.mark.parametrize("shown", ["it is {}", "it is {!r}", "https://host/?key={:quoted}"])
def test_a_secret_is_hidden_in_each_form_that_messages_have_it_in(shown):
    class Value(str):
        def __format__(self, form: str) -> str:
            return quote(self, safe="") if form else str(self)

    value = Value('it\'s\na "key" = 100%')
    log.configure("server", secrets=[value, "short"])
    said = log.redact(shown.format(value))
    assert "***" in said and not any(part in said for part in ('key"', "%22", "100%"))
    assert log.redact("a short one") == "a short one"


def test_a_message_can_neither_forge_a_record_nor_drive_a_terminal(capsys):
    log.configure("rollout", 0, ["one-secret"])
    forged = "2026-01-01 00:00:00,000 trainer 0 host ERROR all is lost"
    logging.getLogger("x").warning("reward: %s", f"\x1b[31mred\x07\r\n{forged}\n\x9b2J one-secret\u202e")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("    ")] == lines[:1]
    assert forged in lines[1] and "***" in lines[2]
    assert not [char for line in lines for char in line if not char.isprintable()]
    logging.getLogger("x").warning("half a pair: %s", "\ud800")
    assert capsys.readouterr().err.endswith("\\ud800\n")
