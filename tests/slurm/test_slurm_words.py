"""Slurm's own library is asked for all its words for states: the table has each."""

import subprocess
import sys

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


def test_the_table_has_every_word_of_the_library(running_cluster):
    where = str(running_cluster.slurm.root or "/usr/lib")
    done = subprocess.run(
        [sys.executable, "-c", ASK, where],
        env=running_cluster.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    pairs = {tuple(line.split()) for line in done.stdout.splitlines()} - {("?", "?")}
    assert len(pairs) >= 24
    for long, short in pairs:
        assert find_state(long) is not None and find_state(long) is find_state(short), (long, short)
        assert (
            find_state(long).state is not State.UNKNOWN or long == "REVOKED"
        )  # only the other cluster knows
    assert {long for long, _ in pairs} <= {word.name for word in SLURM_STATES}
