"""Run the test of each `works` row of parameter_status.tsv with that one option disconnected: it must fail.

    python tests/rows/bite.py                       all rows: what `make rows` runs
    python tests/rows/bite.py --sample 12 --seed 3  some rows
    python tests/rows/bite.py --only eps_clip       rows with that in their names (a regular expression)
    python tests/rows/bite.py --reasons             all rows; of each the words that its test fails with

Every test must pass as it is. Rows whose tests do not notice are listed in not_noticed.txt, which can only
shrink: a row that is noticed must not stand there. Exits with 1 where any of this is not so.
"""

import argparse
import importlib
import os
import pkgutil
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "config"))

import pytest
import torch
from disconnect import disconnect, disconnect_in_loader
from test_parameters import CONFIGS, ENVIRONMENT, SECTIONS, Row, of

import hpc_rl
from hpc_rl.config.loading.fields import hints, section_of
from hpc_rl.config.sections.training import TrainEngineConfig
from hpc_rl.config.tables import atlas

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LIST = FOLDER / "not_noticed.txt"
READ_BY_THE_LOADER = ("cluster.cluster_name", "train_dataset.type")
TIMEOUT_S = 300
# gives another option its default, so rules read it: the name that ATLAS has for it is read as another's
READ_BY_RULES = "train_dataset.sequences_per_rank"
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:anyio", "-W", "ignore:Module already imported"]


def target_of(row: Row) -> tuple[Callable[..., None], tuple]:
    """Return what disconnects the option of a row, or the one that ATLAS's name stands for, in this process."""
    if row.system == "atlas" and atlas.ALIASES[row.parameter].to == READ_BY_RULES:
        return disconnect_name, (row.parameter,)
    if row.system == "atropos":
        return disconnect, (ENVIRONMENT[row.section.rpartition(".")[2]], row.parameter)
    if row.option in READ_BY_THE_LOADER:
        return disconnect_in_loader, (row.option,)
    trainer = SECTIONS.get(row.section, ("grpo",))[0]
    cls = CONFIGS["teacher" if row.option.startswith("teacher.") else trainer]
    *sections, leaf = row.option.split(".")
    for section in sections:
        cls = section_of(hints(cls)[section]) or cls
    return disconnect, (cls, leaf, issubclass(cls, TrainEngineConfig))  # engines do not tell models apart


def disconnect_name(name: str) -> None:
    atlas.ALIASES[name] = atlas.Alias("seed")


def start(tests: Sequence[str], prepare: Callable[[], None], output: Path) -> int:
    """Run tests in a child of this process, after `prepare`; return its pid. It exits as pytest does."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        prepare()
        code = int(pytest.main([*tests, *PYTEST, f"--timeout={TIMEOUT_S}"]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_all(
    work: Iterable[tuple[Any, Sequence[str], Callable[[], None]]], jobs: int, folder: Path
) -> Iterator[tuple[Any, int, str]]:
    """Yield (key, exit code of pytest, words of the failure) for each (key, tests, what to do before)."""
    running: dict[int, tuple[Any, Path]] = {}
    waiting = list(work)[::-1]
    while waiting or running:
        while waiting and len(running) < jobs:
            key, tests, prepare = waiting.pop()
            output = folder / f"{len(waiting)}.txt"
            running[start(tests, prepare, output)] = key, output
        pid, status = os.wait()
        key, output = running.pop(pid)
        lines = output.read_text(errors="replace").splitlines()
        words = next((line[1:].strip() for line in lines if line.startswith("E  ")), (lines or [""])[-1])
        yield key, os.waitstatus_to_exitcode(status), words


def import_all() -> None:
    """Import the package, which the children then share. What an engine of another machine needs may be missing."""
    warnings.simplefilter("ignore")
    for module in pkgutil.walk_packages(hpc_rl.__path__, "hpc_rl."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(f"{module.name} was not imported: {error}")


def chosen_rows(args: argparse.Namespace) -> list[Row]:
    rows = [row for row in of("works") if re.search(args.only, str(row))]
    return random.Random(args.seed).sample(rows, min(args.sample, len(rows))) if args.sample else rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, help="number of rows to run, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="run rows whose names match")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--reasons", action="store_true", help="print what each test fails with")
    args = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)  # a process of several threads can not be forked safely
    import_all()
    began, rows = time.monotonic(), chosen_rows(args)
    known, wrong, silent = set(LIST.read_text().splitlines()), 0, set()

    def say(name: str, words: str) -> None:
        nonlocal wrong
        wrong += 1
        print(f"{name}: {words}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, dict[str, None]] = {}
        for row in rows:
            files.setdefault(row.shown_by.partition("::")[0], {})[row.shown_by] = None
        whole = ((file, list(tests), lambda: None) for file, tests in files.items())
        for file, code, words in run_all(whole, args.jobs, Path(folder)):
            if code:
                say(file, f"has a test that fails as it is (pytest exited with {code}) {words}")
        same: dict[tuple, list[str]] = {}  # rows of several tables that have one option and one test
        for row in rows:
            same.setdefault((row.shown_by, *target_of(row)), []).append(str(row))
        work = ((names, [test], partial(cut, *where)) for (test, cut, where), names in same.items())
        found = run_all(work, args.jobs, Path(folder))
        for name, code, words in ((name, code, words) for names, code, words in found for name in names):
            if code == 0:
                silent.add(name)
            if code not in (0, 1):
                say(name, f"did not run (pytest exited with {code}) {words}")
            elif code == 0 and name not in known:
                say(name, "is not noticed when it is disconnected")
            elif code and name in known:
                say(name, "is noticed: take it out of not_noticed.txt")
            elif code and args.reasons:
                print(f"{name}: {words}", flush=True)
    print(f"{len(rows) - len(silent)} of {len(rows)} rows are noticed, in {time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
