"""The SGLang backend: one SGLang server as a subprocess on loopback, requests passed on as they are.

Its flags follow from the table of its version (config/tables/sglang_versions.py). Its API key is made here
and reaches it by a 0600 config file. Its environment is its own: neither our PYTHONPATH nor our packages. Not
served: replicas over several nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from hpc_rl.config.sections.cluster import environment_of
from hpc_rl.config.sections.experiment import GRPOConfig
from hpc_rl.config.sections.inference import SGLangConfig
from hpc_rl.config.tables.sglang_versions import DROPPED, FLAGS, Flags
from hpc_rl.errors import ConfigError, RoleFailed
from hpc_rl.files import last_lines
from hpc_rl.net import bind
from hpc_rl.servers.base import Answer, ReplicaPlace
from hpc_rl.servers.client import open_session
from hpc_rl.trial import write_atomic

logger = logging.getLogger(__name__)

Setting = str | int | float | bool | list[int]

_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
_UPDATE_KEYS = ("model_path", "weight_version", "flush_cache")
CPU_MAX_TOTAL_TOKENS = 65536  # without a bound SGLang takes a share of the host's memory
NO_LIMIT = aiohttp.ClientTimeout(total=None)
LAST_LINES = 20  # of its log, in a failure
# options of the section that are no flags: ours, set elsewhere, refused at other values, or dropped by every
# version we know
NOT_FLAGS = {"version", "extra_args", "model_path", "dp_size", "enable_dp_attention"}
NOT_FLAGS |= {name for gone in DROPPED.values() for name in gone}


def table_for(version: str, configured: str = "") -> tuple[Flags, str]:
    """Return the flags of an installed version; warn where it is unknown or not the configured one."""
    if version in FLAGS:
        other = f"SGLang is {version}, but sglang.version, by which the options were checked, is {configured}"
        return FLAGS[version], other if configured and version != configured else ""
    newest = max(FLAGS, key=lambda known: [int(part) for part in known.split(".") if part.isdigit()])
    known = ", ".join(FLAGS)
    return FLAGS[newest], f"SGLang {version} is not in the flag table ({known}): taking the flags of {newest}"


def settings_of(
    config: SGLangConfig, device: str, tensor_parallel_size: int, index: int
) -> dict[str, Setting]:
    """Return what the configuration says, and what a CPU needs additionally; None is left to SGLang."""
    own = {name: value for name, value in sorted(vars(config).items()) if name not in NOT_FLAGS}
    settings: dict[str, Setting | None] = {
        **own,
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
    return {name: value for name, value in settings.items() if value not in (None, "") and value is not False}


def arguments(settings: Mapping[str, Setting], extra_args: Sequence[str], flags: Flags) -> list[str]:
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


@dataclass(kw_only=True)
class SGLangBackend:
    """See Backend."""

    python: str
    env: dict[str, str]
    settings: dict[str, Setting]
    log: Path  # of SGLang's own output
    secret: Path  # the config file with its API key; SGLang wants it to end in .yaml
    version: str = ""  # by which the options were checked
    extra_args: Sequence[str] = ()
    ready_timeout_s: float = 600.0  # from the start to the first healthy answer

    makes_initial_weights: ClassVar[bool] = False
    _process: TiedProcess | None = None
    _session: aiohttp.ClientSession | None = None
    _url: str = ""
    _headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def create(cls, config: GRPOConfig, place: ReplicaPlace) -> SGLangBackend:
        env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if place.device == "cpu":
            env["SGLANG_USE_CPU_ENGINE"] = "1"
        env |= environment_of("launcher.inference_server_env_vars", config.launcher.inference_server_env_vars)
        settings = settings_of(config.sglang, place.device, max(1, place.num_gpus), place.index)
        tokenizer = Path(config.tokenizer_path or config.actor.path)
        settings["tokenizer_path"] = str(tokenizer.expanduser().absolute())
        return cls(
            python=config.launcher.inference_server_python or sys.executable,
            env=env,
            settings=settings,
            log=place.log,
            secret=place.secret,
            version=config.sglang.version,
            extra_args=config.sglang.extra_args,
            ready_timeout_s=config.rollout.setup_timeout,
        )

    async def start(self, path: str, version: str) -> None:
        begin = time.monotonic()
        flags, warning = table_for(await self._installed_version(), self.version)
        if warning:
            logger.warning(warning)
        key = secrets.token_hex(32)
        with bind("127.0.0.1") as sock:  # free now; a SGLang that loses the race for it is restarted
            port = sock.getsockname()[1]
        write_atomic(self.secret, json.dumps({"api-key": key}) + "\n", mode=0o600)  # JSON is YAML
        files = {"config_file": str(self.secret), "model_path": path}
        settings = {**files, **self.settings, "port": port, "weight_version": version or "none"}
        argv = arguments(settings, self.extra_args, flags)
        self._url, self._headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
        self._session = open_session()
        self._process = TiedProcess(self.python, argv, self.env, self.log)
        logger.info("starting SGLang, pid %d: %s", self._process.pid, " ".join(argv))
        await self._ready(begin + self.ready_timeout_s)
        logger.info("SGLang is ready after %.0f s", time.monotonic() - begin)

    async def _installed_version(self) -> str:
        code = "from importlib.metadata import version; print(version('sglang'))"
        try:
            process = await asyncio.create_subprocess_exec(
                *(self.python, "-c", code), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            problem = f"launcher.inference_server_python {self.python!r} can't be started: {error}"
            raise ConfigError(problem) from error
        output, errors = await process.communicate()
        if process.returncode != 0:
            raise ConfigError(
                f"there is no SGLang in {self.python!r} (launcher.inference_server_python): "
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
            problem = self.alive()
            if not problem and time.monotonic() > deadline:
                problem = f"SGLang was not ready within {self.ready_timeout_s:.0f} s; {self._said()}"
            if problem:
                raise RoleFailed(problem)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(
                    f"{self._url}/health", headers=self._headers, timeout=timeout
                ) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.25)

    def alive(self) -> str:
        status = self._process.exit_status() if self._process else ""
        return f"SGLang ended ({status}); {self._said()}" if status else ""

    def _said(self) -> str:
        return "\n".join([f"the end of {self.log}:", *last_lines(self.log, LAST_LINES)])

    async def stop(self) -> None:
        if self._session:
            await self._session.close()
        if self._process:
            await self._process.stop()
        self.secret.unlink(missing_ok=True)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        assert self._session is not None
        if path == "/update_weights_from_disk" and body is not None:
            body = {key: body[key] for key in _UPDATE_KEYS if key in body}
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(
                method, self._url + path, json=body, headers=self._headers, timeout=NO_LIMIT
            ) as response:
                return response.status, _json_or_text(await response.read())
        except aiohttp.ClientError as error:
            return 503, {"error": {"message": f"SGLang does not answer: {type(error).__name__}"}}


def _json_or_text(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else {"status": "ok"}
    except ValueError:
        return {"message": raw.decode(errors="replace")}


_TIE = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)\n"  # PR_SET_PDEATHSIG, SIGKILL; exec keeps it
    "if os.getppid() != int(sys.argv[1]): sys.exit('the parent has gone')\n"  # it died before the tie was set
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)


class TiedProcess(subprocess.Popen[bytes]):
    """`python arguments…`, killed when the thread that starts it dies: start it from the main thread.

    Raises OSError where it can't be started.
    """

    def __init__(self, python: str, arguments: list[str], env: dict[str, str], log: Path) -> None:
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            super().__init__(
                [python, "-c", _TIE, str(os.getpid()), *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_status(self) -> str:
        """Empty while it runs, else how it ended."""
        code = self.poll()
        if code is None:
            return ""
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    async def stop(self, grace_s: float = 15.0) -> None:
        """TERM to the process, then KILL to its session."""
        if self.poll() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.wait, grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
