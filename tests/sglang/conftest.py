"""A real SGLang, in an environment of its own."""

import pytest
from other_pythons import python_of


@pytest.fixture(scope="session")
def sglang_python() -> str:
    return python_of("sglang")
