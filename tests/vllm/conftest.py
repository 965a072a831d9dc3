"""A real vLLM, in an environment of its own."""

import pytest
from other_pythons import python_of


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return python_of("vllm")
