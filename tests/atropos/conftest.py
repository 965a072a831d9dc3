"""A real atroposlib, and a real SGLang, each in an environment of its own."""

import pytest
from other_pythons import python_of


@pytest.fixture(scope="session")
def atropos_python() -> str:
    return python_of("atropos")


@pytest.fixture(scope="session")
def sglang_python() -> str:
    return python_of("sglang")
