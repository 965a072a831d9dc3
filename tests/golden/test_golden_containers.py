"""The steps of a trial in each layout and kind of container, as supervisors start them on Slurm: srun, container, command,
environment.

Beside the scripts (test_golden_scripts.py), which are the same for all kinds: the supervisor is never in a container. One file
a layout and kind in tests/golden/containers, in the shell's syntax; `pytest tests/golden --update-golden` rewrites them.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.config.loading.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.plan.plan import make_plan
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.render.container_command import wrap
from hpc_rl.render.scripts import Stamp, render
from hpc_rl.supervise.processes import common_env, srun_argv
from hpc_rl.trial import Trial

CHECKOUT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "containers"
IMAGES = [
    "launcher.slurm.mount=/storage:/storage",
    "launcher.trainer_env_vars={NCCL_DEBUG: WARN, NOTE: 'a b, $(c)'}",
]
LAYOUTS = ("allocation", "hetjob", "jobs")
KINDS = {
    "none": [],
    "apptainer": [
        *IMAGES,
        "launcher.slurm.trainer_image=/storage/images/trainer.sif",
        "launcher.slurm.inference_server_image=/storage/images/sglang 0.5.sif",
        "launcher.slurm.container_args=[--no-home]",
    ],
    "pyxis": [
        *IMAGES,
        "launcher.slurm.container_type=pyxis",
        "launcher.slurm.trainer_image=/storage/images/trainer.sqsh",
        "launcher.slurm.inference_server_image=/storage/images/sglang 0.5.sqsh",
        "launcher.slurm.container_args=[--no-container-mount-home]",
    ],
}


def planned(layout: str, kind: str):
    overrides = ["cluster.n_nodes=4", "launcher.type=slurm", f"launcher.slurm.layout={layout}", *KINDS[kind]]
    loaded = check(load([CHECKOUT / "configs" / "grpo_sglang.yaml"], overrides), files=False)
    return loaded, make_plan(loaded.config, loaded.explicit, interpreter="/PYTHON", scheduler="slurm")


def on_its_job(plan: Plan, unit: Unit) -> tuple[Unit, list[str], int | None]:
    """The unit as the supervisor of its job sees it, the nodes of that job, and the component that it belongs to."""
    hosts = [f"n{index}" for index in range(plan.n_nodes)]
    if plan.layout == "allocation":
        return unit, hosts, None
    if plan.layout == "hetjob":
        return (
            unit,
            hosts,
            next(number for number, group in enumerate(plan.groups) if unit.nodes[0] in group.nodes),
        )
    nodes = unit.nodes[:1] if unit.role == "server" else plan.groups[0].nodes
    [unit] = [one for one in plan.units_on(nodes) if (one.role, one.index) == (unit.role, unit.index)]
    return unit, [hosts[index] for index in nodes], None


def steps_of(layout: str, kind: str, tmp_path: Path) -> str:
    """The step of one unit of each role as a command of bash, with the variables that are its own in front."""
    loaded, plan = planned(layout, kind)
    config = loaded.config
    trial = Trial.of(config.cluster.fileroot, "user", config.experiment_name, config.trial_name)
    attempt = trial.attempt("7.0")
    lines = ["#!/bin/bash"]
    for unit in {unit.role: unit for unit in plan.units}.values():
        unit, hosts, component = on_its_job(plan, unit)
        argv = [
            plan.python,
            "-m",
            unit.module,
            "--trial_dir",
            str(trial.dir),
            "--attempt",
            "7.0",
            "--index",
            str(unit.index),
        ]
        own = common_env(unit, "srun")
        inherited = {
            "PYTHONPATH": f"{trial.scripts}/WHEEL.zip:{tmp_path}:/opt/module/lib",
            "TMPDIR": "/scratch",
        }
        wrapped = wrap(unit, argv, inherited | own, own, trial.dir, tmp_path)
        srun = srun_argv(unit, hosts, True, attempt.log(unit.role, unit.index, 0), 0, component)
        env = [shlex.join(["env", *(f"{name}={value}" for name, value in sorted(wrapped.env.items()))])]
        lines += [
            "",
            f"# {unit.role} {unit.index}",
            " \\\n  ".join([*env, *map(shlex.quote, [*srun, *wrapped.srun_args, *wrapped.argv])]),
        ]
    return "\n".join(lines).replace(str(tmp_path), "/WORKDIR") + "\n"


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    return {f"{layout}.{kind}.sh": steps_of(layout, kind, tmp_path) for layout in LAYOUTS for kind in KINDS}


def test_steps_are_as_they_were(texts, update_golden):
    if update_golden:
        shutil.rmtree(GOLDEN, ignore_errors=True)
        GOLDEN.mkdir()
        for name, text in texts.items():
            (GOLDEN / name).write_text(text)
    assert {path.name: path.read_text() for path in GOLDEN.iterdir()} == texts


def test_bash_and_shellcheck_read_them(texts, tmp_path):
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert subprocess.run(["bash", "-n", tmp_path / name]).returncode == 0
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if shellcheck:
        done = subprocess.run(
            [shellcheck, "-e", "SC2016", *(str(tmp_path / name) for name in texts)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_scripts_are_the_same_in_all_of_them(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = set()
    for kind in KINDS:
        loaded, plan = planned(layout, kind)
        trial = Trial.of(
            loaded.config.cluster.fileroot, "user", loaded.config.experiment_name, loaded.config.trial_name
        )
        stamp = Stamp(
            version="V",
            config_sha256="S",
            command=["c"],
            tag="T",
            wheel="W",
            workdir=tmp_path,
            start_mode=plan.recover_mode,
        )
        texts = render(loaded.config, plan, trial, stamp, "slurm")
        assert set(texts) == ({"trial.sbatch", "servers.sbatch"} if layout == "jobs" else {"trial.sbatch"})
        found.add("".join(texts.values()))
        assert not any(word in text for text in texts.values() for word in ("sif", "sqsh"))
    assert len(found) == 1
