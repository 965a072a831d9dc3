"""The Backend protocol: the generator behind the proxy.

Backends are embedded/ (in this process), sglang.py and vllm.py (a subprocess); servers/__init__.py has a row
for each of them in `BACKENDS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.core.net import LOOPBACK
from hpc_rl.servers.wire import SendParts

Answer = tuple[int, Any]  # HTTP status and JSON body


@dataclass(frozen=True)
class ReplicaPlace:
    """The place of one replica, or of its part on one node: its index, device and files."""

    index: int
    device: str  # cpu | cuda
    num_gpus: int  # of the replica, on all its nodes; on a CPU, the number of its ranks
    log: Path  # output of a subprocess
    secret: Path  # configuration file with the API key of a subprocess
    address: str = LOOPBACK  # of this host, for the trial's processes
    shares_gpus: bool = False  # with the trainer: the backend must be able to release its memory
    num_nodes: int = 1  # of the replica
    node_rank: int = 0  # of this node among them
    # Address and port of the process group of a replica that spans nodes: its first node listens there.
    rendezvous: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Receiver:
    """How a server receives weights over a process group."""

    backend: str  # gloo | nccl
    num_ranks: int = 1


class Backend(Protocol):
    """Serves requests of SGLang's native API; proxy.py lists the paths."""

    # with `actor.init_from_scratch`: make random weights, instead of waiting for the first publish
    makes_initial_weights: bool
    receiver: Receiver | None  # None: it loads weights from files only

    @classmethod
    def create(cls, config: GRPOConfig, place: ReplicaPlace) -> Backend:
        """Create the backend of a replica, without starting it."""

    async def start(self, path: str, version: str) -> None:
        """Load the checkpoint at `path` and be ready to generate. Raises ConfigError, RoleFailed, OSError."""

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        """POST `body` to `path`, or GET `path` if `body` is None.

        Client errors are returned as a status, never raised.
        """

    async def generate(self, body: dict[str, Any], send: SendParts) -> Answer:
        """Generate as /generate does; every PART_S, call `send` with the new tokens of its samples.

        The answer at the end is a list with a Part of each sample, the tokens that were not sent.
        """

    async def prepare_changes(self, folder: Path) -> None:
        """Get ready for the published version in a directory, while requests run. May do nothing."""

    def alive(self) -> str:
        """Return "" while the backend runs, else the reason why it ended."""

    async def stop(self) -> None:
        """Stop the backend. Requests in flight are lost."""
