"""ServerProcess: a generation server of another project (SGLang, vLLM) in a subprocess, used over HTTP.

It does not inherit our PYTHONPATH or packages. Its flags come from the table for its version (config).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from hpc_rl.config.flags import Flags
from hpc_rl.config.load.stored import list_open_variables
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.core.errors import ConfigError, RoleFailed
from hpc_rl.core.files import load_last_lines
from hpc_rl.core.net import find_interface
from hpc_rl.core.proc import TiedProcess
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.servers.base import Answer, ReplicaPlace
from hpc_rl.servers.wire import split_lines

logger = logging.getLogger(__name__)

Setting = str | int | float | bool | list[int] | list[str]

_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
NO_LIMIT = aiohttp.ClientTimeout(total=None)
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=30)
LAST_LINES = 20  # of its log, in error messages
_PYTHON = "launcher.inference_server_python"
END_GRACE_S = 15.0
MEMBER_GRACE_S = 1.0


def choose_table(tables: Mapping[str, Flags], name: str, version: str, configured: str) -> tuple[Flags, str]:
    """Return the flags of an installed version, and a warning if it is unknown or not the configured one."""
    version = version.partition("+")[0]  # without a build tag such as +cpu
    if version in tables:
        option = f"{name.lower()}.version"
        other = f"{name} is {version}, but {option} is {configured}, so the options were checked for that"
        return tables[version], other if configured and version != configured else ""
    newest = max(tables, key=lambda known: [int(part) for part in known.split(".") if part.isdigit()])
    known = ", ".join(tables)
    return tables[
        newest
    ], f"hpc-rl does not know {name} {version} (known: {known}), so it uses the command line of {newest}"


def select_settings(settings: Mapping[str, Setting | None]) -> dict[str, Setting]:
    """Return the settings that become flags. Null, empty and false settings are left to the server."""
    return {name: value for name, value in settings.items() if value not in (None, "") and value is not False}


def make_arguments(settings: Mapping[str, Setting], extra_args: Sequence[str], flags: Flags) -> list[str]:
    """Return the arguments of a command line."""
    argv: list[str] = []
    for name, value in settings.items():
        flag = flags[name]
        if value is True:
            argv += [flag] if isinstance(flag, str) else flag
        elif value is not False:
            assert isinstance(flag, str)
            argv += [flag, *map(str, value if isinstance(value, list) else [value])]
    return [*argv, *extra_args]


def list_interface_variables(address: str) -> dict[str, str]:
    """Return the variables that make NCCL and gloo use the interface with this address."""
    interface = find_interface(address)
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface} if interface else {}


def find_tokenizer(config: GRPOConfig) -> str:
    return str(Path(config.tokenizer_path or config.actor.path).expanduser().absolute())


@dataclass(kw_only=True)
class ServerProcess:
    """One server process. `name` is the server's name; in lower case it is the name of its package."""

    name: str
    python: str
    env: dict[str, str]
    log: Path  # of the server's output
    ready_timeout_s: float = 600.0  # from the start to the first healthy answer
    end_grace_s: float = END_GRACE_S  # before it is killed

    _process: TiedProcess | None = None
    _session: aiohttp.ClientSession | None = None
    _url: str = ""
    _headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def create(cls, name: str, config: GRPOConfig, place: ReplicaPlace, env: dict[str, str]) -> ServerProcess:
        own = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        own |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **env}
        own |= list_open_variables(config, "inference_server_env_vars")
        return cls(
            name=name,
            python=config.launcher.inference_server_python or sys.executable,
            env=own,
            log=place.log,
            ready_timeout_s=config.rollout.setup_timeout,
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def version(self) -> str:
        """Return the installed version of the package. Raises ConfigError if it is not installed."""
        code = f"from importlib.metadata import version; print(version({self.name.lower()!r}))"
        try:
            process = await asyncio.create_subprocess_exec(
                *(self.python, "-c", code), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            why = f"can't be started: {error}"
            raise ConfigError(
                Refusal(option=_PYTHON, value=repr(self.python), kind=Kind.MACHINE, why=why)
            ) from error
        output, errors = await process.communicate()
        if process.returncode != 0:
            *_, last = ["no output", *errors.decode(errors="replace").strip().splitlines()]
            why = f"can't tell the version of {self.name} that it has: {last}"
            use = f"name a Python in which {self.name} is installed"
            raise ConfigError(
                Refusal(option=_PYTHON, value=repr(self.python), kind=Kind.MACHINE, why=why, use=use)
            )
        return output.decode().strip()

    async def start(self, argv: list[str], url: str, session: aiohttp.ClientSession, key: str = "") -> None:
        """Start the server; return when /health answers 200. Raises RoleFailed with the log's last lines."""
        begin = time.monotonic()
        self._url, self._session = url, session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.launch(argv)
        while True:
            problem = self.alive()
            if not problem and time.monotonic() - begin > self.ready_timeout_s:
                problem = (
                    f"{self.name} was not ready within {self.ready_timeout_s:.0f} s (rollout.setup_timeout); "
                    f"{self._describe_log()}"
                )
            if problem:
                raise RoleFailed(problem)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if (await self._ask("GET", "/health", None, HEALTH_TIMEOUT))[0] == 200:
                    break
            await asyncio.sleep(0.25)
        logger.info("%s is ready after %.0f s", self.name, time.monotonic() - begin)

    def launch_member(self, argv: Sequence[str]) -> None:
        """Start a program that ends with another one elsewhere: it does not obey TERM."""
        self.end_grace_s = MEMBER_GRACE_S
        self.launch(argv)

    def launch(self, argv: Sequence[str]) -> None:
        """Start the process, and do not wait until it serves."""
        with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            self._process = TiedProcess([self.python, *argv], self.env, output)
        logger.info("%s starts as process %d: %s", self.name, self.pid, " ".join(argv))

    def alive(self) -> str:
        """Return why the server ended; "" while it runs."""
        status = self._process.exit_status() if self._process else ""
        return f"{self.name} ended ({status}); {self._describe_log()}" if status else ""

    def _describe_log(self) -> str:
        return "\n".join([f"the end of {self.log}:", *load_last_lines(self.log, LAST_LINES)])

    async def stop(self) -> None:
        if self._session:
            await self._session.close()
        if self._process:
            await asyncio.to_thread(self._process.end, self.end_grace_s)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        """POST `body` to `path`, or GET `path` if `body` is None. Returns 503 without an answer."""
        try:
            return await self._ask("GET" if body is None else "POST", path, body, NO_LIMIT)
        except aiohttp.ClientError as error:
            return 503, {"error": {"message": f"{self.name} does not answer: {type(error).__name__}"}}

    async def stream(self, path: str, body: dict[str, Any], take: Callable[[dict[str, Any]], None]) -> Answer:
        """POST `body` to `path`, and call `take` with each event of the answer.

        Returns 200 after the last event, or an error's status and body.
        """
        assert self._session is not None
        try:
            async with self._session.post(
                self._url + path, json=body, headers=self._headers, timeout=NO_LIMIT
            ) as response:
                if response.content_type != "text/event-stream":
                    return response.status, _parse_json_or_text(await response.read())
                async for line in split_lines(response.content.iter_any()):
                    if line.startswith(b"data: [DONE]"):
                        return 200, None
                    if line.startswith(b"data: "):
                        event = json.loads(line.removeprefix(b"data: "))
                        if "error" in event:
                            return _find_code(event["error"]), event
                        take(event)
        except aiohttp.ClientError as error:
            return 503, {"error": {"message": f"{self.name} does not answer: {type(error).__name__}"}}
        return 503, {"error": {"message": f"{self.name} broke off its answer before the end"}}

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: aiohttp.ClientTimeout
    ) -> Answer:
        assert self._session is not None
        async with self._session.request(
            method, self._url + path, json=body, headers=self._headers, timeout=timeout
        ) as response:
            return response.status, _parse_json_or_text(await response.read())


def _find_code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _parse_json_or_text(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else {"status": "ok"}
    except ValueError:
        return {"message": raw.decode(errors="replace")}
