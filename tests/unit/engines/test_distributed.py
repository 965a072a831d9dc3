"""Joining the other ranks; that they then work together is tests/integration/test_fsdp.py."""

import pytest

from hpc_rl.core.errors import RoleFailed
from hpc_rl.engines.shared.distributed import init_ranks


def test_missing_ranks_are_counted_long_before_a_collective_times_out():
    published = []
    with pytest.raises(RoleFailed, match=r"only 1 of 3 trainer ranks started within 0.2 s"):
        init_ranks(
            0, 3, "cpu", lambda *where: published.append(where), input, timeout_s=3600.0, join_timeout_s=0.2
        )
    assert len(published) == 1
