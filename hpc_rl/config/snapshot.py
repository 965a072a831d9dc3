"""User code that travels with a trial: which files `launcher.snapshot` names, and their names in the copy.

The copy is on Python's path before the working directory, so a path below that keeps its name, and one from
elsewhere becomes a package or module at the top. A part of a package brings all of it: Python takes a package
from one place.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import hpc_rl
from hpc_rl.config.options.experiment import Config
from hpc_rl.core.errors import ConfigError

MAX_BYTES = 64 << 20
MAX_FILES = 1000
NAME = "launcher.snapshot"
NOT_THE_USERS = (Path(sysconfig.get_path("stdlib")), Path(hpc_rl.__file__).parent)


def snapshot_files(config: Config, workdir: Path) -> dict[str, Path]:
    """Return name in the copy -> file. Raises ConfigError for what is missing, too large or named twice."""
    found: dict[str, Path] = {}
    num_bytes = 0
    workdir = Path(os.path.abspath(workdir))
    left_out = Path(os.path.abspath(workdir / config.cluster.fileroot))
    paths = [os.path.abspath(workdir / Path(path).expanduser()) for path in config.launcher.snapshot]
    for given in dict.fromkeys(_whole(Path(path)) for path in paths):
        for path in _files_of(given, left_out):
            base = workdir if path.is_relative_to(workdir) else given.parent
            name = str(path.relative_to(base))
            if found.get(name, path) != path:
                raise ConfigError(f"{NAME}: {found[name]} and {path} would both be {name} in the copy.")
            num_bytes += 0 if name in found else path.stat().st_size
            found[name] = path
            if num_bytes > MAX_BYTES or len(found) > MAX_FILES:
                raise ConfigError(
                    f"{NAME}: {given} makes it more than {MAX_FILES} files or {MAX_BYTES >> 20} MB; name the "
                    "modules and packages that the trial imports, one by one."
                )
    return found


def _whole(path: Path) -> Path:
    """Return the outermost package that a path is part of, or the path."""
    while path.parent != path and (path.parent / "__init__.py").is_file():
        path = path.parent
    return path


def _files_of(given: Path, left_out: Path) -> Iterator[Path]:
    """Yield the files that count: none of hidden folders, caches and trials."""
    if given.is_file():
        yield given
        return
    if not given.is_dir():
        raise ConfigError(f"{NAME}: {given} does not exist; relative paths start at the working directory.")
    for folder, folders, names in os.walk(given):
        here = Path(folder)
        folders[:] = sorted(
            name for name in folders if name != "__pycache__" and name[0] != "." and here / name != left_out
        )
        yield from (here / name for name in sorted(names) if name[0] != "." and (here / name).is_file())


def is_users(file: Path) -> bool:
    """Return whether a file is the user's own: not of Python, an installed package or hpc-rl."""
    if {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    return file.is_absolute() and not any(file.is_relative_to(folder) for folder in NOT_THE_USERS)
