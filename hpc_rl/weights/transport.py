"""The Transport protocol: how a trainer brings new weights to the generation servers.

To add one, write a class with this protocol and add it to TRANSPORTS (weights/publish.py).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hpc_rl.core.types import WeightVersion

# Writes the weights of all ranks to a folder: (description, final folder, function that names it, durable=…).
# Returns whether all ranks have written theirs. See trainers/exports.py.
WriteWeights = Callable[..., bool]


@dataclass
class Published:
    """The outcome of a publish: servers that have the weights, and the problems of the others, by key."""

    acknowledged: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class Transport(Protocol):
    """Every rank of a trainer has one."""

    def publish(
        self, version: WeightVersion, write: WriteWeights, stopping: threading.Event
    ) -> Published | None:
        """Publish the current weights; return None if a stop came before they were written. Collective.

        Raises RoleFailed if no server loaded them, and OSError.
        """
