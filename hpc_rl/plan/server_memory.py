"""Estimate the memory of generation servers: weights, and the rest for keys and values. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.pool_view import view_pool
from hpc_rl.core.allocation import Servers, parse
from hpc_rl.core.backends import SERVER_BACKENDS
from hpc_rl.plan.memory import GB, MB, PROCESS_BYTES
from hpc_rl.plan.model_shape import DTYPE_BYTES, Models, ModelShape
from hpc_rl.plan.schema import Plan

# Share of a GPU for weights and cache if the server decides it; the servers' defaults are close to it.
USUAL_SHARE = 0.9
_SHARES = {"sglang": "mem_fraction_static", "vllm": "gpu_memory_utilization"}


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """Memory of a server of a pool, on each of its GPUs or in its process."""

    pool: str
    backend: str
    units: int  # GPUs or processes of a server
    weight_bytes: float  # on each of them
    token_bytes: float  # of keys and values of one token, on each of them
    cache_bytes: float | None = None  # left for keys and values; None if unknown
    problem: str = ""  # why it can't fit

    @property
    def cached_tokens(self) -> int | None:
        return None if self.cache_bytes is None else max(0, int(self.cache_bytes / self.token_bytes))


def estimate_server_memories(
    config: Config, plan: Plan, models: Models, gpu_gb: int | None
) -> list[ServerMemory]:
    """Return one entry for each pool whose model is known."""
    if not isinstance(config, GRPOConfig):
        return []
    found = []
    for servers in parse(plan.allocation).pools:
        view = view_pool(config, servers.pool)
        if shape := ModelShape.of(models.get(view.actor.path, {})):
            if view.actor.is_critic:  # a vector replaces the head
                shape = replace(shape, is_tied=True)
            on_gpu = plan.device == "cuda" and SERVER_BACKENDS[servers.backend].on_gpus
            one = (
                _estimate_on_gpus(view, servers, shape, gpu_gb)
                if on_gpu
                else _estimate_in_process(view, servers, shape)
            )
            found.append(one)
    return found


def _estimate_on_gpus(
    view: GRPOConfig, servers: Servers, shape: ModelShape, gpu_gb: int | None
) -> ServerMemory:
    section = getattr(view, servers.backend)
    weight_bytes, token_bytes = _count_weights(section, servers, shape, servers.t)
    share = getattr(section, _SHARES[servers.backend]) or USUAL_SHARE
    cache_bytes, problem = None, ""
    if gpu_gb is not None:
        cache_bytes = gpu_gb * GB * share - weight_bytes
        if cache_bytes < token_bytes:
            problem = _describe_too_large(view, servers, shape, gpu_gb, share)
    return ServerMemory(
        pool=servers.pool,
        backend=servers.backend,
        units=servers.units_per_replica,
        weight_bytes=weight_bytes,
        token_bytes=token_bytes,
        cache_bytes=cache_bytes,
        problem=problem,
    )


def _count_weights(section: Any, servers: Servers, shape: ModelShape, num_parts: int) -> tuple[float, float]:
    """Return the bytes of the weights, and of a token's keys and values, on one of `num_parts` GPUs."""
    value_bytes = DTYPE_BYTES[shape.dtype if section.dtype == "auto" else section.dtype]
    if section.dtype == "auto" and shape.dtype == "float32":
        value_bytes = 2  # both servers convert to bfloat16
    if getattr(section, "quantization", None):
        value_bytes = 1
    moved = (getattr(section, "cpu_offload_gb", 0) or 0) * GB
    cache_value_bytes = 1 if "fp8" in str(getattr(section, "kv_cache_dtype", "")) else value_bytes
    weight_bytes = max(0.0, value_bytes * shape.num_params / num_parts / servers.p - moved)
    return weight_bytes, shape.count_cache_bytes(cache_value_bytes) / num_parts / servers.p


def _describe_too_large(
    view: GRPOConfig, servers: Servers, shape: ModelShape, gpu_gb: int, share: float
) -> str:
    section, usable = getattr(view, servers.backend), gpu_gb * GB * share
    weight_bytes, _ = _count_weights(section, servers, shape, servers.t)
    sizes = (t for t in (2, 4, 8, 16) if servers.t < t <= max(view.cluster.n_gpus_per_node, 1))
    enough = next((t for t in sizes if sum(_count_weights(section, servers, shape, t)) < usable), None)
    fits = f"{servers.backend} with t{enough}" if enough else "larger GPUs"
    limit = f"{servers.backend}.{_SHARES[servers.backend]} {share:g} of cluster.gpu_mem_gb {gpu_gb}"
    return (
        f"a server of pool {servers.pool} needs {weight_bytes / GB:.1f} GB of weights on each GPU, but "
        f"{limit} leaves {usable / GB:.1f} GB. What fits: {fits}."
    )


def _estimate_in_process(view: GRPOConfig, servers: Servers, shape: ModelShape) -> ServerMemory:
    """Return the memory of a server on CPUs, which is the memory of its process."""
    weight_bytes, token_bytes = _count_weights(getattr(view, servers.backend), servers, shape, 1)
    keeps_cache = SERVER_BACKENDS[servers.backend].is_process or not view.actor.is_critic
    given = view.launcher.inference_server_mem_per_gpu * servers.units_per_replica * MB
    needed = PROCESS_BYTES[False] + weight_bytes
    return ServerMemory(
        pool=servers.pool,
        backend=servers.backend,
        units=servers.units_per_replica,
        weight_bytes=weight_bytes,
        token_bytes=token_bytes if keeps_cache else 0.0,
        cache_bytes=max(0.0, given - needed) if keeps_cache else None,
    )
