"""The shape of the package: no import cycle, and no decision taken by reading a message."""

import ast
from pathlib import Path

from package_sources import ROOT, SOURCES, list_imports, parse_source

# Names in which text for people is carried.
MESSAGE_NAMES = {"reason", "reasons", "message", "messages", "words", "text", "error", "detail", "note"}
MESSAGE_METHODS = {"startswith", "endswith", "replace", "find", "removeprefix", "removesuffix", "partition"}


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_modules_have_no_import_cycle():
    modules = {module_name(path): path for path in SOURCES}
    edges = {
        name: {to if to in modules else to.rpartition(".")[0] for to in imports(path)} & modules.keys()
        for name, path in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> None:
        assert name not in above, " -> ".join([*above, name])
        for other in sorted(edges[name] - done - {name, "hpc_rl"}):
            visit(other, [*above, name])
        done.add(name)

    for name in modules:
        visit(name, [])


MAX_IMPORTS = 12  # internal modules that one command may import


def test_commands_import_few_modules():
    """A command parses, calls and prints; more imports mean that work belongs below."""
    modules = {module_name(path) for path in SOURCES}
    counts = {}
    for path in sorted((ROOT / "cli").glob("*.py")):
        names = {name for name in imports(path) if name.startswith("hpc_rl.")}
        counts[place(path)] = len({name if name in modules else name.rpartition(".")[0] for name in names})
    assert not {name: count for name, count in counts.items() if count > MAX_IMPORTS}


def module_name(path: Path) -> str:
    return ".".join(("hpc_rl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Return what a module imports from the package, imports inside functions included."""
    found: set[str] = set()
    for node in list_imports(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_nothing_decides_by_reading_a_message():
    prose = prose_constants()
    found = {place(path): reads_of_messages(parse_source(path), prose) for path in SOURCES}
    assert not any(found.values()), {where: lines for where, lines in found.items() if lines}


def prose_constants() -> set[str]:
    """Return the names of the package's constants that hold a text with a blank in it."""
    return {
        target.id
        for path in SOURCES
        for node in parse_source(path).body
        if isinstance(node, ast.Assign) and has_blank(node.value)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }


def reads_of_messages(tree: ast.Module, prose: set[str]) -> list[str]:
    """Return comparisons and string methods that look for prose in something that is named like a message."""

    def is_prose(node: ast.AST) -> bool:
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        return has_blank(node) or bool(names & prose)

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            reads = node.func.attr in MESSAGE_METHODS and is_message(node.func.value)
            reads = reads and any(is_prose(arg) for arg in node.args)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            reads = any(is_message(side) for side in sides) and any(is_prose(side) for side in sides)
        else:
            continue
        if reads:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def is_message(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in MESSAGE_NAMES


def has_blank(node: ast.AST) -> bool:
    """Whether a string constant of a literal holds words: a blank between letters."""
    literals = ast.Constant | ast.JoinedStr | ast.Tuple | ast.List | ast.Set | ast.BinOp
    return isinstance(node, literals) and any(
        isinstance(one, ast.Constant) and isinstance(one.value, str) and " " in one.value.strip()
        for one in ast.walk(node)
    )
