"""The code that travels with a trial."""

import subprocess
import sys

from hpc_rl.render import code_zip


def test_python_imports_from_it_and_packs_the_same_bytes_again(tmp_path):
    name, content = code_zip.build()
    (tmp_path / name).write_bytes(content)
    code = "import hpc_rl.plan.schema as m; from hpc_rl.render import code_zip; print(m.__file__); print(code_zip.build()[0])"
    env = {"PYTHONPATH": str(tmp_path / name), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    where, again = done.stdout.split()
    assert where.startswith(str(tmp_path / name)) and again == name


def test_what_the_job_script_imports_is_compiled_already(tmp_path):
    name, content = code_zip.build()
    (tmp_path / name).write_bytes(content)
    code = (
        "import sys, hpc_rl.roles.job, hpc_rl.supervise.job_runner\n"
        "own = [module for name, module in sys.modules.items() if name.partition('.')[0] == 'hpc_rl']\n"
        "print([one.__name__ for one in own if not one.__spec__.loader.get_filename(one.__name__).endswith('.pyc')])"
    )
    env = {"PYTHONPATH": str(tmp_path / name), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "[]\n", done.stdout + done.stderr
