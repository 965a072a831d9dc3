"""Rows of parameter_status.tsv say `works`: a sample of them, another each day, shows that their tests would notice.

`make rows` does it with all of them.
"""

import datetime
import subprocess
import sys
from pathlib import Path

BITE = Path(__file__).with_name("bite.py")


def test_a_sample_of_rows_is_noticed_when_it_is_disconnected():
    seed = str(datetime.datetime.now(datetime.UTC).date().toordinal())
    argv = [sys.executable, str(BITE), "--sample", "8", "--seed", seed, "--jobs", "1"]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, f"{' '.join(argv[1:])}\n{run.stdout}{run.stderr}"
