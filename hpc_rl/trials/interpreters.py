"""Checks of the Python interpreters of a plan: whether they have what the roles import.

Each interpreter is asked once in a run of a command (doctor/machine.py). One that has no answer here, because
only the nodes have it, is left to `check_interpreters`.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpc_rl.config import (
    sglang_versions,
    vllm_versions,
)
from hpc_rl.config.load.stored import list_open_variables
from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.rules.dataset_rules import list_read_datasets
from hpc_rl.core.backends import SERVER_BACKENDS
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.doctor import machine
from hpc_rl.plan.schema import Plan, Unit

NEEDED = ("torch", "transformers", "safetensors")
SERVER_VERSIONS = {"sglang": sglang_versions.FLAGS, "vllm": vllm_versions.FLAGS}
LOGGERS = {  # section of stats_logger -> the packages of which one is needed
    "wandb": ("wandb",),
    "swanlab": ("swanlab",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio",),
}
_OF_PACKAGES = ("launcher.modules", "launcher.setup")
_OWN = f"{', '.join(_OF_PACKAGES)} or PYTHONPATH must bring it"


def check_trainer(config: Config, plan: Plan) -> Iterator[Refusal]:
    """Yield the missing packages of the trainer's interpreter, or that it does not run."""
    if not has_own_interpreter(plan, "trainer"):
        return
    found = _list_packages(plan.python)
    if found is None:
        return
    refuse = partial(Refusal, option="launcher.python", value=plan.python, kind=Kind.MACHINE)
    if isinstance(found, str):
        yield refuse(why=f": {found}", use="name a Python 3.11 or newer")
        return
    brings_own = _is_self_contained(config, "trainer_env_vars")
    if missing := [name for name in NEEDED if name not in found]:
        yield _find_missing(
            "launcher.python", plan.python, missing, brings_own, "pip install 'hpc-rl[train]'"
        )
    elif _parse_numbers(found["torch"]) < machine.MIN_TORCH:
        least = ".".join(map(str, machine.MIN_TORCH))
        why = f"has torch {found['torch']}, but {least} or newer is needed"
        yield refuse(why=why, use=f"`pip install 'torch>={least}'`")
    if "tensorboard" not in found:
        yield refuse(why="has no tensorboard, so the trial writes no TensorBoard files", is_note=True)


def check_libraries(config: Config, plan: Plan) -> Iterator[Refusal]:
    """Yield options that need a library of the trainer's or the rollout role's interpreter."""
    found = _list_packages(plan.python)
    if found is None or isinstance(found, str):
        return
    wanted: list[tuple[str, str, str, str, str]] = []  # role, option, value, package, extra
    for name, packages in LOGGERS.items():
        mode = getattr(config.stats_logger, name).mode
        if mode != "disabled" and not any(package in found for package in packages):
            wanted.append(("trainer", f"stats_logger.{name}.mode", mode, name, name))
    role = "rollout" if isinstance(config, GRPOConfig) else "trainer"
    if isinstance(config, GRPOConfig) and "math_verify" in config.rollout.reward_functions:
        wanted.append((role, "rollout.reward_fn", "math_verify", "math-verify", "train"))
    for section, dataset in list_read_datasets(config):
        path = Path(dataset.path)
        package = "pyarrow" if path.suffix == ".parquet" else "datasets" if path.is_dir() else ""
        if package:
            wanted.append((role, f"{section}.path", str(path), package, "data"))
    for role, option, value, package, extra in wanted:
        if package not in found and has_own_interpreter(plan, role):
            why = f"needs the package {package}, which {plan.python} lacks"
            use = f"`pip install 'hpc-rl[{extra}]'` for that Python"
            use += ", or set it to disabled" if option.startswith("stats_logger.") else ""
            brings_own = _is_self_contained(config, "trainer_env_vars")
            yield _refuse_lack(option, value, why, use, brings_own)


def check_servers(config: Config, plan: Plan, library: str) -> Iterator[Refusal]:
    """Yield interpreters that lack the library of their servers, and versions without a table of flags."""
    if not isinstance(config, GRPOConfig):
        return
    for python, option in dict.fromkeys(_list_server_pythons(config, plan, library)):
        found = _list_packages(python)
        if found is None:
            continue
        refuse = partial(Refusal, option=option, value=python, kind=Kind.MACHINE)
        if isinstance(found, str):
            yield refuse(why=f": {found}", use="name the Python that has the servers")
        elif library not in found:
            use = "name the Python of an environment that has it"
            if not config.cluster.n_gpus_per_node:
                use += ", or use embedded servers"
            yield _find_missing(
                option, python, [library], _is_self_contained(config, "inference_server_env_vars"), "", use
            )
        elif (version := found[library].partition("+")[0]) not in SERVER_VERSIONS[library]:
            known = sorted(SERVER_VERSIONS[library], key=_parse_numbers)
            why = (
                f"has {library} {version}, unknown to this hpc-rl ({', '.join(known)}): the flags of "
                f"{known[-1]} are used"
            )
            yield refuse(why=why, is_note=True)


def _list_server_pythons(config: GRPOConfig, plan: Plan, library: str) -> Iterator[tuple[str, str]]:
    """Yield interpreter and option of the pools with servers of a library on the nodes themselves."""
    for pool in plan.pools:
        units = [unit for unit in plan.units if unit.pool == pool.name and unit.role == "server"]
        if (
            pool.backend != library
            or not SERVER_BACKENDS[library].is_process
            or any(map(_is_in_image, units))
        ):
            continue
        own = config.pools[pool.name].python if pool.name in config.pools else None
        if own:
            yield own, f"pools.{pool.name}.python"
        else:
            python = config.launcher.inference_server_python or plan.python
            yield python, "launcher.inference_server_python"


def has_own_interpreter(plan: Plan, role: str) -> bool:
    """Return whether a role runs by the interpreter of the plan, not by an image's."""
    return any(unit.role == role and not _is_in_image(unit) for unit in plan.units)


def _is_in_image(unit: Unit) -> bool:
    return unit.container is not None


def _list_packages(python: str) -> Mapping[str, str] | str | None:
    """Return the packages of an interpreter, or why it is not one; None if it can't be run here."""
    return machine.find_versions(python) if shutil.which(python) else None


def _is_self_contained(config: Config, variables: str) -> bool:
    """Return whether the job may find packages where the interpreter does not by itself."""
    launcher = config.launcher
    paths = [os.environ.get("PYTHONPATH", "")]
    paths += [list_open_variables(config, name).get("PYTHONPATH", "") for name in ("env", variables)]
    return bool(launcher.modules or launcher.setup or any(paths))


def _find_missing(
    option: str, python: str, names: list[str], brings_own: bool, command: str, use: str = ""
) -> Refusal:
    use = use or f"`{command}` for that Python, or set {option} to one that has it"
    return _refuse_lack(option, python, f"lacks the packages {', '.join(names)}", use, brings_own)


def _refuse_lack(option: str, value: str, why: str, use: str, brings_own: bool) -> Refusal:
    """Return the refusal of an interpreter that lacks packages; a note if the job may bring them."""
    refusal = Refusal(option=option, value=value, kind=Kind.MACHINE, why=why, use=use)
    if brings_own:
        return replace(refusal, use=_OWN, related=_OF_PACKAGES, is_note=True)
    return refusal


def _parse_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))
