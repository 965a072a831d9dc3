"""Interpreters with packages that this project's own environment does not have: those of SGLang, vLLM, atroposlib."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_of(package: str) -> str:
    """Return the interpreter in HPC_RL_<PACKAGE>_PYTHON, else of .venv-<package>, made on first use.

    On a person's machine the tests skip where it can't be installed; under CI=true, and in `make test`, that
    is a failure.
    """
    name = f"HPC_RL_{package.upper()}_PYTHON"
    given = os.environ.get(name)
    if given:
        assert Path(given).exists(), f"{name} is {given!r}, which does not exist"
        return given
    install(package)
    return str(ROOT / f".venv-{package}" / "bin" / "python")


def install(package: str, *arguments: str) -> None:
    """Run tests/<package>/install.sh; skip or fail, as python_of does, where that fails."""
    script = ROOT / "tests" / package / "install.sh"
    done = subprocess.run([script, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        message = f"tests/{package}/install.sh failed: {done.stderr[-2000:]}"
        if os.environ.get("CI") == "true" or package in os.environ.get("HPC_RL_TEST_REQUIRE", ""):
            pytest.fail(message)
        pytest.skip(message)


def flags_of_help(argv: list[str], env: dict[str, str]) -> set[str]:
    """Return the flags that the help of a command lists."""
    text = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--[a-z0-9][\w-]*", text))


def words_of(flags: dict[str, str | tuple[str, ...]]) -> set[str]:
    """Return the flags of a table, without their values."""
    words = {word for flag in flags.values() for word in ([flag] if isinstance(flag, str) else flag)}
    return {word for word in words if word.startswith("--")}


def version_in(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version('{package}'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().partition("+")[0]
