"""The floors: imports go down only, the login half never imports torch, the server role needs few
packages.
"""

import ast
import os
import subprocess
import sys

from package_sources import ROOT, SOURCES, list_imports

FLOORS = [
    {"core", "sandbox"},
    {"config", "schedulers", "name_resolve", "stats", "algorithms", "weight_files"},
    {"plan", "engines", "datasets"},
    {"servers"},
    {"gateway"},
    {"render", "checkpoint", "rollout", "weights"},
    {"supervise", "doctor", "trainers"},
    {"atropos"},
    {"status", "examples"},
    {"trials"},
    {"api", "simulate"},
    {"cli", "roles"},
    {"tools"},
    {"__init__"},  # only its names for type checkers: at run time it imports what is asked for
]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return ["."] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]


def test_imports_go_down():
    wrong = []
    for path in SOURCES:
        here = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in list_imports(path):
            for name in imported(node):
                there = name.split(".")[1] if name.startswith("hpc_rl.") else here
                if name == "." or (there != here and there in FLOOR and FLOOR[there] >= FLOOR[here]):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {here} -> {name}")
    assert not wrong, "\n".join(wrong)


def test_everything_has_a_floor():
    names = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert names <= FLOOR.keys(), f"choose a floor for {sorted(names - FLOOR.keys())}"


LIGHT = [
    "hpc_rl.cli.__main__",
    "hpc_rl.trials.submission",
    "hpc_rl.supervise.runner",
    "hpc_rl.doctor.job_probe",
    "hpc_rl.doctor.node",
    "hpc_rl.checkpoint.decide",
    "hpc_rl.rollout.routes",
    "hpc_rl.gateway.routes",
    "hpc_rl.roles.supervisor",
    "hpc_rl.roles.rollout",
    "hpc_rl.roles.rollout_worker",
    "hpc_rl.tools.run_environment",
]


def test_light_imports():
    """One process imports them all; what is heavy stands beside the first module that imports it."""
    heavy = ["torch", "transformers", "ray", "sglang", "vllm", "megatron", "datasets", "wandb"]
    code = (
        "import importlib, sys\n"
        "import hpc_rl.tools.check_user_code\n"  # one such process for each submission
        "assert 'aiohttp' not in sys.modules\n"
        f"for module in {LIGHT}:\n"
        "    importlib.import_module(module)\n"
        f"    found = [name for name in {heavy} if name in sys.modules]\n"
        "    assert not found, f'{module} imports {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr


def test_public_names_are_there_and_cost_nothing_before():
    code = (
        "import sys, hpc_rl\n"
        "assert not {'numpy', 'torch'} & sys.modules.keys()\n"
        "from hpc_rl import *\n"
        "from hpc_rl.rollout.workflow import trajectory as found\n"
        "assert trajectory is found and Trajectory and TrajectoryGroup and Conversation and MultiTurn\n"
        "assert 'torch' not in sys.modules and not hasattr(hpc_rl, 'trajectories')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr


def test_the_server_role_needs_only_packages_of_a_sglang_image():
    aiohttp = {
        "aiohttp",
        "aiohappyeyeballs",
        "aiosignal",
        "attr",
        "frozenlist",
        "idna",
        "multidict",
        "propcache",
        "yarl",
    }
    code = (
        "import sys, hpc_rl.roles.server, hpc_rl.servers.sglang, hpc_rl.servers.vllm, hpc_rl.name_resolve.shared_fs\n"
        "from hpc_rl.config.load.stored import from_dict\n"
        "from_dict({'experiment_name': 'e', 'trial_name': 't', 'train_dataset': {'path': '/d'}, 'actor': {'path': '/m'}})\n"
        "files = {name: getattr(module, '__file__', None) or '' for name, module in sys.modules.items()}\n"
        "print(*sorted({name.split('.')[0] for name, file in files.items() if 'site-packages' in file}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) - {"_distutils_hack"} <= aiohttp | {
        "numpy",
        "yaml",
        "typing_extensions",
        "xxhash",
    }


DRY_RUN = [
    *(
        "submit",
        "--dry_run",
        "experiment_name=e",
        "trial_name=t",
        "trainer=sft",
        "train_dataset.batch_size=8",
    ),
    *("model.path=/nodes/m", "train_dataset.path=/nodes/d.jsonl", "cluster.node_dirs=[/nodes]"),
    "launcher.type=slurm",
]


def test_numpy_and_tokenizers_are_imported_only_to_read_rows(tmp_path):
    """Here only the nodes have rows and model, so the submission reads none."""
    for program in ("sbatch", "squeue", "sinfo", "scontrol", "sacct", "srun", "scancel"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    code = (
        "import sys\n"
        "from hpc_rl.cli.__main__ import main\n"
        f"assert main({[*DRY_RUN, f'cluster.fileroot={tmp_path}']}) == 0\n"
        "heavy = {'numpy', 'tokenizers', 'torch', 'aiohttp', 'sympy', 'omegaconf', 'rich'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, env=env
    )
    assert done.returncode == 0, done.stderr
