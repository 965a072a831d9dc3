"""User code of a trial: whether it can be imported and called, and its files as they were at a submission.

Files are found as Python would find them in the working directory.
"""

import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hpc_rl.config.algorithm_defaults import list_algorithms
from hpc_rl.config.changes import JUDGES, digest_options
from hpc_rl.config.load.stored import list_open_variables, list_secret_variables, redact_secrets, to_dict
from hpc_rl.config.options.experiment import Config, GRPOConfig, TeacherConfig
from hpc_rl.config.snapshot import is_user_file, list_snapshot_files
from hpc_rl.core.refusal import Kind, Refusal, make_note
from hpc_rl.stats import median_rule

CODE_OF = "code of "
ALGORITHM = ".algorithm"  # end of the names of options
CALLBACKS = "callbacks"
REWARD_PARTS = "teacher.reward_parts"
_CODE = ("rollout.workflow", "rollout.reward_fn", "actor.algorithm", REWARD_PARTS, CALLBACKS)
_KINDS = "rewards, workflow, algorithm and callbacks"
AGENT = "rollout.workflow_args"
START_S = 60.0  # for the import of a user's module
CALLBACK_S = 30.0  # for the call of a callback, in a trial without rewards
# Kinds of lines of tools/check_user_code.py: attempts, the fields of a refusal or note, the end.
IMPORTS, CALLS, FOUND, DONE = "imports", "calls", "found", "done"
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


def user_code(
    config: Config, workdir: Path, git_state: Callable[[Path], dict[str, Any] | None]
) -> dict[str, dict[str, Any]]:
    """Return {option: {"file", "sha256", "git"}} of the options that name code of the user's.

    The checksum covers the file and the user's modules that it imports. A file
    that is not found here, or can't be read, is left out: the nodes may have it.
    """
    found, git_state = {}, functools.cache(git_state)  # a checkout is asked once
    for name, (file, digest) in _code(config, [str(workdir), *sys.path]).items():
        found[name] = {"file": str(file), "sha256": digest, "git": git_state(checkout_of(file.parent))}
    return found


def checkout_of(folder: Path) -> Path:
    """Return the root of the git checkout that a folder is in, or the folder if it is in none."""
    return next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)


def fingerprint_judges(config: Config, path: Sequence[str]) -> dict[str, str]:
    """Return digests of the options and the code that decide which prompts are rejected.

    `path` is where Python finds modules.
    """
    code = {
        f"{CODE_OF}{name}": digest
        for name, (_, digest) in _code(config, path).items()
        if not (name.endswith(ALGORITHM) or name.startswith(CALLBACKS))  # they reject no prompt
    }
    return digest_options(config, JUDGES) | code


def _code(config: Config, path: Sequence[str]) -> dict[str, tuple[Path, str]]:
    """Return the file and the checksum of the user's code, by the option that names it."""
    named = {f"{CALLBACKS} {one}": one for one in config.callbacks}
    found: dict[str, tuple[Path, str]] = {}
    if isinstance(config, GRPOConfig):
        rewards = config.rollout.reward_functions
        named |= {f"rollout.reward_fn {one}" if rewards[1:] else "rollout.reward_fn": one for one in rewards}
        named |= dict([find_workflow_code(config)])
        named |= {option: one.actor.algorithm for option, one in list_algorithms(config)}
        named |= {f"{REWARD_PARTS} {one}": one for one in find_reward_parts(config)}
    for name, where in named.items():
        module, colon, _ = where.partition(":")
        file = source_file(module, path) if colon else None
        digests = [hashlib.sha256(data).hexdigest() for data in _own_files(file, path).values()]
        if file is not None and digests:
            both = hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()
            found[name] = (file, both if digests[1:] else digests[0])
    return found


def find_workflow_code(config: GRPOConfig) -> tuple[str, str]:
    """Return the option that names the workflow, and its import path or name; of an agent its function."""
    rollout = config.rollout
    if rollout.workflow == "agent" and (function := rollout.workflow_args.get("function")):
        return AGENT, str(function)
    return "rollout.workflow", rollout.workflow


def find_reward_parts(config: GRPOConfig) -> list[str]:
    """Return the import paths of the user's own parts of a teacher's reward."""
    parts = config.teacher.reward_parts if isinstance(config, TeacherConfig) else []
    return [part for part in parts if ":" in part]


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
            waiting += {one for one in sources if one and one not in found and is_user_file(one)}
    return found


