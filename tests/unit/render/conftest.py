"""A small trial to render."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from job_scripts import make_stamp, sft_config, write_programs
from toy_plans import sft_plan

from hpc_rl.core.trial import Trial
from hpc_rl.plan.schema import Unit
from hpc_rl.render.scripts import choose_script_name, render


@pytest.fixture
def script(scripts):
    """`script("slurm", root=…, mode=…, **options of launcher.slurm)` -> text of the submitted script."""

    def make(scheduler: str, **options) -> str:
        return scripts(scheduler, **options)[choose_script_name(scheduler)]

    return make


@pytest.fixture
def scripts(tmp_path):
    """The same, as {file name: text}."""

    def make(
        scheduler: str,
        *,
        root: Path = tmp_path,
        mode: str = "auto",
        n_nodes: int = 1,
        own: Path | None = None,
        site: Path | Sequence[Path] = (),
        python: str = "/python",
        workdir: Path = Path("/work"),
        wheel: str = "w.zip",
        hooks: dict | None = None,
        units: Sequence[Unit] = (),
        n_gpus_per_node: int = 0,
        launcher: dict | None = None,
        **slurm,
    ) -> dict[str, str]:
        templates_dir = str(own) if own else ""
        launcher = {**(launcher or {}), "templates_dir": templates_dir, "slurm": slurm, "hooks": hooks or {}}
        size = {"n_nodes": n_nodes, "n_gpus_per_node": n_gpus_per_node}
        plan = sft_plan(list(units), python, recover_mode=mode, **size)
        stamp = make_stamp(workdir, wheel=wheel, start_mode=mode)
        folders = [site] if isinstance(site, Path) else site
        trial = Trial(root / "exp" / "one")
        return render(sft_config(mode, **launcher), plan, trial, stamp, scheduler, folders)

    return make


@pytest.fixture
def trial(tmp_path) -> Trial:
    """The trial that `scripts` renders."""
    return Trial(tmp_path / "exp" / "one")


@pytest.fixture
def written(scripts, trial, tmp_path):
    """As `scripts`, for a job in tmp_path: makes the trial's directories, and writes its scripts there."""

    def write(scheduler: str, python: Path, **options) -> Path:
        trial.make_dirs()
        write_programs(trial.scripts, scripts(scheduler, python=str(python), workdir=tmp_path, **options))
        return trial.scripts / choose_script_name(scheduler)

    return write


@pytest.fixture
def job_environ(tmp_path) -> dict[str, str]:
    """The environment of job 7 of Slurm, with programs in tmp_path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return env | {"HERE": str(tmp_path), "PATH": f"{tmp_path}:{env['PATH']}", "SLURM_JOB_ID": "7"}
