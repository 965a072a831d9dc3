"""Slurm's own library is asked for all its words for states: the table has each."""

import os
import subprocess
import sys

import pytest
from packages import NEWEST
from patience import extend

from hpc_rl.schedulers.base import State
from hpc_rl.schedulers.slurm_states import SLURM_STATES, find_state

ASK = """
import ctypes, glob, sys
library = ctypes.CDLL(glob.glob(sys.argv[1] + "/**/libslurmfull.so", recursive=True)[0])
for function in (library.job_state_string, library.job_state_string_compact):
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_uint32]
for number in [*range(64), *(1 << bit for bit in range(8, 32))]:
    print(library.job_state_string(number).decode(), library.job_state_string_compact(number).decode())
"""


@pytest.mark.parametrize("version", ["", NEWEST], ids=["", NEWEST])
def test_the_table_has_every_word_of_the_library(slurm_of, version):
    slurm = slurm_of(version)
    where = str(slurm.root or "/usr/lib")
    # a library of a newer system needs that system's C library
    loaded = [str(slurm.loader), "--library-path", slurm.libraries] if slurm.loader else []
    done = subprocess.run(
        [*loaded, sys.executable, "-c", ASK, where],
        env=os.environ | slurm.env,
        capture_output=True,
        text=True,
        timeout=extend(60),
    )
    assert done.returncode == 0, done.stderr
    pairs = {tuple(line.split()) for line in done.stdout.splitlines()} - {("?", "?")}
    assert len(pairs) >= 24
    for long, short in pairs:
        known = find_state(long)
        assert known is not None and find_state(short) is not None, (long, short)
        # Slurm shortens some flags to the base state below, which means the same to a trial.
        same = known.is_flag and known.state is find_state(short).state
        assert known is find_state(short) or same, (long, short)
        # Only the other cluster knows what a revoked job does.
        assert known.state is not State.UNKNOWN or long == "REVOKED"
    assert {long for long, _ in pairs} <= {word.name for word in SLURM_STATES}
