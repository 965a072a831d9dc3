"""A test run that is ended by force leaves no private Slurm behind."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_host("hosts of their own end with the process that started them")
TEST = """
import time

def test_it(cluster):
    print("UP", cluster.dir, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_killed_run_takes_its_cluster_down(tmp_path, until, end):
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path[:0] = [{str(here)!r}, {str(here.parent / 'helpers')!r}]\nfrom importlib.util import spec_from_file_location, module_from_spec\n"
        f"spec = spec_from_file_location('slurm_conftest', {str(here / 'conftest.py')!r})\n"
        "module = module_from_spec(spec)\nspec.loader.exec_module(module)\n"
        "slurm_of, running_cluster, cluster = module.slurm_of, module.running_cluster, module.cluster\n"
    )
    (tmp_path / "test_it.py").write_text(TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert run.stdout is not None
    line = next((line for line in run.stdout if "UP " in line), "")
    folder = Path(line.partition("UP ")[2].strip())
    assert (folder / "run").is_dir(), line
    getattr(run, end)()
    run.communicate()
    until(
        lambda: not folder.exists() and not any(str(folder) in _command(process) for process in processes())
    )


def processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
