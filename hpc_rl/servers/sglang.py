"""The SGLang backend: one SGLang server as a subprocess on loopback, requests passed on as they are.

Its flags follow from the table of its version (config/tables/sglang_versions.py). Its API key is made here
and reaches it by a 0600 config file. Its environment is its own: neither our PYTHONPATH nor our packages. Not
served: replicas over several nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from hpc_rl.config.sections.cluster import environment_of
from hpc_rl.config.sections.experiment import GRPOConfig
from hpc_rl.config.sections.inference import SGLangConfig
from hpc_rl.config.tables.sglang_versions import DROPPED, FLAGS, Flags
from hpc_rl.errors import ConfigError, RoleFailed
from hpc_rl.net import bind
from hpc_rl.servers.base import Answer, ReplicaPlace
from hpc_rl.servers.client import open_session
from hpc_rl.trial import write_atomic

logger = logging.getLogger(__name__)

_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
_UPDATE_KEYS = ("model_path", "weight_version", "flush_cache")


Setting = str | int | float | bool | list[int]

CPU_MAX_TOTAL_TOKENS = 65536  # without a bound SGLang takes a share of the host's memory


# options of the section that are no flags: ours, set elsewhere, refused at other values, or dropped by every
# version we know
NOT_FLAGS = {
    "version",
    "extra_args",
    "model_path",
    "dp_size",
    "enable_dp_attention",
    *(n for gone in DROPPED.values() for n in gone),
}


@dataclass(frozen=True, kw_only=True)
class SGLangLaunch:
    """What one replica is started with, before model and ports are known; `version` is the configured one."""

    python: str
    env: dict[str, str]
    settings: dict[str, Setting]
    version: str = ""
    extra_args: list[str] = field(default_factory=list)


def table_for(version: str, configured: str = "") -> tuple[Flags, str]:
    """Return the flags of an installed version; warn where it is unknown or not the configured one."""
    if version in FLAGS:
        other = f"SGLang is {version}, but sglang.version, by which the options were checked, is {configured}"
        return FLAGS[version], other if configured and version != configured else ""
    newest = max(FLAGS, key=_numbers)
    return FLAGS[
        newest
    ], f"SGLang {version} is not in the flag table (known: {', '.join(FLAGS)}): taking the flags of {newest}"


def settings_of(
    config: SGLangConfig, device: str, tensor_parallel_size: int, index: int
) -> dict[str, Setting]:
    """Return what the configuration says, and what a CPU needs additionally.

    Values that are None are left to SGLang.
    """
    own = {field.name for field in dataclasses.fields(config)} - NOT_FLAGS
    settings: dict[str, Setting | None] = {name: getattr(config, name) for name in sorted(own)}
    settings |= {
        "host": "127.0.0.1",
        "random_seed": config.random_seed + index,
        "tensor_parallel_size": tensor_parallel_size,
        # what a request does not say must not come from the model's generation config
        "sampling_defaults": "openai",
    }
    if device == "cpu":
        backend = config.sampling_backend or "pytorch"
        settings |= {"device": "cpu", "sampling_backend": backend, "disable_overlap_schedule": True}
        settings["max_total_tokens"] = config.max_total_tokens or CPU_MAX_TOTAL_TOKENS
    return {
        name: value
        for name, value in settings.items()
        if value is not None and value is not False and value != ""
    }


def arguments(settings: dict[str, Setting], extra_args: list[str], flags: Flags) -> list[str]:
    """argv behind the interpreter."""
    argv = ["-m", "sglang.launch_server"]
    for name, value in settings.items():
        flag = flags[name]
        if value is True:
            argv += [flag] if isinstance(flag, str) else flag
        elif value is not False:
            assert isinstance(flag, str)
            argv += [flag, *map(str, value if isinstance(value, list) else [value])]
    return [*argv, *extra_args]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def launch_of(
    config: GRPOConfig, device: str, num_gpus: int, index: int, tokenizer_path: str
) -> SGLangLaunch:
    """Return how replica `index` is started on a device with `num_gpus` GPUs. Raises ConfigError."""
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

    @classmethod
    def create(cls, config: GRPOConfig, place: ReplicaPlace) -> SGLangBackend:
        tokenizer = config.tokenizer_path or config.actor.path
        launch = launch_of(config, place.device, place.num_gpus, place.index, tokenizer)
        return cls(launch, place.log, place.secret, config.rollout.setup_timeout)

    async def start(self, path: str, version: str) -> None:
        begin = time.monotonic()
        flags, warning = table_for(await self._installed_version(), self._launch.version)
        if warning:
            logger.warning(warning)
        key, port = secrets.token_hex(32), _free_port()
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
        """Until /health answers 200: the first generation has worked then.

        Raises RoleFailed with the log's last lines.
        """
        assert self._process is not None and self._session is not None
        timeout = aiohttp.ClientTimeout(total=30)
        while True:
            status = self._process.exit_status()
            if status:
                raise RoleFailed(
                    f"SGLang ended while starting ({status}); "
                    f"the end of {self._log}:\n{self._process.last_lines()}"
                )
            if time.monotonic() > deadline:
                lines = self._process.last_lines()
                raise RoleFailed(
                    f"SGLang was not ready within {self._ready_timeout_s:.0f} s; "
                    f"the end of {self._log}:\n{lines}"
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
    """Return a port that is free now; a SGLang that loses the race for it is restarted."""
    with bind("127.0.0.1") as sock:
        return sock.getsockname()[1]


_TIE = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)\n"  # PR_SET_PDEATHSIG, SIGKILL; exec keeps it
    "if os.getppid() != int(sys.argv[1]): sys.exit('the parent has gone')\n"  # it died before the tie was set
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)


class TiedProcess:
    """`python arguments…`, which gets SIGKILL when this process dies.

    Raises OSError where it can't be started.

    Start it from the main thread: the tie is to the thread that starts it.
    """

    def __init__(self, python: str, arguments: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            self._process = subprocess.Popen(
                [python, "-c", _TIE, str(os.getpid()), *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> str:
        """Empty while it runs, else how it ended."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def last_lines(self, count: int = 20) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as opened:
            opened.seek(max(0, self.log.stat().st_size - 32768))
            return "\n".join(opened.read().decode(errors="replace").splitlines()[-count:])
        return ""

    async def stop(self, grace_s: float = 15.0) -> None:
        """TERM to the process, then KILL to its session."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    while self._process.poll() is None:
                        await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
