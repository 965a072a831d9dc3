"""The places of the product that read an option: a file, a function, and which of its reads.

They are found in the source by name, as tests/unit/config/test_read.py does. A place that reads an option by
another name, or by getattr, is known only if a test runs it.
"""

import ast
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from test_read import LOCAL_NAMES, find_own_names, find_owners

ROOT = Path(__file__).resolve().parents[2]
# these see what was configured (disconnect.py), or declare it
NOT_PLACES = (
    "loading/",
    "rules/",
    "sections/",
    "tables/",
    "presets/",
    "show.py",
    "snapshot.py",
    "reference.py",
)
ENVIRONMENTS = {"config", "env", "settings"}  # what an environment calls its settings


@dataclass(frozen=True)
class Place:
    """One line that reads an option."""

    file: str  # relative to ROOT
    function: str
    number: int  # of the lines in this function that read it, from 1
    line: int

    def __str__(self) -> str:
        number = f"#{self.number}" if self.number > 1 else ""
        return f"{self.file}:{self.function}{number}"

    def is_at(self, file: str, line: int) -> bool:
        return line == self.line and file == str(ROOT / self.file)


@dataclass(frozen=True)
class _Read:
    of: str  # the last name before the attribute
    file: str
    function: str
    line: int


@cache
def _reads() -> dict[str, list[_Read]]:
    """Attribute name -> where it is read."""
    found: dict[str, list[_Read]] = defaultdict(list)

    def visit(node: ast.AST, file: str, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{function}.{child.name}".lstrip(".")
            elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
                of = child.value
                last = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
                found[child.attr].append(_Read(last, file, function, child.end_lineno or child.lineno))
            visit(child, file, name)

    for path in sorted((ROOT / "hpc_rl").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.removeprefix("hpc_rl/config/").startswith(NOT_PLACES) or "/config/" not in file:
            visit(ast.parse(path.read_text()), file, "")
    return found


def places_of(option: str, is_of_an_environment: bool = False) -> list[Place]:
    """Return the places that read an option, by its dotted name."""
    *sections, leaf = option.split(".")
    section = sections[-1] if sections else ""
    names = {section, *LOCAL_NAMES.get(section, set())}
    reads = _reads()[leaf]
    if is_of_an_environment:
        reads = [one for one in reads if one.of in ENVIRONMENTS and "/environments/" in one.file]
    elif len(find_owners()[leaf]) > 1 or leaf in find_own_names():
        reads = [one for one in reads if one.of in names]
    found: list[Place] = []
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for file, function, line in sorted({(one.file, one.function, one.line) for one in reads}):
        counts[file, function] += 1
        found.append(Place(file, function, counts[file, function], line))
    return found


@cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    """Return the first line, the last line and the name of each function of a file, inner ones later."""
    found = []

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}".lstrip(".")
                found.append((child.lineno, child.end_lineno or child.lineno, name))
            visit(child, name)

    visit(ast.parse((ROOT / file).read_text()), "")
    return found


def place_at(file: str, line: int) -> Place:
    """Return the place of a read that a test ran, and that was not found in the source."""
    short = str(Path(file).relative_to(ROOT))
    inside = [name for first, last, name in _functions(short) if first <= line <= last]
    return Place(short, inside[-1] if inside else "", 1, line)