def _imports(tree: ast.AST, file: Path, path: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the modules that code may import, each with its directories."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, path) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            places = [str(file.parents[node.level - 1])] if node.level else path
            modules = [node.module] if node.module else []
            yield from ((name, places) for name in modules)
            yield from ((".".join([*modules, alias.name]), places) for alias in node.names)


def source_file(module: str, path: Sequence[str]) -> Path | None:
    """Return the file of a module; None without one."""
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
    """Return whether the job has another environment than this process, with other packages."""
    launcher = config.launcher
    images = (launcher.slurm.trainer_image, launcher.slurm.rollout_image)
    return bool(launcher.modules or launcher.setup or any(images) or python != sys.executable)


def execute_apart(
    module: str,
    config: Config,
    given: Mapping[str, Any],
    limit_s: float,
    workdir: Path,
    watch: Callable[[], None] = lambda: None,
) -> tuple[str, str, int | None]:
    """Run a module of tools in a new process group, with `given` as JSON and the job's variables.

    Returns both outputs and the exit code; None if it took more than `limit_s`. The
    outputs are files, not pipes, and the group is killed: user code may leave processes behind. `watch` is
    called about once a second meanwhile.
    """
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=outputs[0],
                stderr=outputs[1],
                cwd=workdir,
                env=_environ(config, workdir),
                start_new_session=True,
            )
        )
        deadline = time.monotonic() + limit_s
        data: bytes | None = json.dumps(given).encode()
        try:
            while (ended := _has_ended(process, data)) is False and time.monotonic() < deadline:
                data = None  # communicate has it
                watch()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for file in outputs:
            file.seek(0)
        said, printed = (file.read().decode(errors="replace") for file in outputs)
    return said, printed, process.returncode if ended else None


def _has_ended(process: subprocess.Popen[bytes], data: bytes | None) -> bool:
    """Wait a second for the end of a process."""
    try:
        process.communicate(data, timeout=1.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def check_user_code(config: Config, python: str, workdir: Path) -> Iterator[Refusal]:
    """Import the user's rewards, workflow, algorithms and callbacks; call all but workflows once.

    Nothing is done where the job has another environment than this one: a container, modules, a setup or
    another interpreter. Yields notes, and what the job would refuse, with the place in the user's code.
    """
    if not _is_own_code(config):
        return
    if own_environment(config, python):
        why = f"{_KINDS} are not tried, because the job has another environment than this machine"
        yield make_note("", why, Kind.MACHINE, related=_CODE)
        return
    num_tries = 1 + len(config.callbacks)
    if isinstance(config, GRPOConfig):
        num_tries += len(config.rollout.reward_functions) + len(find_reward_parts(config))
    limit_s = (START_S + find_call_limit_s(config)) * num_tries
    given = to_dict(redact_secrets(config))
    said, printed, code = execute_apart("hpc_rl.tools.check_user_code", config, given, limit_s, workdir)
    kind, tried = "", ["", _KINDS]  # option and value
    for line in said.splitlines():
        if line.startswith("["):
            kind, content = json.loads(line)
            if kind == FOUND:
                yield Refusal.from_json(content)
            elif kind != DONE:
                tried = content
    if kind != DONE:
        yield _explain_unfinished(config, kind, tried, said, printed, code)


def find_call_limit_s(config: Config) -> float:
    """Return how long a call of a reward or of a callback may take in a check."""
    return config.rollout.reward_timeout_s if isinstance(config, GRPOConfig) else CALLBACK_S


def _explain_unfinished(
    config: Config, kind: str, tried: Sequence[str], said: str, printed: str, code: int | None
) -> Refusal:
    """Return the refusal of an unfinished try, or a note, with its end and its place.

    One over its time limit has left its stack, and exit code 1.
    """
    frames = [(Path(file), line, name) for file, line, name in _FRAME.findall(said)]
    place = next(
        (f" ({file.name}:{line}, in {name})" for file, line, name in frames if is_user_file(file)), ""
    )
    option, value = tried
    refuse = partial(Refusal, option=option, value=value, kind=Kind.FILE)
    if code is not None and not (code == 1 and frames):
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        last = (printed.strip().splitlines() or ["it printed nothing"])[-1]
        return refuse(why=f"ends the process{place}, {how}: {last}")
    if kind == CALLS and option == CALLBACKS:
        why = f"takes more than {find_call_limit_s(config):g} s{place}: training waits for each callback"
        return refuse(why=why)
    if kind == CALLS:
        assert isinstance(config, GRPOConfig), "only its rewards are called"
        limit = f"{config.rollout.reward_timeout_s:g} s (rollout.reward_timeout_s)"
        why = f"takes more than {limit}{place}: the job would reject each such prompt"
        return refuse(why=why, related=("rollout.reward_timeout_s",))
    why = f"was not checked completely, because it took more than {START_S:g} s{place}"
    return refuse(why=why, is_note=True)


def _environ(config: Config, workdir: Path) -> dict[str, str]:
    """Return the variables of the job that affect imports."""
    environ = {**os.environ, **list_open_variables(config, "env"), **list_secret_variables(config, "env")}
    roots = {str(path)[: -len(name)] for name, path in list_snapshot_files(config, workdir).items()}
    paths = [*sorted(roots - {f"{workdir}/"}), environ.get("PYTHONPATH", "")]
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _is_own_code(config: Config) -> bool:
    has_callbacks = any(path != median_rule.PATH for path in config.callbacks)
    if has_callbacks or not isinstance(config, GRPOConfig):
        return has_callbacks
    rollout = config.rollout
    workflow = find_workflow_code(config)[1]
    algorithms = (one.actor.algorithm for _, one in list_algorithms(config))
    paths = (workflow, *algorithms, *rollout.reward_functions, *find_reward_parts(config))
    return any(":" in path for path in paths)
