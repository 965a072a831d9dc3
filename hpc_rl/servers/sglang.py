"""The SGLang backend: one SGLang server in a subprocess on loopback; requests are forwarded unchanged.

The server gets a new API key in a config file with mode 0600. Reward models are served by /classify. Replicas
that span several nodes are not supported.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import SGLangConfig
from hpc_rl.config.sglang_versions import FLAGS
from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.net import bind
from hpc_rl.core.trial import load_json, write_atomic
from hpc_rl.servers.base import Answer, ReplicaPlace
from hpc_rl.servers.client import open_session
from hpc_rl.servers.server_process import (
    ServerProcess,
    Setting,
    choose_table,
    find_tokenizer,
    make_arguments,
    select_settings,
)
from hpc_rl.servers.wire import make_refusal

logger = logging.getLogger(__name__)

NAME = "SGLang"
RANDOM_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
GENERATES, SCORES = ("/generate", "/v1/chat/completions"), ("/classify",)
_UPDATE_KEYS = ("model_path", "weight_version", "flush_cache")
CPU_MAX_TOTAL_TOKENS = 65536  # without a limit, SGLang takes a share of the host's memory
# options of the section that are not flags: our own, or set elsewhere
NOT_FLAGS = {"version", "extra_args", "model_path"}


def make_settings(
    config: SGLangConfig, device: str, tensor_parallel_size: int, index: int
) -> dict[str, Setting]:
    """Return the settings from the configuration, plus settings for a CPU. None is left to SGLang."""
    own = {name: value for name, value in sorted(vars(config).items()) if name not in NOT_FLAGS}
    settings: dict[str, Setting | None] = {
        **own,
        "host": "127.0.0.1",
        "random_seed": config.random_seed + index,
        "tensor_parallel_size": tensor_parallel_size,
        # defaults of requests must not come from the model's generation config
        "sampling_defaults": "openai",
    }
    if device == "cpu":
        backend = config.sampling_backend or "pytorch"
        settings |= {"device": "cpu", "sampling_backend": backend}
        settings["max_total_tokens"] = config.max_total_tokens or CPU_MAX_TOTAL_TOKENS
    return select_settings(settings)


@dataclass(kw_only=True)
class SGLangBackend:
    """See Backend."""

    process: ServerProcess
    settings: dict[str, Setting]
    secret: Path  # the config file with its API key; SGLang requires the suffix .yaml
    version: str = ""  # the version for which the options were checked
    extra_args: Sequence[str] = ()

    makes_initial_weights: ClassVar[bool] = False

    @classmethod
    def create(cls, config: GRPOConfig, place: ReplicaPlace) -> SGLangBackend:
        env = {"SGLANG_USE_CPU_ENGINE": "1"} if place.device == "cpu" else {}
        settings = make_settings(config.sglang, place.device, max(1, place.num_gpus), place.index)
        return cls(
            process=ServerProcess.create(NAME, config, place, env),
            settings=settings
            | {"tokenizer_path": find_tokenizer(config), "is_embedding": config.actor.is_critic},
            secret=place.secret,
            version=config.sglang.version,
            extra_args=config.sglang.extra_args,
        )

    async def start(self, path: str, version: str) -> None:
        flags, warning = choose_table(FLAGS, NAME, await self.process.version(), self.version)
        if warning:
            logger.warning(warning)
        key = secrets.token_hex(32)
        with bind("127.0.0.1") as sock:  # free now; if SGLang loses the race for the port, it is restarted
            port = sock.getsockname()[1]
        write_atomic(self.secret, json.dumps({"api-key": key}) + "\n", mode=0o600)  # JSON is YAML
        files = {"config_file": str(self.secret), "model_path": path}
        settings = {**files, **self.settings, "port": port, "weight_version": version or "none"}
        argv = ["-m", "sglang.launch_server", *make_arguments(settings, self.extra_args, flags)]
        await self.process.start(argv, f"http://127.0.0.1:{port}", open_session(), key)
        if self.settings.get("is_embedding"):
            await self._zero_bias(Path(path))

    async def _zero_bias(self, model: Path) -> None:
        """Set the bias of a reward model's head to 0: no checkpoint has it, and SGLang leaves it random."""
        content = load_json(model / "config.json")
        if not isinstance(content, dict) or content.get("architectures", [""])[0] not in RANDOM_BIAS:
            return
        with tempfile.TemporaryDirectory(prefix="hpc-rl-") as folder:
            shutil.copy(model / "config.json", folder)
            table = json.dumps(
                {"score.bias": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
            ).encode()
            file = struct.pack("<Q", len(table)) + table + bytes(4)
            Path(folder, "model.safetensors").write_bytes(file)
            status, answer = await self.process.request("/update_weights_from_disk", {"model_path": folder})
        if status != 200:
            raise RoleFailed(f"SGLang did not take the head of the reward model {model}: {answer}")

    def alive(self) -> str:
        return self.process.alive()

    async def stop(self) -> None:
        await self.process.stop()
        self.secret.unlink(missing_ok=True)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        if path in (GENERATES if self.settings.get("is_embedding") else SCORES):  # SGLang would crash
            return 404, make_refusal(f"no such path of this model: {path}")
        if path == "/update_weights_from_disk" and body is not None:
            body = {key: body[key] for key in _UPDATE_KEYS if key in body}
        return await self.process.request(path, body)
