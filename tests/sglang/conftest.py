"""Finds a real SGLang: the interpreter in HPC_RL_SGLANG_PYTHON, else .venv-sglang, which install.sh makes on
first use.

On a person's machine the tests skip where it can't be installed; under CI=true, and in `make test`, that is a
failure.
"""

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def sglang_python() -> str:
    given = os.environ.get("HPC_RL_SGLANG_PYTHON")
    if given:
        assert Path(given).exists(), f"HPC_RL_SGLANG_PYTHON is {given!r}, which does not exist"
        return given
    python = ROOT / ".venv-sglang" / "bin" / "python"
    install = subprocess.run([str(HERE / "install.sh")], capture_output=True, text=True)
    if install.returncode != 0:
        message = f"tests/sglang/install.sh failed: {install.stderr[-2000:]}"
        if os.environ.get("CI") == "true" or "sglang" in os.environ.get("HPC_RL_TEST_REQUIRE", ""):
            pytest.fail(message)
        pytest.skip(message)
    return str(python)
