"""Backend: what generates behind the proxy: embedded/ (in this process), sglang.py or vllm.py (a subprocess).

A new one is a module with such a class and a row in allocation.SERVER_BACKENDS.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc_rl.config.options.experiment import GRPOConfig

Answer = tuple[int, Any]  # HTTP status and JSON body


@dataclass(frozen=True)
class ReplicaPlace:
    """Where one replica runs."""

    index: int
    device: str  # cpu | cuda
    num_gpus: int
    log: Path  # for the output of a subprocess
    secret: Path  # for the configuration that holds the API key of a subprocess


class Backend(Protocol):
    """Requests are those of SGLang's native API; see proxy.py for the paths that arrive here."""

    makes_initial_weights: bool  # where `actor.init_from_scratch` is set; else it waits for the first publish

    @classmethod
    def create(cls, config: GRPOConfig, place: ReplicaPlace) -> Backend:
        """Return the backend of a replica, not started."""

    async def start(self, path: str, version: str) -> None:
        """Load the checkpoint at `path` and be ready to generate. Raises ConfigError, RoleFailed, OSError."""

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        """POST `body` to `path`, or GET it where body is None.

        Never raises for what a client did wrong: that is a status.
        """

    def alive(self) -> str:
        """Empty while it lives, else why it does not."""

    async def stop(self) -> None:
        """End it; what is in flight is lost."""
