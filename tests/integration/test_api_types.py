"""`mypy --strict` accepts a script that uses every public name of `hpc_rl`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from patience import extend

import hpc_rl

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "fixtures" / "api" / "every_name.py"


def test_the_script_uses_every_public_name():
    tree = ast.parse(SCRIPT.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {*hpc_rl.__all__} <= used
    members: set[str] = set()
    for cls in (hpc_rl.Trial, hpc_rl.Sweep, hpc_rl.Records, hpc_rl.Report, hpc_rl.Configuration):
        members |= {name for name in vars(cls) if not name.startswith("_")}
    assert members - used <= {"config", "sources", "loaded", "require"}


@pytest.mark.timeout(600)
def test_a_strict_type_checker_accepts_it(tmp_path):
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\n")
    argv = [
        "--config-file",
        str(settings),
        "--follow-imports=silent",
        "--ignore-missing-imports",
        str(SCRIPT),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache" / "strict"), *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=extend(400),
    )
    assert done.returncode == 0, done.stdout + done.stderr
