"""The wheel alone: built, installed into an empty environment without torch, used from `/`."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command_line import make_checkpoint
from patience import extend

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(600)


def call(*argv: str | Path, cwd: Path = Path("/"), **env: str) -> str:
    """Output of a command that must succeed; nothing of this environment is on its paths."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        [str(arg) for arg in argv],
        cwd=cwd,
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=extend(500),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel of the sources, and the wheel of the sdist."""
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation")
    call(*build, "--wheel", "--outdir", out / "direct", ROOT)
    call(*build, "--outdir", out / "by-sdist", ROOT)  # without a choice: the sdist, and the wheel from it
    (direct,), (by_sdist,) = (out / "direct").glob("*.whl"), (out / "by-sdist").glob("*.whl")
    return direct, by_sdist


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> Path:
    """The `bin` of an empty environment with the wheel and what it depends on."""
    where = tmp_path_factory.mktemp("empty") / "venv"
    call(sys.executable, "-m", "venv", where)
    call(
        where / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "--disable-pip-version-check",
        wheels[0],
    )
    return where / "bin"


def test_the_wheel_holds_the_package_the_templates_and_the_configurations(wheels):
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    for folder in ("templates", "sbatch", "configs"):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert files
        assert {f"hpc_rl/_data/{path}" for path in files} <= names
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "hpc_rl").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert modules <= names
    assert not [name for name in names if name.startswith("tests") or name.endswith(".pyc")]


def test_the_sdist_makes_the_same_wheel(wheels):
    direct, by_sdist = (zipfile.ZipFile(wheel) for wheel in wheels)
    assert {info.filename: info.CRC for info in direct.infolist()} == {
        info.filename: info.CRC for info in by_sdist.infolist()
    }


def test_help_needs_no_torch(installed):
    call(
        installed / "python", "-c", "import importlib.util; assert importlib.util.find_spec('torch') is None"
    )
    assert "quickstart" in call(installed / "hpc-rl", "--help")
    assert "--actor.optimizer.lr" in call(installed / "hpc-rl", "submit", "--help", "actor")


def test_the_console_script_of_this_environment_imports_no_torch():
    """Here torch is installed; the script itself is asked what it imported."""
    program = Path(sys.executable).with_name("hpc-rl")
    for words in (["--help"], ["submit", "--help"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", program, *words],
            capture_output=True,
            text=True,
            timeout=extend(120),
        )
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
        assert done.returncode == 0
        assert "hpc_rl" in imported
        assert not imported & {"torch", "transformers", "sglang", "omegaconf", "ray"}


# that what is rendered is right is the goldens' to test: here each template folder is found once
@pytest.mark.parametrize(
    ("name", "scheduler"), [("grpo", "local"), ("grpo", "slurm"), ("sft", "local"), ("grpo_sglang", "slurm")]
)
def test_it_renders_from_the_root_directory(installed, tmp_path, name, scheduler):
    site = Path(call(installed / "python", "-c", "import hpc_rl; print(hpc_rl.__path__[0])").strip())
    assert site.is_relative_to(installed.parent)
    shipped = site / "_data" / "configs" / f"{name}.yaml"
    data, model = tmp_path / "data.jsonl", tmp_path / "model"
    data.write_text('{"prompt": "1+1=", "answer": "2", "completion": "2"}\n' * 64)
    make_checkpoint(model, context=8192)
    section = "model" if name == "sft" else "actor"
    places = [
        f"{section}.path={model}",
        f"train_dataset.path={data}",
        *([f"valid_dataset.path={data}"] if name != "sft" else []),
    ]
    nodes = ["--n_nodes=1"] if scheduler == "local" else []
    options = [f"launcher.type={scheduler}", *places, *nodes]
    out = tmp_path / "rendered"
    call(
        installed / "hpc-rl",
        "render",
        "--config",
        shipped,
        "--output",
        out,
        *options,
        XDG_STATE_HOME=str(tmp_path / "state"),
    )
    script = out / "scripts" / {"local": "local.sh", "slurm": "trial.sbatch"}[scheduler]
    call("bash", "-n", script)
    assert str(installed / "python") in script.read_text()
    (code,) = (out / "scripts").glob("*.zip")
    assert {"hpc_rl/roles/supervisor.py", "hpc_rl/roles/job.py"} <= set(zipfile.ZipFile(code).namelist())
