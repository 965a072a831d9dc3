"""Run the test of each `works` row of parameter_status.tsv with that one option disconnected: it must fail.

    python tests/rows/bite.py                       all rows: what `make rows` runs
    python tests/rows/bite.py --sample 12 --seed 3  some rows, sections left out
    python tests/rows/bite.py --only eps_clip       rows with that in their names (a regular expression)
    python tests/rows/bite.py --reasons             all rows; of each the words that its test fails with
    python tests/rows/bite.py --places              and each place that reads the option by itself

Every test must pass as it is, and fail without the option: a test that is skipped, that is not found, or that does
not end in time has noticed nothing. A section is noticed if the rows of all its options are.
`--places` disconnects each place (places.py) alone: a test of one of the option's rows must fail, or the test that
places.tsv names for the place. Rows and places whose tests do not notice are listed in not_noticed.txt, which can
only shrink: what is noticed must not stand there. Exits with 1 if any of this is not so.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "config"))

import pytest
import torch
from disconnect import disconnect, disconnect_in_loader
from places import Place, place_at, places_of
from test_parameters import CONFIGS, ENVIRONMENT, SECTIONS, Row, select_rows

import hpc_rl
from hpc_rl.config.compat import atlas
from hpc_rl.config.load.fields import find_section, list_hints, list_options
from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.training import TrainEngineConfig

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LIST = FOLDER / "not_noticed.txt"
ALSO = FOLDER / "places.tsv"  # option, place, and a test that notices it there
READ_BY_THE_LOADER = ("cluster.cluster_name", "train_dataset.type")
TIMEOUT_S = 300
# gives another option its default, so rules read it: the name that ATLAS has for it is disconnected
READ_BY_RULES = "train_dataset.sequences_per_rank"
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:anyio", "-W", "ignore:Module already imported"]


def target_of(row: Row) -> tuple[Callable[..., None], tuple]:
    """Return what disconnects the option of a row, or the one that ATLAS's name stands for, in this process."""
    if row.system == "atlas" and atlas.ALIASES[row.parameter].to in ("", READ_BY_RULES):
        return disconnect_name, (row.parameter,)
    if row.system == "atropos":
        return disconnect, (ENVIRONMENT[row.section.rpartition(".")[2]], row.parameter)
    if row.option in READ_BY_THE_LOADER:
        return disconnect_in_loader, (row.option,)
    trainer = SECTIONS.get(row.section, ("grpo",))[0]
    cls = CONFIGS["teacher" if row.option.startswith("teacher.") else trainer]
    *sections, leaf = row.option.split(".")
    for section in sections:
        cls = find_section(list_hints(cls)[section]) or cls
    # engines do not tell models apart, nor readers of rows data sets
    return disconnect, (cls, leaf, issubclass(cls, TrainEngineConfig | DatasetConfig))


def disconnect_name(name: str) -> None:
    """Let the loader never see one of ATLAS's names."""
    translate = atlas.translate

    def without_it(sources: Sequence[Any], *args: Any) -> Any:
        return translate([{key: source[key] for key in source if key != name} for source in sources], *args)

    atlas.translate = without_it


FAILED, SKIPPED, LATE = 1, 97, 98  # exit codes of a child; 0: passed, others: pytest's, or 99
DID_NOT_RUN = {
    2: "it can not be collected",
    4: "there is no such test",
    5: "no test was selected",
    SKIPPED: "it was skipped",
    LATE: f"it did not end within {TIMEOUT_S} s",
}


@dataclass
class Outcome:
    """A plugin of pytest: what became of the tests that were run."""

    passed: int = 0
    failed: int = 0
    late: int = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and "from pytest-timeout" in report.longreprtext:
            self.late += 1
        elif report.failed and report.when != "teardown":
            self.failed += 1
        elif report.passed and report.when == "call":
            self.passed += 1

    def code(self, pytests: int) -> int:
        """Return the exit code, given that of pytest."""
        if pytests not in (0, FAILED):
            return pytests
        return LATE if self.late else FAILED if self.failed else 0 if self.passed else SKIPPED


