"""The SGLang backend: one SGLang server as a subprocess on loopback, requests passed on as they are.

Its API key is made here and reaches it by a 0600 config file. Its environment is its own: neither our PYTHONPATH nor our
packages. Left out: replicas over several nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from hpc_rl.config.sections.cluster import environment_of
from hpc_rl.config.sections.experiment import GRPOConfig
from hpc_rl.errors import ConfigError, RoleFailed
from hpc_rl.net import bind
from hpc_rl.servers.base import Answer
from hpc_rl.servers.client import open_session
from hpc_rl.servers.sglang_flags import SGLangLaunch, arguments, settings_of, table_for
from hpc_rl.servers.sglang_process import TiedProcess
from hpc_rl.trial import write_atomic

logger = logging.getLogger(__name__)

_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
_UPDATE_KEYS = ("model_path", "weight_version", "flush_cache")


def launch_of(
    config: GRPOConfig, device: str, num_gpus: int, index: int, tokenizer_path: str
) -> SGLangLaunch:
    """How replica `index` is started on a device, with so many GPUs. Raises ConfigError."""
    python = config.launcher.inference_server_python or sys.executable
    env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    env |= environment_of("launcher.inference_server_env_vars", config.launcher.inference_server_env_vars)
    settings = settings_of(config.sglang, device, max(1, num_gpus), index)
    settings["tokenizer_path"] = str(Path(tokenizer_path).expanduser().absolute())
    own = config.sglang
    return SGLangLaunch(
        python=python, env=env, settings=settings, version=own.version, extra_args=list(own.extra_args)
    )


class SGLangBackend:
    """See Backend.

    Args:
        launch: Interpreter, environment and flags.
        log: File for SGLang's own output.
        secret: File for the config that holds its API key; SGLang wants it to end in .yaml.
        ready_timeout_s: Seconds from the start to the first healthy answer.
    """

    def __init__(self, launch: SGLangLaunch, log: Path, secret: Path, ready_timeout_s: float = 600.0) -> None:
        self._launch, self._log, self._secret, self._ready_timeout_s = launch, log, secret, ready_timeout_s
        self._process: TiedProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._url = ""
        self._headers: dict[str, str] = {}

    async def start(self, path: str, version: str) -> None:
        begin = time.monotonic()
        flags, warning = table_for(await self._installed_version(), self._launch.version)
        if warning:
            logger.warning(warning)
        key, port = secrets.token_urlsafe(32), _free_port()
        write_atomic(self._secret, json.dumps({"api-key": key}) + "\n", mode=0o600)  # JSON is YAML
        settings = {
            "config_file": str(self._secret),
            "model_path": path,
            **self._launch.settings,
            "port": port,
        }
        settings["weight_version"] = version or "none"
        argv = arguments(settings, self._launch.extra_args, flags)
        self._url, self._headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
        self._session = open_session()
        self._process = TiedProcess(self._launch.python, argv, self._launch.env, self._log)
        logger.info("starting SGLang, pid %d: %s", self._process.pid, " ".join(argv))
        await self._ready(begin + self._ready_timeout_s)
        logger.info("SGLang is ready after %.0f s", time.monotonic() - begin)

    async def _installed_version(self) -> str:
        code = "from importlib.metadata import version; print(version('sglang'))"
        try:
            process = await asyncio.create_subprocess_exec(
                self._launch.python,
                "-c",
                code,
                env=self._launch.env,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise ConfigError(
                f"launcher.inference_server_python {self._launch.python!r} can't be started: {error}"
            ) from error
        output, errors = await process.communicate()
        if process.returncode != 0:
            raise ConfigError(
                f"there is no SGLang in {self._launch.python!r} (launcher.inference_server_python): "
                f"{errors.decode(errors='replace').strip().splitlines()[-1:]}"
            )
        return output.decode().strip()

    async def _ready(self, deadline: float) -> None:
        """Until /health answers 200: the first generation has worked then. Raises RoleFailed with the log's last lines."""
        assert self._process is not None and self._session is not None
        timeout = aiohttp.ClientTimeout(total=30)
        while True:
            status = self._process.exit_status()
            if status:
                raise RoleFailed(
                    f"SGLang ended while starting ({status}); the end of {self._log}:\n{self._process.last_lines()}"
                )
            if time.monotonic() > deadline:
                lines = self._process.last_lines()
                raise RoleFailed(
                    f"SGLang was not ready within {self._ready_timeout_s:.0f} s; the end of {self._log}:\n{lines}"
                )
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(
                    f"{self._url}/health", headers=self._headers, timeout=timeout
                ) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.25)

    def alive(self) -> str:
        if self._process is None:
            return ""
        status = self._process.exit_status()
        return f"SGLang: {status}; the end of {self._log}:\n{self._process.last_lines()}" if status else ""

    async def stop(self) -> None:
        if self._session:
            await self._session.close()
        if self._process:
            await self._process.stop()
        self._secret.unlink(missing_ok=True)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        assert self._session is not None
        if path == "/update_weights_from_disk" and body is not None:
            body = {key: body[key] for key in _UPDATE_KEYS if key in body}
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(
                method,
                self._url + path,
                json=body,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),
            ) as response:
                return response.status, _json_or_text(await response.read())
        except aiohttp.ClientError as error:
            return 503, {"error": {"message": f"SGLang does not answer: {type(error).__name__}"}}


def _json_or_text(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else {"status": "ok"}
    except ValueError:
        return {"message": raw.decode(errors="replace")}


def _free_port() -> int:
    """A port that is free now: SGLang can't be handed a bound socket; one that loses the race ends and is started again."""
    with bind("127.0.0.1") as sock:
        return sock.getsockname()[1]
