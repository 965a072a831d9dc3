"""The shape of the package: unique names, small pieces, no import cycle, and no decision taken by reading a
message.
"""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "hpc_rl"
SOURCES = sorted(ROOT.rglob("*.py"))
LONGEST_FUNCTION = 70
LONGEST_FILE = 450
SHORTEST_MODULE = 60
REPEATED_FILES = {"__init__.py", "__main__.py", "base.py"}

# Small modules, and why each is a file of its own.
SMALL = {
    "algorithms/areal.py": "an algorithm is one page",
    "algorithms/base.py": "imported by every algorithm",
    "algorithms/kl.py": "an algorithm is one page",
    "app/local_image.py": "a process of its own",
    "app/server.py": "a process of its own",
    "app/submit_again.py": "a process of its own",
    "private_files.py": "what trusts no other account stands alone",
    "checkpoint/lineage.py": "writes what records.py reads",
    "cli/du.py": "a command of its own",
    "cli/env.py": "a command of its own",
    "cli/quickstart.py": "a command of its own",
    "cli/remove.py": "a command of its own",
    "cli/render.py": "a command of its own",
    "cli/fork.py": "a command of its own",
    "cli/continuation.py": "what three commands say of one thing",
    "rollout/batch_log/judged.py": "a theory of its own",
    "rollout/rewards/algebra.py": "imports math-verify, which no other process needs",
    "submit/user_code.py": "imported by submit and by config diff",
    "config/environment_file.py": "imported by the role and by hpc-rl env",
    "config/loading/profiles.py": "imported by config, render and doctor",
    "config/loading/stored.py": "what roles read: no parser, no YAML",
    "config/rules/environment_rules.py": "rules of a section",
    "config/rules/judge_rules.py": "rules of a section",
    "config/rules/mpi_rules.py": "rules of a section",
    "config/rules/sglang_rules.py": "rules of one server backend",
    "config/rules/vllm_rules.py": "rules of one server backend",
    "config/sections/dataset.py": "a section of its own",
    "config/sections/environments.py": "a section of its own",
    "config/sections/pools.py": "a section of its own",
    "config/tables/flags.py": "imported by the tables of two servers, and by their rules",
    "config/tables/megatron_models.py": "imported by plan and by the engine",
    "config/tables/sglang_versions.py": "a table",
    "config/tables/vllm_versions.py": "a table",
    "config/text_templates.py": "imported by rules and by the rollout role",
    "datasets/order.py": "a pure function with a theory of its own",
    "engines/megatron/process_groups.py": "what Megatron has once in a process",
    "engines/mesh.py": "a theory of its own",
    "examples/environments/arithmetic.py": "an example",
    "examples/environments/guess_number.py": "an example",
    "log.py": "imported by every role",
    "name_resolve/keys.py": "every key once",
    "net.py": "imported by every server",
    "plan/mpi_start.py": "a pure function with a theory of its own",
    "proc.py": "imported by supervisor, schedulers and status",
    "render/code_zip.py": "imported by submit and doctor",
    "render/hooks.py": "imported by render and templates",
    "rollout/batch_fill.py": "a theory of its own",
    "rollout/staleness.py": "a theory of its own",
    "rollout/workflows.py": "a table",
    "schedulers/hostlist.py": "imported by sinfo, every role and doctor",
    "schedulers/submitit.py": "a scheduler of its own",
    "servers/base.py": "a protocol with several implementations",
    "slurm_time.py": "imported by config, render, submit and schedulers",
    "stats/tracker.py": "imported by every recipe and engine",
    "submit/dependency.py": "knows trials as well as Slurm",
    "supervise/bad_nodes.py": "imported by supervise and submit",
    "trainers/activity.py": "imported by the run and what composes it",
}

# What is still to be mended; each list only shrinks.
KNOWN_SMALL: set[str] = set()
KNOWN_FILE_NAMES: set[str] = set()
KNOWN_CLASS_NAMES: set[str] = set()
KNOWN_LONG_FUNCTIONS: set[str] = set()
KNOWN_LONG_FILES: set[str] = set()
KNOWN_READS = {"records.py"}  # only what earlier versions wrote

# Names in which text for people is carried.
MESSAGE_NAMES = {"reason", "reasons", "message", "messages", "words", "text", "error", "detail", "note"}
MESSAGE_METHODS = {"startswith", "endswith", "replace", "find", "removeprefix", "removesuffix", "partition"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_file_names_are_unique():
    places = defaultdict(list)
    for path in SOURCES:
        if path.name not in REPEATED_FILES:
            places[path.name].append(place(path))
    assert {name for name, found in places.items() if len(found) > 1} <= KNOWN_FILE_NAMES


def test_public_class_names_are_unique():
    places = defaultdict(list)
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(place(path))
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert repeated.keys() <= KNOWN_CLASS_NAMES, repeated


def test_functions_fit_on_a_screen():
    long = {
        f"{place(path)} {node.name}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= LONGEST_FUNCTION
    }
    assert long <= KNOWN_LONG_FUNCTIONS


def test_files_can_be_read_in_one_go():
    long = {place(path) for path in SOURCES if len(path.read_text().splitlines()) > LONGEST_FILE}
    assert long <= KNOWN_LONG_FILES


def test_a_small_module_has_a_reason():
    small = {
        place(path)
        for path in SOURCES
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < SHORTEST_MODULE
    }
    assert small <= SMALL.keys() | KNOWN_SMALL


def test_modules_have_no_import_cycle():
    modules = {module_name(path): path for path in SOURCES}
    edges = {
        name: {to if to in modules else to.rpartition(".")[0] for to in imports(tree_of(path))}
        & modules.keys()
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


def module_name(path: Path) -> str:
    return ".".join(("hpc_rl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imports(tree: ast.Module) -> set[str]:
    """Return what a module imports from the package, imports inside functions included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_nothing_decides_by_reading_a_message():
    prose = prose_constants()
    found = {place(path): reads_of_messages(tree_of(path), prose) for path in SOURCES}
    reads = {where: lines for where, lines in found.items() if lines}
    assert reads.keys() <= KNOWN_READS, reads


def prose_constants() -> set[str]:
    """Return the names of the package's constants that hold a text with a blank in it."""
    return {
        target.id
        for path in SOURCES
        for node in tree_of(path).body
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
