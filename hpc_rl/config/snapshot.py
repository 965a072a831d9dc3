"""List the files of user code that `launcher.snapshot` copies into a trial, with their names in the copy.

The copy comes before the working directory on Python's path. A path below the working directory keeps its
name; any other becomes a package or module at the top. A part of a package brings the whole package, because
Python imports a package from one place.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import hpc_rl
from hpc_rl.config.options.experiment import Config
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

MAX_BYTES = 64 << 20
MAX_FILES = 1000
NAME = "launcher.snapshot"
NOT_THE_USERS = (Path(sysconfig.get_path("stdlib")), Path(hpc_rl.__file__).parent)


def list_snapshot_files(config: Config, workdir: Path) -> dict[str, Path]:
    """Return name in the copy -> file. Raises ConfigError for missing, too many or colliding files."""
    found: dict[str, Path] = {}
    num_bytes = 0
    workdir = Path(os.path.abspath(workdir))
    left_out = Path(os.path.abspath(workdir / config.cluster.fileroot))
    paths = [os.path.abspath(workdir / Path(path).expanduser()) for path in config.launcher.snapshot]
    for given in dict.fromkeys(_find_outermost_package(Path(path)) for path in paths):
        for path in _list_files(given, left_out):
            base = workdir if path.is_relative_to(workdir) else given.parent
            name = str(path.relative_to(base))
            if found.get(name, path) != path:
                raise _refuse(
                    f": {found[name]} and {path} would both be copied to {name}; leave one out", Kind.CONFLICT
                )
            num_bytes += 0 if name in found else path.stat().st_size
            found[name] = path
            if num_bytes > MAX_BYTES or len(found) > MAX_FILES:
                why = f": with {given} the copy has more than {MAX_FILES} files or {MAX_BYTES >> 20} MB"
                use = "name the modules and packages that the trial imports, one by one"
                raise _refuse(why, use=use)
    return found


def _refuse(why: str, kind: Kind = Kind.FILE, use: str = "") -> ConfigError:
    return ConfigError(Refusal(option=NAME, kind=kind, why=why, use=use))


def _find_outermost_package(path: Path) -> Path:
    """Return the outermost package around a path, or the path itself."""
    while path.parent != path and (path.parent / "__init__.py").is_file():
        path = path.parent
    return path


def _list_files(given: Path, left_out: Path) -> Iterator[Path]:
    """Yield the files to copy; hidden files, caches and trials are skipped."""
    if given.is_file():
        yield given
        return
    if not given.is_dir():
        raise _refuse(f": {given} does not exist", use="relative paths start at the working directory")
    for folder, folders, names in os.walk(given):
        here = Path(folder)
        folders[:] = sorted(
            name for name in folders if name != "__pycache__" and name[0] != "." and here / name != left_out
        )
        yield from (here / name for name in sorted(names) if name[0] != "." and (here / name).is_file())


def is_user_file(file: Path) -> bool:
    """Return whether a file is the user's own: not part of Python, an installed package or hpc-rl."""
    if {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    return file.is_absolute() and not any(file.is_relative_to(folder) for folder in NOT_THE_USERS)
