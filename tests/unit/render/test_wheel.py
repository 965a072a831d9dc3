"""The code that travels with a trial."""

from __future__ import annotations

import subprocess
import sys

from hpc_rl.render import wheel


def test_it_is_the_same_bytes_every_time():
    assert wheel.build() == wheel.build()


def test_python_imports_from_it_and_packs_it_again(tmp_path):
    name, content = wheel.build()
    (tmp_path / name).write_bytes(content)
    code = "import hpc_rl.plan.schema as m; from hpc_rl.render import wheel; print(m.__file__); print(wheel.build()[0])"
    env = {"PYTHONPATH": str(tmp_path / name), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    where, again = done.stdout.split()
    assert where.startswith(str(tmp_path / name)) and again == name
