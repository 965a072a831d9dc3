"""Megatron-core without a GPU.

Megatron-core calls CUDA in places where a CPU would do. `install` replaces ten functions, and four for
mixtures of experts, by CPU versions. It affects the whole process and can't be undone. If CUDA is available
it does nothing, so training on GPUs does not use it. Tested with megatron-core 0.16.1.
"""

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

_installed = False


def install() -> None:
    """Replace the functions that need CUDA. Call it before the first import of megatron."""
    global _installed
    # Megatron warns about each missing optional package and about its own deprecated names
    warnings.filterwarnings("ignore", module=r"megatron\.")
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    # `with torch.device(…)` looks up its functions by name once. This must happen before they are replaced;
    # otherwise transformers would leave some buffers uninitialized.
    _device_constructors()
    cuda: Any = torch.cuda
    # `device=` of gradient buffers, rotary embeddings, and buffers for messages of other ranks
    cuda.current_device = lambda: torch.device("cpu")
    # after batched sends between stages
    cuda.synchronize = lambda device=None: None
    # Random states of tensor-parallel regions: all use the CPU's generator. Without `manual_seed` and
    # `_set_cuda_rng_state`, seeds would be queued silently until CUDA starts, which never happens.
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    # counts of tokens, gradient norms, loss scales
    torch.zeros = _move_to_cpu(torch.zeros)
    torch.tensor = _move_to_cpu(torch.tensor)
    # optimizers check types by name, as torch.cuda.FloatTensor
    torch.Tensor.type = _name_as_on_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    # state of the distributed optimizer
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # numbers of tokens per expert are copied to the CPU on a separate stream
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = object()
    dispatcher._maybe_dtoh_and_synchronize = _convert_splits
    # tensor ranks of an expert have different numbers of tokens, which gloo can't gather
    from megatron.core.tensor_parallel import mappings

    mappings._gather_along_first_dim = _gather_parts(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _sum_parts(mappings._reduce_scatter_along_first_dim)


def repair() -> None:
    """Fix code that fails without Transformer Engine, on GPUs too.

    The router of experts imports a missing name, and recomputed norms need a flag for FP8.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)
    if not random.HAVE_TE:
        recomputed: Any = random.CheckpointWithoutOutput
        recomputed.__init__ = functools.partialmethod(recomputed.__init__, fp8=None)


def _move_to_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _name_as_on_cuda(original: Any) -> Any:
    @functools.wraps(original)
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result

    return named


def _convert_splits(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(splits := getattr(self, name), torch.Tensor):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


def _gather_parts(original: Any) -> Any:
    @functools.wraps(original)
    def gathered(mine: torch.Tensor, group: Any = None, sizes: Any = None, *args: Any) -> torch.Tensor:
        if sizes is None:
            return original(mine, group, sizes, *args)
        whole = mine.new_empty(sum(sizes), *mine.shape[1:])
        repeated = torch.cat([mine] * group.size())
        dist.all_to_all_single(whole, repeated, list(sizes), [len(mine)] * group.size(), group=group)
        return whole

    return gathered


def _sum_parts(original: Any) -> Any:
    @functools.wraps(original)
    def summed(whole: torch.Tensor, group: Any = None, sizes: Any = None, *args: Any) -> torch.Tensor:
        if sizes is None:
            return original(whole, group, sizes, *args)
        size = sizes[group.rank()]
        parts = whole.new_empty(group.size() * size, *whole.shape[1:])
        dist.all_to_all_single(parts, whole.contiguous(), [size] * group.size(), list(sizes), group=group)
        return parts.view(group.size(), size, *whole.shape[1:]).sum(0)

    return summed