def start(tests: Sequence[str], prepare: Callable[[], None], output: Path) -> int:
    """Run tests in a child of this process, after `prepare`; return its pid. Its exit code is an Outcome's."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        prepare()
        outcome = Outcome()
        code = outcome.code(int(pytest.main([*tests, *PYTEST, f"--timeout={TIMEOUT_S}"], plugins=[outcome])))
        write_reads()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


_reads: set[tuple[str, int]] = set()  # of this process
_reads_go_to: Path | None = None


def write_reads() -> None:
    if _reads_go_to is not None:
        _reads_go_to.write_text("\n".join(f"{file}\t{line}" for file, line in sorted(_reads)))


def record(output: Path, where: tuple) -> None:
    """Let an option's reads be recorded in this process, and written to a file at its end."""
    global _reads_go_to
    _reads_go_to = output

    def is_cut(file: str, line: int) -> bool:
        _reads.add((file, line))
        return False

    disconnect(*where, is_cut=is_cut)


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


def is_section(row: Row) -> bool:
    if row.system != "areal":
        return False
    return find_section(list_options(CONFIGS[SECTIONS[row.section][0]])[row.option]) is not None


def members_of(row: Row) -> list[Row]:
    """Return the rows of the options of a section, its own left out."""
    inside = f"{row.option}."
    return [one for one in select_rows("works") if one.system == "areal" and one.option.startswith(inside)]


def chosen_rows(args: argparse.Namespace) -> list[Row]:
    rows = [row for row in select_rows("works") if re.search(args.only, str(row))]
    if args.sample:
        rows = [row for row in rows if not is_section(row)]
        rows = random.Random(args.seed).sample(rows, min(args.sample, len(rows)))
    inner = (one for row in rows if is_section(row) for one in members_of(row))
    return list(dict.fromkeys([*rows, *inner]))


@dataclass
class Findings:
    """What was found: rows and places that are noticed, that are not, and what is wrong."""

    known: set[str]  # that are not noticed, by not_noticed.txt
    wrong: int = 0
    noticed: set[str] = field(default_factory=set)

    def say(self, name: str, words: str) -> None:
        self.wrong += 1
        print(f"{name}: {words}", flush=True)

    def judge(self, name: str, code: int, words: str = "") -> None:
        """Take in with which exit code the test of a row or a place ended without it."""
        if code == FAILED:
            self.noticed.add(name)
            if name in self.known:
                self.say(name, "is noticed: take it out of not_noticed.txt")
        elif code:
            why = DID_NOT_RUN.get(code, f"pytest exited with {code}")
            self.say(name, f"did not run: {why} {words}".rstrip())
        elif name not in self.known:
            self.say(name, "is not noticed when it is disconnected")


def check_rows(rows: list[Row], args: argparse.Namespace, findings: Findings, folder: Path) -> None:
    """Run the tests as they are, and each without its option."""
    files: dict[str, dict[str, None]] = {}
    for row in rows:
        files.setdefault(row.shown_by.partition("::")[0], {})[row.shown_by] = None
    whole = ((file, list(tests), lambda: None) for file, tests in files.items())
    for file, code, words in run_all(whole, args.jobs, folder):
        if code:
            findings.say(file, f"has a test that fails as it is ({DID_NOT_RUN.get(code, code)}) {words}")
    same: dict[tuple, list[Row]] = {}  # rows of several tables that have one option and one test
    for row in rows:
        same.setdefault((row.shown_by, *target_of(row)), []).append(row)
    work = ((alike, [test], partial(cut, *where)) for (test, cut, where), alike in same.items())
    codes: dict[Row, tuple[int, str]] = {}
    for alike, code, words in run_all(work, args.jobs, folder):
        codes |= dict.fromkeys(alike, (code, words))
    for row, (code, words) in codes.items():
        silent = [one for one in members_of(row) if codes[one][0] != FAILED] if is_section(row) else []
        if code == FAILED and silent:
            findings.say(str(row), f"has options that are not noticed: {', '.join(map(str, silent))}")
            continue
        findings.judge(str(row), code, words)
        if code == FAILED and args.reasons:
            print(f"{row}: {words}", flush=True)


