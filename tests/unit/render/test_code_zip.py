"""The code that travels with a trial."""

import subprocess
import sys

from hpc_rl.render import code_zip


def run(folder, code: str) -> str:
    """The output of a Python process with the packed code."""
    name, content = code_zip.build()
    (folder / name).write_bytes(content)
    env = {"PYTHONPATH": str(folder / name), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_imports_from_it_and_packs_the_same_bytes_again(tmp_path):
    code = "import hpc_rl.plan.schema as m; from hpc_rl.render import code_zip; print(m.__file__); print(code_zip.build()[0])"
    where, again = run(tmp_path, code).split()
    assert where.startswith(str(tmp_path / again)) and (tmp_path / again).exists()


def test_what_the_job_script_imports_is_compiled_already(tmp_path):
    code = (
        "import sys, hpc_rl.roles.job, hpc_rl.supervise.job_runner\n"
        "own = [module for name, module in sys.modules.items() if name.partition('.')[0] == 'hpc_rl']\n"
        "print([one.__name__ for one in own if not one.__spec__.loader.get_filename(one.__name__).endswith('.pyc')])"
    )
    assert run(tmp_path, code) == "[]\n"
