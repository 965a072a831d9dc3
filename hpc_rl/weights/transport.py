"""The Transport protocol: how a trainer brings new weights to the generation servers.

To add one, write a class with this protocol, add it to TRANSPORTS (weights/__init__.py), and name it among
the values of `weight_update_mode` (config/options/training.py).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hpc_rl.core.trial import Trial
from hpc_rl.core.types import WeightVersion

if TYPE_CHECKING:
    from hpc_rl.engines.base import Engine
    from hpc_rl.weights.process_groups import BucketSource


@dataclass
class Published:
    """The outcome of a publication. Complete on rank 0 only."""

    acknowledged: list[str] = field(default_factory=list)  # keys of the servers that have the weights
    failed: dict[str, str] = field(default_factory=dict)  # the problems of the others, by key
    pauses_s: dict[str, float] = field(default_factory=dict)  # of generation, by key
    needs_whole: bool = False  # a server could not rebuild the weights from the published files
    num_bytes: int = 0  # written by all ranks
    num_received: int = 0  # servers that have them over a process group
    density: float = 1.0  # share of the values that were written
    write_s: float = 0.0  # until the version was complete

    def to_metrics(self) -> dict[str, float]:
        """Return the numbers for the line of metrics."""
        pauses_s = list(self.pauses_s.values()) or [0.0]
        return {
            "publish_servers": len(self.acknowledged),
            "publish_received": self.num_received,
            "publish_bytes": self.num_bytes,
            "publish_density": self.density,
            "publish_write_s": self.write_s,
            "publish_pause_s": sum(pauses_s) / len(pauses_s),
            "publish_pause_max_s": max(pauses_s),
        }


class Updates(Protocol):
    """Updates the servers; see Publisher in publish.py."""

    def publish(
        self,
        version: WeightVersion,
        path: Path,
        num_bytes: int,
        stopping: threading.Event,
        source: "BucketSource | None" = None,
    ) -> Published: ...


@dataclass(frozen=True, kw_only=True)
class TransportContext:
    """The inputs of a transport on one rank."""

    trial: Trial
    engine: "Engine"
    publisher: Updates | None  # rank 0 only
    stopping: threading.Event  # set when this process must stop
    tokenizer: Path  # folder of the tokenizer's files, which servers get with the weights
    on_wait: Callable[[], None] = lambda: None  # called while the trainer waits for disk space


class Transport(Protocol):
    """Every rank of a trainer has one. At most one publication is in flight."""

    def start(self, version: WeightVersion) -> None:
        """Begin to publish the current weights; training may change them afterwards. Collective.

        No publication may be in flight.
        """

    def settle(self, wait: bool) -> Published | None:
        """Finish the publication in flight if the servers have it; with `wait`, wait for that. Collective.

        Returns None while it is in flight, if there is none, and if a stop ended it. Raises RoleFailed if no
        server took the weights, OSError.
        """

    def close(self) -> None:
        """End a publication in flight. Not collective."""
