"""A role's container: its image, its bound paths, and the command that starts a unit in it. Pure.

Apptainer wraps the program, pyxis is options of srun. The supervisor stays outside, and starts and stops a
role in a container as it does any other. The role's standard input is the supervisor's pipe, which both hand
on; `apptainer exec` keeps process ids, process group and host name of the node
(config/rules/container_rules.py refuses the options that would not); the exit code is the role's own.

The environment is inherited; nothing of it is in an argument list, which every user of the node could read.
What must hold whatever the image says travels as APPTAINERENV_<name>, taken literally (APPTAINER_NO_EVAL,
from Apptainer 1.1 and SingularityCE 3.10 on), and for pyxis by name in `--container-env`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from hpc_rl.config.options.experiment import Config
from hpc_rl.config.rules.container_rules import (
    PYTHONS,
    SEPARATORS,
    Role,
    find_image,
    list_bound_paths,
    split_binds,
)
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.plan.schema import Container, Plan, Unit

LOCAL_IMAGE = "hpc_rl.roles.local_image"  # copies an image to the node, then executes apptainer
_HUB_CACHE = ("models--", "datasets--")
# Packages in the home directory belong to the node's Python, not to the image's Python of the same version.
_PYTHON = {"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def make_container(config: Config, role: Role | Literal["environment"]) -> Container | None:
    """Return the container of a role, or None if it runs on the node itself."""
    slurm = config.launcher.slurm
    if role == "environment":  # its command may start a container
        return None
    image = find_image(slurm, role)
    if not image or slurm.container_type == "none":
        return None
    given = [bind if ":" in bind else f"{bind}:{bind}" for bind in split_binds(slurm.mount)]
    needed = (_find_directory(path) for _, path in list_bound_paths(config) if path)
    return Container(
        type=slurm.container_type,
        image=image,
        python=getattr(slurm, PYTHONS[role]),
        program=slurm.container_program,
        mounts=add_paths(given, needed),
        args=list(slurm.container_args),
        gpu_option="--rocm" if config.cluster.gpu_kind == "amd" else "--nv",
        local_dir=config.cluster.local_dir
        if slurm.container_type == "apptainer" and image.endswith(".sif")
        else "",
    )


def add_paths(binds: list[str], paths: Iterable[str]) -> list[str]:
    """Add these paths to the binds, each at the same place; paths inside another path are left out."""
    same = {source for source, target in (bind.split(":")[:2] for bind in binds) if source == target}
    wanted = [path for path in dict.fromkeys(paths) if path != "/"]
    outer = [
        path
        for path in wanted
        if not _is_below(path, [other for other in (*same, *wanted) if other != path or other in same])
    ]
    return [*binds, *(f"{path}:{path}" for path in outer)]


def _find_directory(path: str) -> str:
    """Return the directory to bind for a path: the directory of a file, or a whole model in a hub's cache."""
    here = PurePosixPath(path)
    for parent in (here, *here.parents):
        if parent.name.startswith(_HUB_CACHE):
            return str(parent)
    is_file = here.suffix in (".jsonl", ".parquet") and str(here.parent) != "/"
    return str(here.parent if is_file else here)


# -- the start of a unit


@dataclass(frozen=True)
class Command:
    """The command in place of a role's interpreter, and options for its srun, as lines of words."""

    program: list[list[str]]
    srun_options: list[list[str]] = field(default_factory=list)


def make_common_env(unit: Unit, kind: str) -> dict[str, str]:
    """Return the environment variables of a unit's processes, in addition to the supervisor's."""
    return {
        "HPC_RL_STEPS": kind,
        "HPC_RL_NUM_RANKS": str(unit.num_tasks),
        "OMP_NUM_THREADS": str(unit.cpus_per_task),
        **({"HPC_RL_MPI": "1"} if unit.mpi else {}),
        **unit.env,
    }


def check_places(plan: Plan, trial_dir: Path, workdir: Path) -> None:
    """Raise ConfigError if a unit has a container and a directory of the trial can't be bound."""
    for option, what, path in (
        ("cluster.fileroot", ": the directory of the trial", trial_dir),
        ("", "the working directory", workdir),
    ):
        if set(str(path)) & set(SEPARATORS) and any(unit.container for unit in plan.units):
            why = f"{what}, {path}, can't be mounted in a container: it has one of {' '.join(SEPARATORS)}"
            raise ConfigError(Refusal(option=option, kind=Kind.VALUE, why=why))


def make_command(unit: Unit, python: str, trial_dir: Path, workdir: Path) -> Command:
    """Return the command that starts a unit's interpreter: `python` on the node, or the image's."""
    container = unit.container
    if container is None:
        return Command([[python]])
    mounts = _list_mounts(container, trial_dir, workdir)
    if container.type == "pyxis":
        names = sorted({*make_common_env(unit, "srun"), *_PYTHON, "PYTHONPATH"})
        options = [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={workdir}",
            f"--container-env={','.join(names)}",
            "--no-container-entrypoint",
            *container.args,
        ]
        return Command([[container.python]], [[option] for option in options])
    exec_ = [container.program, "exec", *([container.gpu_option] if unit.gpus_per_task else [])]
    binds = [["--bind", mount] for mount in mounts]
    last = [[*container.args, container.image], [container.python]]
    local = [[python, "-m", LOCAL_IMAGE, container.local_dir, container.image]] if container.local_dir else []
    return Command([*local, exec_, *binds, ["--pwd", str(workdir)], *last])


def make_container_env(
    unit: Unit, env: dict[str, str], kind: str, trial_dir: Path, workdir: Path
) -> dict[str, str]:
    """Return the environment of a unit, from the inherited one; `kind` is `srun` or `process`."""
    container = unit.container
    if container is None:
        return env
    env = _restrict_env(env, _list_mounts(container, trial_dir, workdir), unit.env)
    if container.type == "pyxis":
        return env
    names = {*make_common_env(unit, kind), *_PYTHON, "PYTHONPATH"} & env.keys()
    kind = "SINGULARITY" if PurePosixPath(container.program).name == "singularity" else "APPTAINER"
    return env | {f"{kind}ENV_{name}": env[name] for name in sorted(names)} | {f"{kind}_NO_EVAL": "1"}


def _list_mounts(container: Container, trial_dir: Path, workdir: Path) -> list[str]:
    return add_paths(container.mounts, [str(trial_dir), str(workdir)])


def _restrict_env(env: dict[str, str], mounts: list[str], own: dict[str, str]) -> dict[str, str]:
    """Return the environment without paths that the container lacks."""
    targets = [mount.split(":")[1] for mount in mounts]
    # The user's own PYTHONPATH may name directories of the image.
    within = own.get("PYTHONPATH", "").split(":")
    given = filter(None, env.get("PYTHONPATH", "").split(":"))
    path = [entry for entry in given if entry in within or _is_below(entry, targets)]
    found = env | _PYTHON | own | {"PYTHONPATH": ":".join(path)}
    if not _is_below(found.get("TMPDIR", "/tmp"), [*targets, "/tmp"]):
        del found["TMPDIR"]
    return found


def _is_below(path: str, directories: Iterable[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(directory) for directory in directories)
