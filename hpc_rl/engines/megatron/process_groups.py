"""Process groups of Megatron-core, which has one layout for a process."""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from hpc_rl.engines.shared.distributed import init_alone
from hpc_rl.engines.shared.mesh import Mesh

_layout: tuple[Any, ...] | None = None


def enter(mesh: Mesh, virtual: int | None, device: torch.device, seed: int) -> None:
    """Make the groups of a layout, or keep them if they are of this one. Collective.

    Engines of another layout can't be used any more.
    """
    global _layout
    if not dist.is_initialized():
        init_alone(device)
    sizes = (
        mesh.num_ranks,
        mesh.tensor,
        mesh.pipeline,
        virtual,
        mesh.context,
        mesh.experts,
        mesh.expert_tensor,
    )
    layout = (*sizes, id(dist.group.WORLD))
    if parallel_state.is_initialized():
        if layout == _layout:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        mesh.tensor,
        mesh.pipeline,
        virtual,
        context_parallel_size=mesh.context,
        expert_model_parallel_size=mesh.experts,
        expert_tensor_parallel_size=mesh.expert_tensor,
        distributed_timeout_minutes=_timeout_minutes(),
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    _layout = layout


def _timeout_minutes() -> int:
    """Return what the ranks' own group has as the limit of a collective."""
    backend: Any = dist.group.WORLD
    seconds = backend._get_backend(
        torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    ).options._timeout
    return max(1, math.ceil(seconds.total_seconds() / 60))
