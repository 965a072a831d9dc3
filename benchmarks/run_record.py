"""The parts that every result file of a benchmark has: its command, commit, time, machine, load and versions."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CPUINFO = Path("/proc/cpuinfo")


def describe_run(*packages: str) -> dict[str, Any]:
    """Describe this run. Call it before the work, because it has the load of the machine.

    `packages` are distributions whose versions matter beside Python's.
    """
    return {
        "command": describe_command(),
        "commit": describe_commit(ROOT),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "load": os.getloadavg(),  # of 1, 5 and 15 minutes
        "versions": {"python": platform.python_version(), **{name: find_version(name) for name in packages}},
    }


def describe_command() -> str:
    program = Path(sys.argv[0]).resolve()
    shown = program.relative_to(ROOT) if program.is_relative_to(ROOT) else program
    return " ".join(["python", str(shown), *sys.argv[1:]])


def describe_commit(tree: Path) -> str:
    """Return the commit of a checkout, with `-dirty` after it if files differ; '' if git knows none."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def describe_machine() -> dict[str, Any]:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.machine()
    return {"cpus": len(os.sched_getaffinity(0)), "processor": processor, "platform": platform.platform()}


def find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write_record(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
