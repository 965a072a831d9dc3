from dataclasses import replace

import pytest

from hpc_rl.allocation import TRAIN_BACKENDS


@pytest.fixture
def engines_that_can_do_all(monkeypatch):
    """Every size of the grammar is supported by the engines that have it, whatever they can do today."""
    for name, sizes in {"fsdp": "dtc", "megatron": "dptce"}.items():
        backend = replace(TRAIN_BACKENDS[name], implementation="a:b", supported=sizes)
        monkeypatch.setitem(TRAIN_BACKENDS, name, backend)
