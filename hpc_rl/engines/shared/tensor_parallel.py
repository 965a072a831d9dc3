"""Tensor parallelism by DTensor: each rank has a part of every matrix of a transformers model.

The plan of transformers for an architecture (`base_model_tp_plan`) decides for each matrix whether outputs or
inputs are cut. The embedding and the head are cut by vocabulary. Between layers, activations are whole on
every rank (Shoeybi et al., "Megatron-LM", arXiv 1909.08053).
"""

import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from hpc_rl.core.errors import ConfigError

# style of the plan -> ours; None: the weight (a norm of heads) is whole, its gradient must be summed
STYLES: dict[str, type[ParallelStyle] | None] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": None,
}
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def cut(hf: Any, mesh: DeviceMesh) -> set[str]:
    """Cut the parameters of a model, which may be on `meta`, over the ranks of a mesh of one dimension.

    Returns the names of whole parameters whose gradients must be summed over the mesh. Raises ConfigError if
    the model can't be cut.
    """
    styles = _choose_styles(hf, mesh.size())
    partial = {
        f"{name}.{parameter}"
        for name, style in styles.items()
        if style is None
        for parameter, _ in hf.get_submodule(name).named_parameters()
    }
    parallelize_module(hf, mesh, {name: style() for name, style in styles.items() if style is not None})
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if tied:
        head.weight = embedding.weight
    elif head is not None:  # reward models have no head
        head.weight = nn.Parameter(distribute_tensor(head.weight, mesh, [Shard(0)]))
    return partial


def _choose_styles(hf: Any, size: int) -> dict[str, type[ParallelStyle] | None]:
    """Return the styles of modules by name; modules without a style are left out."""
    config, trunk = hf.config, hf.base_model
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or set(plan.values()) - STYLES.keys():
        raise ConfigError(
            f"fsdp can't train {config.model_type} models with tensor parallelism (t{size}); in "
            "allocation_mode use d in place of t, or megatron"
        )
    for key in DIVIDED:
        if (number := getattr(config, key, size)) % size:
            raise ConfigError(
                f"t{size} of allocation_mode must divide {key} {number} of the model's config.json"
            )
    styles = {}
    for name, module in trunk.named_modules():
        found = next((style for key, style in plan.items() if _matches(key, name)), None)
        if found is not None and module is not trunk:
            styles[f"{hf.base_model_prefix}.{name}"] = STYLES[found]
    return styles


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def get_local(tensor: Any) -> Any:
    """Return this rank's part of a cut parameter, with gradient; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
