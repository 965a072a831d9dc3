"""The container of a role: its image, the interpreter in it, and the paths that are bound. Pure."""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal

from hpc_rl.config.rules.container_rules import PYTHONS, Role, binds_of, bound_paths, image_of
from hpc_rl.config.sections.experiment import Config
from hpc_rl.plan.schema import Container

_HUB_CACHE = ("models--", "datasets--")


def container_of(config: Config, role: Role | Literal["environment"]) -> Container | None:
    """Return the container of a role, or None where it runs on the node itself."""
    slurm = config.launcher.slurm
    if role == "environment":  # its command names its container, if it has one
        return None
    image = image_of(slurm, role)
    if not image or slurm.container_type == "none":
        return None
    given = [bind if ":" in bind else f"{bind}:{bind}" for bind in binds_of(slurm.mount)]
    needed = (_directory(path) for _, path in bound_paths(config) if path)
    return Container(
        type=slurm.container_type,
        image=image,
        python=getattr(slurm, PYTHONS[role]),
        program=slurm.container_program,
        mounts=with_paths(given, needed),
        args=list(slurm.container_args),
    )


def with_paths(binds: list[str], paths: Iterable[str]) -> list[str]:
    """Return the binds and these paths, each at its own place; paths inside another one are left out."""
    same = {source for source, target in (bind.split(":")[:2] for bind in binds) if source == target}
    wanted = [path for path in dict.fromkeys(paths) if path != "/"]
    outer = [
        path
        for path in wanted
        if not any(_inside(path, other) for other in (*same, *wanted) if other != path or other in same)
    ]
    return [*binds, *(f"{path}:{path}" for path in outer)]


def _inside(path: str, directory: str) -> bool:
    return PurePosixPath(path).is_relative_to(directory)


def _directory(path: str) -> str:
    """Return what to bind for a path: the directory of a file, or the whole model in a hub's cache."""
    here = PurePosixPath(path)
    for parent in (here, *here.parents):
        if parent.name.startswith(_HUB_CACHE):
            return str(parent)
    is_file = here.suffix in (".jsonl", ".parquet") and str(here.parent) != "/"
    return str(here.parent if is_file else here)
