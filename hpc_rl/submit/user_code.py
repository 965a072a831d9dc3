"""User code of a trial: whether it can be imported and called, and its files as they were at a submission.

Files are found as Python would find them in the working directory.
"""

import ast
import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hpc_rl.config.loading.stored import open_variables, secret_variables, to_dict, without_secrets
from hpc_rl.config.sections.experiment import Config, GRPOConfig
from hpc_rl.config.snapshot import is_users, snapshot_files
from hpc_rl.config.tables.changes import JUDGES, measured_by
from hpc_rl.errors import ConfigError

CODE_OF = "code of "
START_S = 60.0  # for the imports of the user's modules


def user_code(
    config: Config, workdir: Path, git_state: Callable[[Path], dict[str, Any] | None]
) -> dict[str, dict[str, Any]]:
    """Return {option: {"file", "sha256", "git"}} of the options that name code of the user's.

    The checksum is that of the file or, where it imports other code of the user's, of all these files. A file
    that is not found here, or can't be read, is left out: the nodes may have it.
    """
    found, git_state = {}, functools.cache(git_state)  # a checkout is asked once
    for name, (file, digest) in _code(config, [str(workdir), *sys.path]).items():
        found[name] = {"file": str(file), "sha256": digest, "git": git_state(checkout_of(file.parent))}
    return found


def checkout_of(folder: Path) -> Path:
    """Return the root of the git checkout that a folder is in, or the folder where it is in none."""
    return next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)


def judged_by(config: Config, path: Sequence[str]) -> dict[str, str]:
    """Return what decides which prompts are rejected, with digests: options, and `code of OPTION`.

    `path` is where Python finds modules.
    """
    code = {f"{CODE_OF}{name}": digest for name, (_, digest) in _code(config, path).items()}
    return measured_by(config, JUDGES) | code


def _code(config: Config, path: Sequence[str]) -> dict[str, tuple[Path, str]]:
    """Return the file and the checksum of the user's code, by the option that names it."""
    if not isinstance(config, GRPOConfig):
        return {}
    rewards, found = config.rollout.reward_functions, {}
    named = {f"rollout.reward_fn {one}" if rewards[1:] else "rollout.reward_fn": one for one in rewards}
    for name, where in (named | {"rollout.workflow": config.rollout.workflow}).items():
        module, colon, _ = where.partition(":")
        file = source_file(module, path) if colon else None
        digests = [hashlib.sha256(data).hexdigest() for data in _own_files(file, path).values()]
        if file is not None and digests:
            both = hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()
            found[name] = (file, both if digests[1:] else digests[0])
    return found


def _own_files(file: Path | None, path: Sequence[str]) -> dict[Path, bytes]:
    """Return the content of a file and of the user's code that it imports, as far as it can be read."""
    found: dict[Path, bytes] = {}
    waiting = [file] if file is not None else []
    while waiting:
        one = waiting.pop()
        try:
            data = one.read_bytes()
        except OSError:
            continue
        found[one] = data
        with contextlib.suppress(SyntaxError, ValueError):
            sources = (source_file(name, places) for name, places in _imports(ast.parse(data), one, path))
            waiting += {one for one in sources if one and one not in found and is_users(one)}
    return found


def _imports(tree: ast.AST, file: Path, path: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the modules that code may import, each with the directories in which it is found."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, path) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            places = [str(file.parents[node.level - 1])] if node.level else path
            modules = [node.module] if node.module else []
            yield from ((name, places) for name in modules)
            yield from ((".".join([*modules, alias.name]), places) for alias in node.names)


def source_file(module: str, path: Sequence[str]) -> Path | None:
    """Return the file of a module, None where it is not found or has none."""
    places: Sequence[str] | None = path
    for depth, _ in enumerate(parts := module.split(".")):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations or []
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None


def code_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options whose code differs between two results of `user_code`, with both sides.

    Code that one side has under another option is not a difference: a reward beside a second one.
    """
    digests = [{name: one.get("sha256") for name, one in side.items()} for side in (a, b)]
    alike = {*digests[0].values()} & {*digests[1].values()}
    found = {name: (a.get(name), b.get(name)) for name in sorted({*a, *b})}
    sides = {name: {side.get(name) for side in digests} for name in found}
    return {
        name: pair
        for name, pair in found.items()
        if len(sides[name]) == 2 and not (None in sides[name] and sides[name] - {None} <= alike)
    }


def own_environment(config: Config, python: str) -> bool:
    """Return whether the job has another environment than this process: what imports there may not here."""
    launcher = config.launcher
    images = (launcher.slurm.trainer_image, launcher.slurm.rollout_image)
    return bool(launcher.modules or launcher.setup or any(images) or python != sys.executable)


def run_apart(
    module: str, config: Config, given: Mapping[str, Any], limit_s: float, workdir: Path
) -> tuple[str, str, int] | None:
    """Run a module of app in a process group of its own, which gets `given` as JSON and the job's variables.

    Returns what it wrote to both outputs, and its exit code; None where it took more than `limit_s`. In both
    cases the group is killed: user code may leave processes behind.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        cwd=workdir,
        env=_environ(config, workdir),
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            said, printed = process.communicate(json.dumps(given), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return said, printed, process.returncode


def check_user_code(config: Config, python: str, workdir: Path) -> list[str]:
    """Import the rewards and the workflow of the user and call each reward once; return notes.

    Nothing is done where the job has another environment than this one: a container, modules, a setup or
    another interpreter. Raises ConfigError for what the job would refuse, with the place in the user's code.
    """
    if not isinstance(config, GRPOConfig) or not _is_own_code(config):
        return []
    if own_environment(config, python):
        return ["rewards and workflow are not tried here: the job has an environment of its own"]
    limit_s = START_S + config.rollout.reward_timeout_s * len(config.rollout.reward_functions)
    done = run_apart("hpc_rl.app.check_user_code", config, to_dict(without_secrets(config)), limit_s, workdir)
    if done is None:
        return [f"rewards and workflow were not tried to their end: they took more than {limit_s:g} s here"]
    said, printed, code = done
    try:
        found = json.loads(said)
    except ValueError:
        last = (printed.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(
            f"rewards and workflow end the process that imports them, with code {code}: {last}"
        ) from None
    if found["refusals"]:
        raise ConfigError("\n".join(found["refusals"]))
    return list(found["notes"])


def _environ(config: Config, workdir: Path) -> dict[str, str]:
    """Return the variables of the job, as far as they matter to what can be imported."""
    environ = {**os.environ, **open_variables(config, "env"), **secret_variables(config, "env")}
    roots = {str(path)[: -len(name)] for name, path in snapshot_files(config, workdir).items()}
    paths = [*sorted(roots - {f"{workdir}/"}), environ.get("PYTHONPATH", "")]
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _is_own_code(config: GRPOConfig) -> bool:
    return any(":" in path for path in (config.rollout.workflow, *config.rollout.reward_functions))
