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
