"""Time limits, as sbatch parses and sinfo prints them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.core import slurm_time
from hpc_rl.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("1-0:0:5", 86405),
        ("30:00", 1800),
        ("1-00:00:00", 86400),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_seconds_of_a_time_limit(text, seconds):
    assert slurm_time.parse_time_limit(text) == seconds
    assert re.fullmatch(slurm_time.PATTERN, text.upper())


@pytest.mark.parametrize("text", ["soon", "", "1-", "1:2:3:4", "n/a"])
def test_what_is_not_a_time_limit_is_refused(text):
    with pytest.raises(ConfigError, match="time limit"):
        slurm_time.parse_time_limit(text)
    assert not re.fullmatch(slurm_time.PATTERN, text)


@given(st.integers(0, 10**7))
def test_a_time_limit_is_written_as_it_is_read(seconds):
    assert slurm_time.parse_time_limit(slurm_time.format_time_limit(seconds)) == seconds
