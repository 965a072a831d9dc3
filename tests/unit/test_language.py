"""Plain English: words of a private dialect in messages, help texts and docstrings are refused, with what to
write instead.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "hpc_rl"
INSTEAD = {
    r"whoever|(no|some|any|every)body": "the process, the caller, no process",
    r"so (many|long|much)": "N, the number, the time",
    r"told": "asked, reported, notified",
    r"(goes|went) on": "continues, resumes",
    r"lies?( (in|on|at|beside|below|under|there|over))|where \w+ lie": "is stored, is located",
    r"(?<!there )is no [a-z_]+[:;,.]": "is not a valid …",
    r"wish(es|ed)?": "request",
    r"a person('s)?": "the user",
    r"put up with": "tolerated",
    r"besides": "additionally",
    r"taken away": "cancelled, preempted",
    r"(one|two) looks?": "one-shot, two checks",
    r"(without a|left no|no) word|in words": "without a record, with the reason",
    r"stand(s|ing)? still": "pause",
    r"\(ours\)": "leave it out",
}
DIALECT = re.compile("|".join(rf"(?<![\w-])(?:{word})(?![\w-])" for word in INSTEAD), re.IGNORECASE)


@cache
def packages() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        found.setdefault(path.relative_to(ROOT).parts[0], []).append(path)
    return found


@pytest.mark.parametrize("package", sorted(packages()))
def test_plain_english(package):
    found = [line for path in packages()[package] for line in dialect(path)]
    assert not found, "\n".join(found)


def dialect(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            for match in DIALECT.finditer(node.value):
                around = node.value[max(match.start() - 30, 0) : match.end() + 30]
                yield f"{where}: {match[0]!r} in {around!r}"


def test_plain_english_in_the_docs():
    pages = sorted((ROOT.parent / "docs").glob("*.md"))
    assert pages
    found = [f"{page.name}: {match[0]!r}" for page in pages for match in DIALECT.finditer(page.read_text())]
    assert not found
