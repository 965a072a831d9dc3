"""Megatron-core without a GPU.

Megatron-core asks for CUDA in places where the same work could be done on a CPU. `install` puts CPU versions
there: ten functions, and four for mixtures of experts, for the whole process, which can't be undone. It does
nothing where CUDA is available, so nothing of this is used in training on GPUs. Known to be enough for
megatron-core 0.16.1.
"""

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

_installed = False


def install() -> None:
    """Replace what needs CUDA; call it before any module of megatron is imported."""
    global _installed
    # it warns of each optional package that is missing, and of its own older names
    warnings.filterwarnings("ignore", module=r"megatron\.")
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    # What `with torch.device(…)` acts on is found by name, once: before names lead to what is put there. Else
    # transformers would leave buffers of models that it loads as memory came.
    _device_constructors()
    cuda: Any = torch.cuda
    # `device=` of gradient buffers, of rotary embeddings and of what pipeline stages and tensor ranks receive
    cuda.current_device = lambda: torch.device("cpu")
    # after batched sends between stages
    cuda.synchronize = lambda device=None: None
    # random states of tensor-parallel regions: there is one generator, of the CPU. Without `manual_seed` and
    # `_set_cuda_rng_state` the seeds would wait, without a word, for a CUDA that never starts.
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    # counts of tokens, gradient norms; loss scales
    torch.zeros = _on_cpu(torch.zeros)
    torch.tensor = _on_cpu(torch.tensor)
    # optimizers know types by their names, as torch.cuda.FloatTensor
    torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)  # type: ignore[method-assign]
    # states of the distributed optimizer
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # numbers of tokens for each expert are copied to the CPU by a stream of their own
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = object()
    dispatcher._maybe_dtoh_and_synchronize = _splits_as_arrays
    # tensor ranks of an expert have different numbers of tokens, for which gloo has no gathering
    from megatron.core.tensor_parallel import mappings

    mappings._gather_along_first_dim = _gathered_parts(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _summed_parts(mappings._reduce_scatter_along_first_dim)


def repair() -> None:
    """Mend what fails without Transformer Engine, on GPUs too.

    The router of experts asks for a name, and norms that are recomputed for whether FP8 is on.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)
    if not random.HAVE_TE:
        recomputed: Any = random.CheckpointWithoutOutput
        recomputed.__init__ = functools.partialmethod(recomputed.__init__, fp8=None)


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _named_as_on_cuda(original: Any) -> Any:
    @functools.wraps(original)
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result

    return named


def _splits_as_arrays(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(splits := getattr(self, name), torch.Tensor):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


def _gathered_parts(original: Any) -> Any:
    @functools.wraps(original)
    def gathered(mine: torch.Tensor, group: Any = None, sizes: Any = None, *args: Any) -> torch.Tensor:
        if sizes is None:
            return original(mine, group, sizes, *args)
        whole = mine.new_empty(sum(sizes), *mine.shape[1:])
        repeated = torch.cat([mine] * group.size())
        dist.all_to_all_single(whole, repeated, list(sizes), [len(mine)] * group.size(), group=group)
        return whole

    return gathered


def _summed_parts(original: Any) -> Any:
    @functools.wraps(original)
    def summed(whole: torch.Tensor, group: Any = None, sizes: Any = None, *args: Any) -> torch.Tensor:
        if sizes is None:
            return original(whole, group, sizes, *args)
        size = sizes[group.rank()]
        parts = whole.new_empty(group.size() * size, *whole.shape[1:])
        dist.all_to_all_single(parts, whole.contiguous(), [size] * group.size(), list(sizes), group=group)
        return parts.view(group.size(), size, *whole.shape[1:]).sum(0)

    return summed
