"""CPU seconds of importing and parsing a whole GRPO configuration, in a fresh interpreter each time.

    python benchmarks/config_load.py [--runs 9] [--out benchmarks/results/config_load.json]

`load` is import, read, interpolate, check the rules and make the plan of an AReaL-shaped file; `show` is the whole command
`hpc-rl config show`; `python` is an interpreter that does nothing. User plus system time of the process; the median counts,
and the goal of issue 3 is `load` at most 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from hpc_rl import __version__

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "unit" / "config" / "areal" / "gsm8k_grpo.yaml"
LOAD = """
import sys
from hpc_rl.config.rules.check import check
from hpc_rl.config.loading.load import load
from hpc_rl.plan.plan import make_plan
loaded = check(load(sys.argv[1:2], sys.argv[2:]), files=False)
make_plan(loaded.config, loaded.explicit, interpreter=sys.executable, scheduler="slurm")
assert "torch" not in sys.modules
"""


def cpu_seconds(argv: list[str]) -> float:
    process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{argv} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    words = [str(FILE)]
    commands = {
        "python": ["-c", "pass"],
        "load": ["-c", LOAD, *words],
        "show": ["-m", "hpc_rl.cli", "config", "show", "--config", *words],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.runs):  # interleaved, so that a busy moment hits all of them
        for name, argv in commands.items():
            seconds[name].append(cpu_seconds(argv))
    result = {
        "cpu_s": {
            name: {"median": statistics.median(all_s), "max": max(all_s)} for name, all_s in seconds.items()
        },
        "runs": args.runs,
        "versions": {"hpc_rl": __version__, "python": platform.python_version()},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
