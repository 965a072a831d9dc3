"""The slower machine of `make slow`."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "slow_machine.py"
SPIN = """
import sys, time
begun = time.time()
while time.time() < begun + 4:
    pass
open(sys.argv[1], "w").write(f"{time.process_time() / (time.time() - begun)}\\n")
"""


@pytest.mark.soak
def test_each_process_has_a_share_of_a_core_and_none_is_left(tmp_path):
    """Also a daemon, which is no child of the command any more."""
    (tmp_path / "spin.py").write_text(SPIN)
    spin = f"{sys.executable} {tmp_path}/spin.py {tmp_path}"
    until_all = f"while [ $(cat {tmp_path}/[abc] | wc -w) -lt 3 ]; do sleep 0.2; done 2> /dev/null"
    command = f"{spin}/a & {spin}/b & (setsid {spin}/c &); (setsid sleep 1234567 &); {until_all}; exit 3"
    done = subprocess.run(
        [sys.executable, PROGRAM, "--share", "0.25", "sh", "-c", command], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (3, "")
    for name in "abc":
        assert float((tmp_path / name).read_text()) < 0.3
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"1234567" in one for one in commands)
