"""A trial whose roles run in containers on this machine: each in its own image, the supervisor outside.

The containers are those of a stand-in for apptainer (tests/helpers/bin) that gives each role a root of its
own, so what is not bound is not there.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from toy_trials import hpc_rl, logs_of, make_quickstart, status, trial_of

STAND_IN = Path(__file__).resolve().parents[1] / "helpers" / "bin" / "apptainer"
ROLES = {"server": "inference_server", "rollout": "rollout", "trainer": "trainer"}


@pytest.mark.timeout(300)
def test_every_role_in_a_container_of_its_own(tmp_path):
    make_quickstart(tmp_path)
    images = {}
    for role in ROLES:
        images[role] = tmp_path / "images" / f"of the {role}.sif"
        images[role].parent.mkdir(exist_ok=True)
        images[role].write_text(
            json.dumps({"holds": [sys.prefix, sys.base_prefix], "env": {"PYTHONPATH": "/wrong"}})
        )
    disk = tmp_path / "disk"
    disk.mkdir()
    slurm = [f"launcher.slurm.{name}_image={images[role]}" for role, name in ROLES.items()]
    slurm += [f"launcher.slurm.{name}_image_python={sys.executable}" for name in ROLES.values()]
    slurm += [
        f"launcher.slurm.container_program={STAND_IN}",
        "launcher.type=local",
        f"cluster.local_dir={disk}",
    ]
    options = [
        "experiment_name=sums",
        "trial_name=boxed",
        "total_train_steps=2",
        "train_dataset.batch_size=8",
        "gconfig.n_samples=2",
    ]
    options += [
        "actor.ppo_n_minibatches=1",
        "valid_dataset=null",
        "evaluator.freq_steps=null",
        "recover.freq_steps=1",
    ]
    config = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "grpo.yaml"
    done = hpc_rl(
        "submit", "--follow", "--config", config, *options, *slurm, cwd=tmp_path, timeout_s=280, check=False
    )
    trial = trial_of(tmp_path, "boxed")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{logs_of(trial)}"
    assert status(tmp_path, "boxed")["state"] == "done"
    [attempt] = trial.attempts.iterdir()
    for role, image in images.items():
        [log] = (attempt / "logs").glob(f"{role}-0.0.log")
        assert re.search(
            rf"^INFO:    {re.escape(str(disk))}/.*/{re.escape(image.name)} without flags, (not )?isolated",
            log.read_text(),
            re.MULTILINE,
        )
        assert f"copied {image} to {disk}/" in log.read_text()
    assert list(disk.iterdir()) == [], "the copies are gone"


def test_a_missing_image_is_refused_before_anything_is_submitted(tmp_path):
    make_quickstart(tmp_path)
    config = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "grpo.yaml"
    missing = tmp_path / "none.sif"
    options = ["launcher.type=local", f"launcher.slurm.trainer_image={missing}"]
    done = hpc_rl("submit", "--config", config, *options, cwd=tmp_path, check=False)
    assert done.returncode == 64
    assert f"launcher.slurm.trainer_image {missing} does not exist" in done.stderr
    missing.touch()
    done = hpc_rl(
        "submit",
        "--config",
        config,
        *options,
        "launcher.slurm.container_program=no-apptainer",
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 64
    assert "launcher.slurm.container_program no-apptainer is not an executable program on" in done.stderr
    assert not (tmp_path / "quickstart" / "runs").exists()
