"""Code of a user, as reward processes import it."""

import sys

import pytest
from chat_tokenizers import chat_tokenizer

__all__ = ["chat_tokenizer", "user_code"]


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    """`user_code("own", source)` writes a module that processes which are started later can import."""

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
        monkeypatch.syspath_prepend(tmp_path)

    return write
