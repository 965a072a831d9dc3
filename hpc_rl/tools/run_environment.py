"""An environment process: `hpc-rl env serve | process | evaluate`."""

import asyncio
import importlib
import importlib.util
import inspect
import itertools
import json
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser

from hpc_rl.atropos.environment import Environment
from hpc_rl.atropos.inference_servers import InferenceServers, MadeUpServers, find_servers
from hpc_rl.atropos.rollout_api import RolloutApi
from hpc_rl.atropos.serving import Serving, make_groups
from hpc_rl.atropos.settings import APIServerConfig, EnvConfig, EnvironmentSettings
from hpc_rl.core import log
from hpc_rl.core.errors import ConfigError, ExitCode, HpcRlError, UserCodeFailed
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.rollout.user_errors import Raised

logger = logging.getLogger(__name__)

GRACE_S = 5.0
BUILT_IN = {
    "arithmetic": "hpc_rl.examples.environments.arithmetic:Arithmetic",
    "calculator": "hpc_rl.examples.environments.calculator:Calculator",
    "guess_number": "hpc_rl.examples.environments.guess_number:GuessNumber",
}
ACTIONS = {
    "serve": "make groups for a trainer, until it has made its steps",
    "process": "make env.total_steps groups without a trainer, as JSON lines and an HTML page",
    "evaluate": "evaluate the model that the servers have",
}


def make_parser() -> ArgumentParser:
    """Return the parser of the command, for help and for the process itself."""
    parser = ArgumentParser(
        prog="hpc-rl env serve | process | evaluate",
        description="Run an environment: its tasks feed a trainer, or are evaluated.",
        epilog="Options as in atroposlib; --config FILE reads them from a file.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "action", choices=list(ACTIONS), help="; ".join(f"{k}: {v}" for k, v in ACTIONS.items())
    )
    parser.add_argument(
        "environment", help=f"FILE.py, FILE.py:Class, package.module:Class, or {', '.join(BUILT_IN)}"
    )
    file = "YAML file with the sections env, openai, slurm, …"
    parser.add_argument("--config", action=ActionConfigFile, help=file)
    parser.add_argument("--output", default="groups.jsonl", help="process: file for the groups")
    parser.add_argument("--json", action="store_true", help="evaluate: print the metrics as JSON")
    parser.add_argument("--env", type=EnvConfig, default=EnvConfig())
    parser.add_argument("--openai", type=APIServerConfig | list[APIServerConfig], default=APIServerConfig())
    parser.add_argument("--slurm", type=bool, default=True, help="take the servers of the Slurm job's nodes")
    parser.add_argument("--testing", type=bool, default=False, help="make completions up, without a server")
    parser.add_argument("--max_n_completions", type=int, default=8, help="completions in one request")
    return parser


def parse(argv: list[str]) -> Any:
    """Return the settings from a command line and its files. Raises ArgumentError.

    Options override files, wherever `--config` is; a later file overrides an earlier one. An option
    `--openai.NAME` applies to every server of a list.
    """
    files, rest = _split_options(argv, lambda name: name == "--config")
    of_servers, rest = _split_options(rest, lambda name: name.startswith("--openai."))
    parser = make_parser()
    args = parser.parse_args([*files, *rest])
    if of_servers:
        servers = args.openai if isinstance(args.openai, list) else [args.openai]
        args.openai = [_apply_options(server, of_servers) for server in servers]
    return parser.instantiate(args)


def _split_options(argv: list[str], is_wanted: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Return the options with a wanted name, each with its value, and the rest."""
    wanted: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, has_value, _ = word.partition("=")
        if not is_wanted(name):
            rest.append(word)
            continue
        wanted += [word] if has_value else [word, *itertools.islice(words, 1)]
    return wanted, rest


def _apply_options(server: Any, options: list[str]) -> Any:
    """Return a server's settings with these options. Raises ArgumentError."""
    parser = ArgumentParser(prog="hpc-rl env", exit_on_error=False)
    parser.add_argument("--openai", type=APIServerConfig, default=APIServerConfig())
    return parser.parse_args(["--openai", json.dumps(server.as_dict()), *options]).openai


def make_settings(args: Any) -> EnvironmentSettings:
    openai = args.openai if isinstance(args.openai, list) else [args.openai]
    return EnvironmentSettings(
        env=args.env,
        openai=openai,
        slurm=args.slurm,
        testing=args.testing,
        max_n_completions=args.max_n_completions,
    )


def load_environment(path: str) -> type[Environment]:
    """Return the class at a path. Raises ConfigError."""
    place, _, name = (
        BUILT_IN.get(path, path).rpartition(":") if ":" in BUILT_IN.get(path, path) else (path, "", "")
    )
    module = _import_module(place)
    if name:
        found_class = getattr(module, name, None)
        if not (inspect.isclass(found_class) and issubclass(found_class, Environment)):
            raise ConfigError(f"{path}: {name} is not a subclass of hpc_rl.atropos.Environment.")
        return found_class
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Environment) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(cls.__name__ for cls in own) or "none"
        raise ConfigError(
            f"{path} must define one subclass of Environment, or be given as {path}:Class; it has {names}."
        )
    return own[0]


def _import_module(place: str) -> ModuleType:
    """Import a file or a module by name. Raises ConfigError."""
    try:
        if not place.endswith(".py"):
            sys.path.insert(0, "")
            return importlib.import_module(place)
        path = Path(place).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(
            f"environment {place!r} can't be imported: {error}. Give a FILE.py, FILE.py:Class, "
            f"package.module:Class, or one of {', '.join(BUILT_IN)}."
        ) from error


async def serve_environment(args: Any, cls: type[Environment]) -> int:
    """Run one action; return the exit code."""
    settings = make_settings(args)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    tokenizer = Tokenizer(settings.env.tokenizer_name)
    if settings.testing:
        servers: InferenceServers = MadeUpServers(tokenizer.size, settings.env.seed)
    else:
        servers = InferenceServers(find_servers(settings.openai, settings.slurm), settings.max_n_completions)
    async with servers:
        environment = cls(settings.env, servers, tokenizer)
        if args.action == "serve":
            async with RolloutApi(settings.env.rollout_server_url) as api:
                await _serve_until(stopping, Serving(environment, api, stopping).run())
            return ExitCode.STOPPED if stopping.is_set() else ExitCode.DONE
        if args.action == "process":
            written, page = await make_groups(environment, Path(args.output), stopping)
            print(f"{written} groups of {settings.env.group_size}; to read: {page}")
            return ExitCode.DONE if written == settings.env.total_steps else ExitCode.FAILED
        await environment.setup()
        try:
            metrics = await environment.evaluate()
        except HpcRlError:
            raise
        except Exception as error:
            raise UserCodeFailed(f"the evaluation failed: {Raised.from_error(error).text}") from error
        print(json.dumps(metrics) if args.json else "\n".join(f"{k} {v:.4g}" for k, v in metrics.items()))
        return ExitCode.DONE


async def _serve_until(stopping: asyncio.Event, serving: Coroutine[Any, Any, None]) -> None:
    """Serve; after `stopping` is set, wait a few seconds at most: an unreachable API would delay the end."""
    task = asyncio.create_task(serving)
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        done, _ = await asyncio.wait({task}, timeout=GRACE_S if stopping.is_set() else None)
        if done:
            task.result()
    finally:
        for one in (task, waiting):
            one.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    log.configure("environment", "")
    try:
        args = parse(argv)
        return asyncio.run(serve_environment(args, load_environment(args.environment)))
    except ArgumentError as error:
        print(f"hpc-rl env: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except HpcRlError as error:
        print(f"hpc-rl env: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
