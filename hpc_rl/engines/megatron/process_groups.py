"""Process groups of Megatron-core, which supports one layout per process."""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from hpc_rl.engines.shared.distributed import init_alone
from hpc_rl.engines.shared.mesh import Mesh

_layout: tuple[Any, ...] | None = None


def enter_layout(mesh: Mesh, virtual: int | None, device: torch.device, seed: int) -> None:
    """Make the groups of a layout, unless they exist. Collective.

    Engines with another layout can't be used afterwards.
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
        distributed_timeout_minutes=_get_timeout_minutes(),
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    _layout = layout


def _get_timeout_minutes() -> int:
    """Return the time limit of a collective in the default group, in whole minutes."""
    backend: Any = dist.group.WORLD
    seconds = backend._get_backend(
        torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    ).options._timeout
    return max(1, math.ceil(seconds.total_seconds() / 60))
