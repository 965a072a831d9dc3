"""Run the test of each `works` row of parameter_status.tsv with that one option disconnected: it must fail.

    python tests/rows/bite.py                       all rows: what `make rows` runs
    python tests/rows/bite.py --sample 12 --seed 3  some rows
    python tests/rows/bite.py --only eps_clip       rows with these letters in their names

Every test must pass as it is. Rows whose tests do not notice are listed in not_noticed.txt, which can only
shrink: a row that is noticed must not stand there. Exits with 1 where any of this is not so.
"""

import argparse
import importlib
import itertools
import os
import pkgutil
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "config"))

import pytest
import torch
from disconnect import disconnect
from test_parameters import CONFIGS, ENVIRONMENT, SECTIONS, Row, of

import hpc_rl
from hpc_rl.config.loading.fields import hints, section_of
from hpc_rl.config.tables import atlas

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LIST = FOLDER / "not_noticed.txt"
TIMEOUT_S = 300
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:anyio", "-W", "ignore:Module already imported"]


def disconnect_row(row: Row) -> None:
    """Disconnect the option of a row in this process, or the name that ATLAS has for one."""
    if row.system == "atlas":
        atlas.ALIASES[row.parameter] = atlas.Alias(idle=(atlas.ANY,), why="it is disconnected")
    elif row.system == "atropos":
        disconnect(ENVIRONMENT[row.section.rpartition(".")[2]], row.parameter)
    else:
        cls = CONFIGS[SECTIONS[row.section][0]]
        *sections, leaf = row.option.split(".")
        for section in sections:
            cls = section_of(hints(cls)[section]) or cls
        disconnect(cls, leaf)


def start(test: str, prepare: Callable[[], None], output: Path) -> int:
    """Run one test in a child of this process, after `prepare`; return its pid. It exits as pytest does."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        prepare()
        code = int(pytest.main([test, *PYTEST, f"--timeout={TIMEOUT_S}"]))
    finally:
        os._exit(code)


def run_all(work: Iterable[tuple[Any, str, Callable[[], None]]], jobs: int, folder: Path) -> dict[Any, int]:
    """Return the exit code of pytest for each key of (key, test, what to do before)."""
    codes: dict[Any, int] = {}
    running: dict[int, Any] = {}
    waiting = iter(work)
    for number in itertools.count():
        step = next(waiting, None)
        while running and (step is None or len(running) >= jobs):
            pid, status = os.wait()
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        if step is None:
            return codes
        key, test, prepare = step
        running[start(test, prepare, folder / f"{number}.txt")] = key
    raise AssertionError


def import_all() -> None:
    """Import the package, which the children then share. What an engine of another machine needs may be missing."""
    warnings.simplefilter("ignore")
    for module in pkgutil.walk_packages(hpc_rl.__path__, "hpc_rl."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(f"{module.name} was not imported: {error}")


def chosen_rows(args: argparse.Namespace) -> list[Row]:
    rows = [row for row in of("works") if args.only in str(row)]
    return random.Random(args.seed).sample(rows, min(args.sample, len(rows))) if args.sample else rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, help="run so many rows, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="run rows with these letters in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)  # a process of several threads can not be forked safely
    import_all()
    began, rows = time.monotonic(), chosen_rows(args)
    known = set(LIST.read_text().splitlines())
    tests = dict.fromkeys(row.shown_by for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        whole = run_all(((test, test, lambda: None) for test in tests), args.jobs, Path(folder))
        work = ((str(row), row.shown_by, lambda row=row: disconnect_row(row)) for row in rows)
        cut = run_all(work, args.jobs, Path(folder))
    broken = [test for test, code in whole.items() if code]
    silent = [str(row) for row in rows if cut[str(row)] == 0]
    odd = {name: code for name, code in cut.items() if code not in (0, 1)}
    new, noticed = sorted(set(silent) - known), sorted({str(row) for row in rows} & known - set(silent))
    for title, lines in (
        ("fails as it is", broken),
        ("is not noticed when it is disconnected", new),
        ("is noticed: take it out of not_noticed.txt", noticed),
        ("did not run", [f"{name} (pytest exited with {code})" for name, code in odd.items()]),
    ):
        print(*(f"{line}: {title}" for line in lines), sep="\n", end="\n" if lines else "")
    print(f"{len(rows) - len(silent)} of {len(rows)} rows are noticed, in {time.monotonic() - began:.0f} s")
    return int(bool(broken or new or noticed or odd))


if __name__ == "__main__":
    sys.exit(main())
