"""The syntax trees of the package's files, parsed once for all tests of a process."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "hpc_rl"
SOURCES = sorted(ROOT.rglob("*.py"))


@cache
def parse_source(path: Path) -> ast.Module:
    gc.disable()  # collections, which find nothing, would take as long as the parser
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


@cache
def list_imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of a file, also those inside functions and classes."""
    return [
        node for node in walk_statements(parse_source(path)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def walk_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node; unlike ast.walk it looks into no expression."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt | ast.excepthandler | ast.match_case):
            yield inner
            yield from walk_statements(inner)
