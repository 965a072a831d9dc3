"""Engines: sharded models with their optimizers. `ENGINES[name](config, rank=…, num_ranks=…, device=…, seed=…)` makes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _fsdp(*args: Any, **kwargs: Any) -> Any:
    from hpc_rl.engines.fsdp import FSDPEngine

    return FSDPEngine(*args, **kwargs)


ENGINES: dict[str, Callable[..., Any]] = {"fsdp": _fsdp}
