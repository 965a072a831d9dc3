"""docs/architecture.md and the diagram of README.md: their names of processes, files, modules and layers are the code's."""

import ast
import itertools
import re
from pathlib import Path

import pytest

from hpc_rl.cli.__main__ import COMMANDS
from hpc_rl.core.trial import Attempt, Trial
from hpc_rl.render import scripts

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpc_rl"
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/architecture.md")}
PAGE = PAGES["docs/architecture.md"]
DIAGRAMS = {name: re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0] for name, text in PAGES.items()}
PROCESSES = {
    path.stem for path in (PACKAGE / "roles").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
}
FILE = re.compile(r"[\w<>.-]+(?:/[\w<>.-]+)*(?:/|\.(?:jsonl?|state|exclude|sbatch|sh))")


def files_of(page: str) -> set[str]:
    """Return the words of a diagram that are paths: with a slash at their end, or a file's ending."""
    words = (word.strip("(),;") for word in DIAGRAMS[page].split())
    return {word for word in words if FILE.fullmatch(word)}


def pattern(path: str) -> str:
    """Return a path with `<>` in the place of each value."""
    return re.sub(r"<[^>]*>|\{[^}]*\}", "<>", path).removesuffix("/")


def paths_of(cls: type, prefix: str = "") -> set[str]:
    """Return the paths that a class of core/trial.py declares."""
    declared = [vars(item) for item in vars(cls).values() if type(item).__name__ in ("_Path", "_PathOf")]
    return {pattern(prefix + value) for fields in declared for value in fields.values()}


def known_paths() -> set[str]:
    attempt = paths_of(Attempt, "attempts/<>/")
    rendered = {f"scripts/{name}" for name in (scripts.TRIAL, scripts.LOCAL, scripts.STEPS)}
    files = paths_of(Trial) | attempt | rendered | {"attempts/<>", "manifest.json"}
    inside = {
        path.removeprefix("attempts/<>/") for path in attempt
    }  # the diagram lists them after the folder
    return files | inside | {path.partition("/")[0] for path in inside if "/" in path}


@pytest.mark.parametrize("page", PAGES)
def test_processes_of_a_diagram_are_those_of_the_code(page):
    named = set(re.findall(r"\[([^\]]+)\]", DIAGRAMS[page]))
    commands = {name for name in named if name.startswith("hpc-rl ")}
    assert commands <= {f"hpc-rl {name}" for name in COMMANDS}
    assert named - commands <= PROCESSES
    assert {"job", "supervisor", "server", "rollout", "trainer"} <= named


@pytest.mark.parametrize("page", PAGES)
def test_files_of_a_diagram_are_those_of_the_code(page):
    named = {pattern(name) for name in files_of(page)}
    assert len(named) >= 9
    assert named <= known_paths(), named - known_paths()


def test_the_page_names_every_folder_of_a_trial():
    folders = {
        "scripts",
        "jobs",
        "intent",
        "names",
        "attempts",
        "lineages",
        "recover",
        "rollout",
        "weights",
        "exports",
    }
    assert folders <= {name.partition("/")[0] for name in files_of("docs/architecture.md")}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return table[2:]


def test_the_table_has_every_process():
    assert {row[0].strip("`") for row in rows("Processes and files")} == PROCESSES


def defined(path: Path) -> set[str]:
    """Return the names that a module defines at its top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("heading", ["Where to find it", "Where to add it"])
def test_places_of_the_code_exist(heading):
    found = rows(heading)
    assert len(found) >= 12
    for question, files, *name in found:
        paths = [PACKAGE / path for path in re.findall(r"`([\w/]+(?:\.py|/))`", files)]
        assert paths and all(path.exists() for path in paths), f"{question}: {files}"
        for word in re.findall(r"`(\w+)`", "".join(name)):
            assert any(word in defined(path) for path in paths if path.suffix == ".py"), f"{question}: {word}"


def test_layers_are_those_of_test_floors():
    block = PAGE.partition("## Layers\n")[2].partition("```text\n")[2].partition("```")[0]
    layers = [set(re.findall(r"\w+", line)) for line in reversed(block.splitlines())]
    tree = ast.parse((Path(__file__).parent / "test_floors.py").read_text())
    floors = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    )
    height = {name: number for number, names in enumerate(floors) for name in names - {"__init__"}}
    assert set().union(*layers) == height.keys()
    for low, high in itertools.pairwise(layers):
        assert max(height[name] for name in low) <= min(height[name] for name in high), (low, high)
