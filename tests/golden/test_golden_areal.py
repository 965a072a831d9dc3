"""Files in AReaL's shape, unmodified: their plans and job scripts compared whole.

The files lie in tests/golden/areal; `pytest tests/golden --update-golden` rewrites them, and a person reads their diff.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_rl.config.loading.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.plan.plan import make_plan
from hpc_rl.render.scripts import Stamp, render
from hpc_rl.trial import Trial

FILES = Path(__file__).resolve().parents[1] / "unit" / "config" / "areal"
GOLDEN = Path(__file__).parent / "areal"
NAMES = sorted(path.stem for path in FILES.glob("*.yaml"))


def made(name: str, folder: Path) -> dict[str, str]:
    """Golden file name -> text, machine paths replaced."""
    loaded = check(load([FILES / f"{name}.yaml"], profiles=[]), files=False)
    config = loaded.config
    plan = make_plan(config, loaded.explicit, interpreter="/PYTHON", scheduler="slurm")
    trial = Trial.of(config.cluster.fileroot, "user", config.experiment_name, config.trial_name)
    stamp = Stamp(
        version="VERSION",
        config_sha256="SHA256",
        command=["hpc-rl", "render", "--config", str(trial.config_yaml)],
        tag="hpc-rl:TAG",
        wheel="hpc_rl-WHEEL.zip",
        workdir=folder,
        start_mode=plan.recover_mode,
    )
    texts = {f"{name}.plan.json": json.dumps(plan.to_json(), indent=2, sort_keys=True) + "\n"}
    texts |= {f"{name}.{file}": text for file, text in render(config, plan, trial, stamp, "slurm").items()}
    return {file: text.replace(str(folder), "/WORKDIR") for file, text in texts.items()}


@pytest.mark.parametrize("name", NAMES)
def test_plan_and_script_are_as_they_were(name, tmp_path, monkeypatch, update_golden):
    monkeypatch.chdir(tmp_path)
    texts = made(name, tmp_path)
    if update_golden:
        GOLDEN.mkdir(exist_ok=True)
        for file, text in texts.items():
            (GOLDEN / file).write_text(text)
    known = {path.name: path.read_text() for path in GOLDEN.glob(f"{name}.*")}
    assert texts == known


def test_no_golden_file_is_left_over():
    assert {path.name.partition(".")[0] for path in GOLDEN.iterdir()} == set(NAMES)