def check_places(rows: list[Row], args: argparse.Namespace, findings: Findings, folder: Path) -> int:
    """Run tests without their options at one place each; return the number of places."""
    every: dict[str, dict[tuple, set[str]]] = {}  # option -> the classes that have it -> tests
    of_environments = set()
    for row in (
        row for row in select_rows("works") if not is_section(row) and target_of(row)[0] is disconnect
    ):
        option = row.parameter if row.system == "atropos" else row.option
        every.setdefault(option, {}).setdefault(target_of(row)[1], set()).add(row.shown_by)
        if row.system == "atropos":
            of_environments.add(option)
    for line in ALSO.read_text().splitlines():
        option, _, test = line.split("\t")
        for tests in every[option].values():
            tests.add(test)
    asked = {row.parameter if row.system == "atropos" else row.option for row in rows}
    every = {option: classes for option, classes in every.items() if option in asked}
    keys = [
        (option, where, test)
        for option, classes in every.items()
        for where, tests in classes.items()
        for test in sorted(tests)
    ]
    outputs = {key: folder / f"reads-{number}" for number, key in enumerate(keys)}
    # option -> place -> what disconnects it there, and a test that runs the place
    read_by: dict[str, dict[Place, list[tuple[tuple, str]]]] = {
        option: {place: [] for place in places_of(option, option in of_environments)} for option in every
    }
    work = ((key, [key[2]], partial(record, output, key[1])) for key, output in outputs.items())
    for (option, where, test), code, words in run_all(work, args.jobs, folder):
        if code:
            findings.say(test, f"fails as it is ({DID_NOT_RUN.get(code, code)}) {words}")
            continue
        places = read_by[option]
        for line in outputs[option, where, test].read_text().splitlines():
            file, _, number = line.partition("\t")
            at = next((one for one in places if one.is_at(file, int(number))), place_at(file, int(number)))
            places.setdefault(at, []).append((where, test))
    cuts = (
        ((option, place), [test], partial(disconnect, *where, is_cut=place.is_at))
        for option, places in read_by.items()
        for place, tests in places.items()
        for where, test in tests
    )
    codes: dict[tuple[str, Place], set[int]] = {}
    for key, code, _ in run_all(cuts, args.jobs, folder):
        codes.setdefault(key, set()).add(code)
    for option, places in read_by.items():
        for place in sorted(places, key=str):
            shown, found = f"{option} at {place}", codes.get((option, place), set())
            if found:
                findings.judge(shown, FAILED if FAILED in found else max(found))
            elif shown not in findings.known:
                findings.say(shown, "is run by no test of its rows, nor by one that places.tsv names")
    return sum(map(len, read_by.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sample", type=int, default=0, help="number of rows to run, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="run rows whose names match")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--reasons", action="store_true", help="print what each test fails with")
    parser.add_argument("--places", action="store_true", help="disconnect each place by itself, too")
    args = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)  # a process of several threads can not be forked safely
    import_all()
    began, rows = time.monotonic(), chosen_rows(args)
    findings = Findings(set(LIST.read_text().splitlines()))
    with tempfile.TemporaryDirectory() as folder:
        check_rows(rows, args, findings, Path(folder))
        of_rows = len(findings.noticed)
        num_places = check_places(rows, args, findings, Path(folder)) if args.places else 0
    elapsed_s = time.monotonic() - began
    print(f"{of_rows} of {len(rows)} rows are noticed, in {elapsed_s:.0f} s")
    if args.places:
        print(f"{len(findings.noticed) - of_rows} of {num_places} places are noticed")
    return int(findings.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
