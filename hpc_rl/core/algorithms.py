"""The algorithms that `actor.algorithm` can name, as seen by the configuration.

The configuration reads this table without importing torch. The functions of an algorithm are on its page in
hpc_rl/algorithms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AlgorithmRow:
    """An algorithm of hpc-rl."""

    path: str  # module:name of its Algorithm
    summary: str  # one line for the documentation
    # option of section `actor` -> its default with this algorithm; AReaL's default otherwise
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # sections of the configuration, such as `critic`


_PAGES = "hpc_rl.algorithms"
ALGORITHMS: dict[str, AlgorithmRow] = {
    "grpo": AlgorithmRow(f"{_PAGES}.grpo:GRPO", "clipped ratio per token"),
    "areal": AlgorithmRow(f"{_PAGES}.areal:AREAL", "the computation of AReaL v0.3, with its mistakes"),
}
