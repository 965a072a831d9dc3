"""Toy trials by the command line, as a user would start them.

Shared by the integration, Slurm and SGLang tests.
"""

import contextlib
import getpass
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from patience import extend

from hpc_rl.cli.__main__ import main
from hpc_rl.core.proc import is_alive
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import TrajectoryGroup, decode
from hpc_rl.examples import toy
from hpc_rl.rollout.batch_log.ledger import GroupRecord, Ledger, list_segments, load_segment

# how a command is run in a directory; a test on other hosts has another way
on_host: Callable[[list[str], Path], list[str]] = lambda command, _cwd: command  # noqa: E731
# the id that this machine gives a process of a host, which counts by itself where nodes are hosts of their own
outer_pid: Callable[[str, int], int] = lambda _host, pid: pid  # noqa: E731
ROOT = Path(__file__).resolve().parents[2]


def make_toy(folder: Path, *models: str, seed: int = 0) -> Path:
    """Make the toy's task, and a random model of each name, in a folder; return the folder."""
    toy.make_task(folder / "task", seed)
    for name in models:
        toy.make_model(folder / name, seed)
    return folder


def make_quickstart(folder: Path, seed: int = 1) -> None:
    """Make `quickstart/` with a random model in place of the warm one, and the task."""
    make_toy(folder / "quickstart", "base", "warm", seed=seed)


def hpc_rl(
    *argv: str | Path, cwd: Path, timeout_s: float = 180, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `hpc-rl …` in a directory of the test's own, with its index of trials there too."""
    env = os.environ | {"XDG_STATE_HOME": str(cwd / "state"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hpc_rl.cli", *map(str, argv)]
    done = subprocess.run(
        on_host(command, cwd),
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=extend(timeout_s),
    )
    assert not check or done.returncode == 0, (
        f"hpc-rl {' '.join(map(str, argv))}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done


def pid_of(record: Mapping[str, Any]) -> int:
    """Return the id, as this machine counts, of the process of a record. Raises ProcessLookupError."""
    return outer_pid(record["host"], record["pid"])


def is_running(record: Mapping[str, Any]) -> bool:
    """Return whether the process of a record lives."""
    try:
        return is_alive(pid_of(record), record["start_ticks"])
    except ProcessLookupError:
        return False


def trial_of(cwd: Path, name: str, experiment: str = "sums") -> Trial:
    return Trial.of(cwd / "quickstart" / "runs", getpass.getuser(), experiment, name)


def status(cwd: Path, name: str, *flags: str) -> dict:
    """Return what `hpc-rl status --json` prints; without a process, because tests look again and again."""
    printed = io.StringIO()
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, {"XDG_STATE_HOME": str(cwd / "state")}),
        contextlib.redirect_stdout(printed),
    ):
        code = main(["status", name, "--json", *flags])
    assert code == 0, printed.getvalue()
    return json.loads(printed.getvalue())


def logs_of(trial: Trial, num_lines: int = 25) -> str:
    """The ends of all logs, for the message of a failed assertion."""
    files = sorted([*trial.attempts.glob("*/logs/*.log"), *trial.jobs.glob("*.out")])
    return "\n".join(
        f"== {f.name}\n" + "\n".join(f.read_text(errors="replace").splitlines()[-num_lines:]) for f in files
    )


def groups_in_ledger(trial: Trial) -> list[TrajectoryGroup]:
    """Every finished group that the ledger still holds, in the order in which they were finished."""
    places = [
        place
        for number in list_segments(trial.rollout)
        for place, record in load_segment(trial.rollout, number)
        if isinstance(record, GroupRecord)
    ]
    ledger = Ledger(trial.rollout)
    try:
        return [decode(ledger.fetch_group(place)) for place in places]
    finally:
        ledger.close()
