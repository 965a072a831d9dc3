"""The garbage collector pauses while libraries are imported."""

import gc

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
