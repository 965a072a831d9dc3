"""Engines by name: module and class, called as `cls(config, rank=…, num_ranks=…, …)`."""

from importlib import import_module

from hpc_rl.engines.base import Engine
from hpc_rl.errors import NotBuilt

ENGINES = {"fsdp": "hpc_rl.engines.fsdp:FSDPEngine"}


def engine_class(name: str) -> type[Engine]:
    """Return the class of the engine that an allocation names. Raises NotBuilt."""
    if name not in ENGINES:
        raise NotBuilt(f"the {name} engine is not built yet; use {' or '.join(ENGINES)}.")
    module, _, cls = ENGINES[name].partition(":")
    return getattr(import_module(module), cls)
