"""The command line and environment of a unit in its container. Pure: apptainer wraps the program, pyxis is options of srun.

The supervisor stays outside, and starts, stops and ends a role in a container as it does any other:

- the role's standard input is the supervisor's pipe. `apptainer exec` and pyxis (without an entry point) hand it on as it is, so
  a stop is read from it and its end, when the supervisor dies, ends the role;
- `apptainer exec` keeps process ids, process group and host name of the node (config/rules/container_rules.py refuses the options that
  would not), so killing the group, and the pids that the roles put on record, reach the processes inside;
- the exit code is the role's own.

The environment is inherited; nothing of it is in an argument list, where every user of the node could read it. What must hold
whatever the image says travels as APPTAINERENV_<name>, taken literally (APPTAINER_NO_EVAL, from Apptainer 1.1 and
SingularityCE 3.10 on), and for pyxis by name in `--container-env`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from hpc_rl.config.rules.container_rules import SEPARATORS
from hpc_rl.errors import ConfigError
from hpc_rl.plan.containers import with_paths
from hpc_rl.plan.schema import Container, Plan, Unit

# Packages of the home directory belong to the node's Python, not to the image's of the same version.
_PYTHON = {"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Wrapped:
    """What to start in place of a role's own command; `srun_args` go to its srun."""

    argv: list[str]
    env: dict[str, str]
    srun_args: list[str] = field(default_factory=list)


def check_places(plan: Plan, trial_dir: Path, workdir: Path) -> None:
    """Raises ConfigError for a directory that can't be bound, where a unit of the plan has a container."""
    for what, path in (("the directory of the trial", trial_dir), ("the working directory", workdir)):
        if set(str(path)) & set(SEPARATORS) and any(unit.container for unit in plan.units):
            raise ConfigError(
                f"{what}, {path}, can't be bound into a container: it holds one of {' '.join(SEPARATORS)}"
            )


def wrap(
    unit: Unit, argv: list[str], env: dict[str, str], own: Collection[str], trial_dir: Path, workdir: Path
) -> Wrapped:
    """Put a unit's command into its container, if it has one.

    Args:
        unit: The unit.
        argv: Its command; the first word, the interpreter, gives way to the image's.
        env: Environment to start it with.
        own: Names in `env` that hold whatever the image says.
        trial_dir: Directory of the trial, which is bound.
        workdir: Where the command starts; bound too.
    """
    container = unit.container
    if container is None:
        return Wrapped(argv, env)
    mounts = with_paths(container.mounts, [str(trial_dir), str(workdir)])
    env = _environment(env, mounts, unit.env)
    names = sorted({*own, *_PYTHON, "PYTHONPATH", *unit.env} & env.keys())
    command = [container.python, *argv[1:]]
    if container.type == "pyxis":
        return Wrapped(command, env, _pyxis(container, mounts, names, workdir))
    nv = ["--nv"] if unit.gpus_per_task else []
    binds = [word for mount in mounts for word in ("--bind", mount)]
    prefix = [container.program, "exec", *nv, *binds, "--pwd", str(workdir), *container.args, container.image]
    return Wrapped([*prefix, *command], env | _literal(container, {name: env[name] for name in names}))


def _environment(env: dict[str, str], mounts: list[str], own: dict[str, str]) -> dict[str, str]:
    """Without what names places that are not in the container."""
    targets = [mount.split(":")[1] for mount in mounts]
    within = own.get("PYTHONPATH", "").split(":")  # the user's own may be of the image
    path = [
        entry
        for entry in env.get("PYTHONPATH", "").split(":")
        if entry and (entry in within or _below(entry, targets))
    ]
    found = env | _PYTHON | own | {"PYTHONPATH": ":".join(path)}
    if not _below(found.get("TMPDIR", "/tmp"), [*targets, "/tmp"]):
        del found["TMPDIR"]
    return found


def _below(path: str, directories: list[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(directory) for directory in directories)


def _literal(container: Container, values: dict[str, str]) -> dict[str, str]:
    kind = "SINGULARITY" if PurePosixPath(container.program).name == "singularity" else "APPTAINER"
    return {f"{kind}ENV_{name}": value for name, value in values.items()} | {f"{kind}_NO_EVAL": "1"}


def _pyxis(container: Container, mounts: list[str], names: list[str], workdir: Path) -> list[str]:
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={workdir}",
        f"--container-env={','.join(names)}",
        "--no-container-entrypoint",
        *container.args,
    ]
