"""The garbage collector pauses while libraries are imported, and is spared the objects of a start."""

import gc
import subprocess
import sys

import pytest

from hpc_rl.core.collector import pause_collector


def test_it_pauses_and_leaves_what_was_made_alone():
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), pause_collector():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


SPARED = """
import gc
from hpc_rl.core.collector import spare_collector

old = [[] for _ in range(100_000)]
spare_collector()
print(len(gc.get_objects()) < 10_000, gc.get_freeze_count() > 100_000)
"""


def test_the_garbage_collector_is_spared_the_objects_of_the_start():
    done = subprocess.run([sys.executable, "-c", SPARED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
