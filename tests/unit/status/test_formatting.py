"""What is printed for people to type can be typed."""

import sys
from pathlib import Path

import pytest

from hpc_rl.status.formatting import find_program_name, quote_path


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment `.venv` below the working directory, with the program, not on the PATH."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "hpc-rl").write_text("#!/bin/sh\n")
    (folder / "hpc-rl").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_program_off_the_path_is_typed_by_its_path(environment, monkeypatch, tmp_path):
    assert find_program_name() == ".venv/bin/hpc-rl"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_program_name() == str(environment / "hpc-rl")


def test_an_activated_one_by_its_name(environment, monkeypatch):
    monkeypatch.setenv("PATH", f"{environment}:/usr/bin")
    assert find_program_name() == "hpc-rl"


def test_another_of_that_name_on_the_path_is_not_it(environment, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "hpc-rl").write_text("#!/bin/sh\n")
    (other / "hpc-rl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:/usr/bin")
    assert find_program_name() == ".venv/bin/hpc-rl"


def test_an_environment_without_the_program(environment):
    assert find_program_name("tensorboard") == "tensorboard"


def test_paths_are_quoted_for_a_shell(environment, tmp_path):
    assert quote_path(tmp_path / "a b" / "c") == "'a b/c'"
    assert quote_path(Path("/x/$y")) == "'/x/$y'"
