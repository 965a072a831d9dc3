"""What generation servers hold: weights, and what is left for the keys and values of sequences. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.pool_view import as_pool
from hpc_rl.core.allocation import SERVER_BACKENDS, Servers, parse
from hpc_rl.plan.memory import GB, MB, PROCESS_BYTES
from hpc_rl.plan.model_shape import DTYPE_BYTES, Models, ModelShape
from hpc_rl.plan.schema import Plan

# Share of a GPU for weights and cache where it is left to the server; what they take is near it.
USUAL_SHARE = 0.9
_SHARES = {"sglang": "mem_fraction_static", "vllm": "gpu_memory_utilization"}


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """A server of a pool: of its weights, what each of its GPUs or its process holds."""

    pool: str
    backend: str
    units: int  # GPUs or processes of a server
    weight_bytes: float  # on each of them
    token_bytes: float  # of keys and values of one token, on each of them
    cache_bytes: float | None = None  # left for keys and values; None where it is not known
    problem: str = ""  # why it can't fit

    @property
    def cached_tokens(self) -> int | None:
        return None if self.cache_bytes is None else max(0, int(self.cache_bytes / self.token_bytes))


def server_memories(config: Config, plan: Plan, models: Models, gpu_gb: int | None) -> list[ServerMemory]:
    """Return one entry for each pool whose model is known."""
    if not isinstance(config, GRPOConfig):
        return []
    found = []
    for servers in parse(plan.allocation).pools:
        view = as_pool(config, servers.pool)
        if shape := ModelShape.of(models.get(view.actor.path, {})):
            if view.actor.is_critic:  # one vector in place of the head
                shape = replace(shape, is_tied=True)
            on_gpu = plan.device == "cuda" and SERVER_BACKENDS[servers.backend].on_gpus
            one = _on_gpus(view, servers, shape, gpu_gb) if on_gpu else _in_process(view, servers, shape)
            found.append(one)
    return found


def _on_gpus(view: GRPOConfig, servers: Servers, shape: ModelShape, gpu_gb: int | None) -> ServerMemory:
    section = getattr(view, servers.backend)
    weight_bytes, token_bytes = _weights(section, servers, shape, servers.t)
    share = getattr(section, _SHARES[servers.backend]) or USUAL_SHARE
    cache_bytes, problem = None, ""
    if gpu_gb is not None:
        cache_bytes = gpu_gb * GB * share - weight_bytes
        if cache_bytes < token_bytes:
            problem = _too_large(view, servers, shape, gpu_gb, share)
    return ServerMemory(
        pool=servers.pool,
        backend=servers.backend,
        units=servers.units_per_replica,
        weight_bytes=weight_bytes,
        token_bytes=token_bytes,
        cache_bytes=cache_bytes,
        problem=problem,
    )


def _weights(section: Any, servers: Servers, shape: ModelShape, num_parts: int) -> tuple[float, float]:
    """Return the bytes of weights, and of a token's keys and values, on one of `num_parts` GPUs."""
    value_bytes = DTYPE_BYTES[shape.dtype if section.dtype == "auto" else section.dtype]
    if section.dtype == "auto" and shape.dtype == "float32":
        value_bytes = 2  # both servers make it bfloat16
    if getattr(section, "quantization", None):
        value_bytes = 1
    moved = (getattr(section, "cpu_offload_gb", 0) or 0) * GB
    cache_value_bytes = 1 if "fp8" in str(getattr(section, "kv_cache_dtype", "")) else value_bytes
    weight_bytes = max(0.0, value_bytes * shape.num_params / num_parts / servers.p - moved)
    return weight_bytes, shape.cache_bytes_per_token(cache_value_bytes) / num_parts / servers.p


def _too_large(view: GRPOConfig, servers: Servers, shape: ModelShape, gpu_gb: int, share: float) -> str:
    section, usable = getattr(view, servers.backend), gpu_gb * GB * share
    weight_bytes, _ = _weights(section, servers, shape, servers.t)
    sizes = (t for t in (2, 4, 8, 16) if servers.t < t <= max(view.cluster.n_gpus_per_node, 1))
    enough = next((t for t in sizes if sum(_weights(section, servers, shape, t)) < usable), None)
    fits = f"{servers.backend} with t{enough}" if enough else "larger GPUs"
    limit = f"{servers.backend}.{_SHARES[servers.backend]} {share:g} of cluster.gpu_mem_gb {gpu_gb}"
    return (
        f"a server of pool {servers.pool} needs {weight_bytes / GB:.1f} GB of weights on each GPU, but "
        f"{limit} leaves {usable / GB:.1f} GB. What fits: {fits}."
    )


def _in_process(view: GRPOConfig, servers: Servers, shape: ModelShape) -> ServerMemory:
    """Return a server on CPUs: its memory is that of the process."""
    weight_bytes, token_bytes = _weights(getattr(view, servers.backend), servers, shape, 1)
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
