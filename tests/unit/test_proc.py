"""The limits of a role, in a process of its own; how processes are told apart and ended is in
supervise/test_steps.py.
"""

import json
import subprocess
import sys

LOWERED = """
import json, resource
from hpc_rl import proc
names = ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "RLIMIT_CORE")
numbers = [getattr(resource, name) for name in names]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
proc.raise_limits()
print(json.dumps([resource.getrlimit(number) for number in numbers]))
"""


def test_soft_limits_are_raised_to_the_hard_ones_and_cores_are_off():
    done = subprocess.run(
        [sys.executable, "-c", LOWERED], capture_output=True, text=True, check=True, timeout=60
    )
    files, locked, core = json.loads(done.stdout)
    assert files == [2048, 2048]
    assert locked[0] == locked[1]
    assert core[0] == 0
