"""The public names: complete, documented, typed, and imported when they are used."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_rl
from hpc_rl.api import reference

ROOT = Path(__file__).resolve().parents[3]
MAX_CPU_S = 0.15  # of `import hpc_rl`


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_is_light():
    """The least of several imports: a busy machine only adds to it."""
    code = "import time; start = time.process_time(); import hpc_rl, sys\n"
    code += "print(time.process_time() - start); assert not {'numpy', 'torch', 'yaml'} & sys.modules.keys()"
    assert min(float(run(code)) for _ in range(3)) <= MAX_CPU_S


def test_reading_and_submitting_needs_neither_torch_nor_numpy():
    code = "import hpc_rl, sys\n"
    code += "hpc_rl.Trial, hpc_rl.submit, hpc_rl.list_trials, hpc_rl.sweep, hpc_rl.check, hpc_rl.Callback\n"
    code += "assert not {'numpy', 'torch', 'pandas'} & sys.modules.keys()"
    run(code)


def test_names_for_type_checkers_are_those_at_run_time():
    tree = ast.parse(Path(hpc_rl.__file__).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported | {"__version__"} == {*hpc_rl.__all__}
    for node in guarded.body:
        for alias in node.names:
            assert getattr(hpc_rl, alias.name).__module__ == node.module, alias.name
    assert dir(hpc_rl) == sorted(hpc_rl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        _ = hpc_rl.sumbit
    assert (Path(hpc_rl.__file__).parent / "py.typed").is_file()


def test_every_public_name_is_documented():
    missing = []
    for name in hpc_rl.__all__:
        value = getattr(hpc_rl, name)
        if name == "__version__":
            continue
        members = vars(value).items() if inspect.isclass(value) else ()
        public = [(key, one) for key, one in members if not key.startswith("_")]
        parts = [
            (name, value),
            *(pair for pair in public if inspect.isfunction(pair[1]) or isinstance(pair[1], property)),
        ]
        missing += [f"{name}.{key}" for key, one in parts if not inspect.getdoc(one)]
    assert not missing


def test_the_reference_is_the_page():
    page = (ROOT / "docs" / "api.md").read_text()
    assert page == reference.make_reference(), "run: python -m hpc_rl.api.reference docs/api.md"
    for name in set(hpc_rl.__all__) - {"__version__"}:
        assert f"\n## {name}\n" in page


def test_docstrings_become_markdown():
    text = "Do it.\n\nArgs:\n    one: The first,\n        and more.\n    two: Other.\n\nIts use:\n\n    x = 1\n\nEnd."
    assert reference.format_docstring(text).splitlines() == [
        "Do it.",
        "",
        "- `one`: The first,",
        "  and more.",
        "- `two`: Other.",
        "",
        "Its use:",
        "",
        "```text",
        "x = 1",
        "",
        "```",
        "",
        "End.",
    ]
