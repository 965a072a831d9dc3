"""Attention within each row of a packed micro-batch: one call per layer, without waiting for the device.

The layout of micro-batches and the implementation for each `attn_impl`:

                     on a GPU                              on the CPU
    eager            padded, transformers                  padded, transformers
    sdpa             packed, FlashAttention in PyTorch     padded, transformers; packed on request
    flash_attention  packed, flash-attn 2 or 3             refused
    flex_attention   padded, transformers                  refused

Packing needs a model in STANDARD (these pass keyword arguments to their attention), attention without
dropout, a 16-bit type on a GPU, and a PyTorch whose `varlen_attn` takes `scale`. Otherwise the layout is
padded, with transformers' implementation of the same name. The starts of rows are computed once per
micro-batch; transformers would compute them in every layer, from the position ids on the device.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hpc_rl.engines.shared import context_parallel

Layout = Literal["padded", "packed"]
# model_type of architectures whose packed layout is tested against the padded one
STANDARD = (
    *("gemma", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3"),
    *("qwen2", "qwen3", "qwen3_moe", "smollm3"),
)


@dataclass(frozen=True)
class PackedRows:
    """The starts and ends of the rows of a packed micro-batch; no row is empty."""

    cu_seqlens: torch.Tensor  # int32 [rows + 1], on the device: 0, then the end of each row
    max_seqlen: int
    lengths: tuple[int, ...]


def choose(
    attn_impl: str,
    architecture: Any,
    device: torch.device,
    dtype: str,
    no_dropout: bool,
    layout: Layout | None = None,
) -> tuple[str, Layout]:
    """Return the implementation for transformers and the layout of micro-batches.

    `layout` requests a layout. Raises ImportError if a package is missing.
    """
    kernel = _choose_kernel(attn_impl, device.type, dtype)
    has_dropout = not no_dropout and bool(getattr(architecture, "attention_dropout", None))
    fits = kernel and architecture.model_type in STANDARD and not has_dropout
    if not fits or layout == "padded" or (layout is None and device.type == "cpu"):
        return attn_impl, layout or "padded"
    KERNELS[str(kernel)]()  # raises ImportError
    return f"packed_{kernel}", "packed"


def _choose_kernel(attn_impl: str, device: str, dtype: str) -> str | None:
    if device == "cpu":
        return "rows" if attn_impl == "sdpa" else None
    if attn_impl == "sdpa":
        return "torch" if dtype != "float32" and _has_varlen() else None
    return {"flash_attention_2": "fa2", "flash_attention_3": "fa3"}.get(attn_impl)


@functools.cache
def _has_varlen() -> bool:
    try:
        accepted = inspect.signature(_import_torch_varlen()).parameters
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= accepted.keys()


def _import_torch_varlen() -> Callable[..., Any]:
    return importlib.import_module("torch.nn.attention.varlen").varlen_attn


def _import_flash_2() -> Callable[..., Any]:
    return importlib.import_module("flash_attn").flash_attn_varlen_func


def _import_flash_3() -> Callable[..., Any]:
    return importlib.import_module("flash_attn_interface").flash_attn_varlen_func


# name -> function that imports the kernel; transformers gets an implementation `packed_<name>` for each
KERNELS: dict[str, Callable[[], Callable[..., Any]]] = {
    "fa2": _import_flash_2,
    "fa3": _import_flash_3,
    "torch": _import_torch_varlen,
    "rows": lambda: F.scaled_dot_product_attention,
}


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    scale: float | None = None,
    window: int | None = None,
    kernel: str = "rows",
    seen: PackedRows | None = None,
) -> torch.Tensor:
    """Return causal attention within each of the packed rows, [1, heads, T, d].

    Args:
        query: [1, heads, T, d].
        key: [1, heads, T, d], possibly with fewer heads; each head then serves several heads of queries.
        value: As `key`.
        rows: The rows of the queries.
        scale: Factor on the products; by default 1 / sqrt(d).
        window: A token sees itself and the tokens less than this many positions before it.
        kernel: A name in KERNELS.
        seen: The rows of keys and values if they are longer than `rows`: the queries are the last tokens.
    """
    seen = seen or rows
    if kernel == "rows":
        return _attend_row_by_row(query, key, value, rows, seen, scale, window)
    attend, ends, longest = KERNELS[kernel](), rows.cu_seqlens, rows.max_seqlen
    tensors = [one[0].transpose(0, 1) for one in (query, key, value)]  # [T, heads, d]
    sides = (-1 if window is None else window - 1, 0)
    if kernel == "torch":
        options: dict[str, Any] = {"scale": scale, "window_size": sides, "enable_gqa": True}
    else:
        options = {"softmax_scale": scale, "window_size": sides, "causal": True}
    out = attend(*tensors, ends, seen.cu_seqlens, longest, seen.max_seqlen, **options)
    out = out[0] if isinstance(out, tuple) else out  # some versions add a statistic
    return out.transpose(0, 1)[None]


def _attend_row_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    seen: PackedRows,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    splits = [
        one.split(list(lengths), 2)
        for one, lengths in ((query, rows.lengths), (key, seen.lengths), (value, seen.lengths))
    ]
    parts = zip(*splits, strict=True)
    out = [_attend_row(q, k, v, scale, window).transpose(1, 2) for q, k, v in parts]
    return torch.cat(out, dim=1).transpose(1, 2)


def _attend_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None
) -> torch.Tensor:
    length, before = key.shape[2], key.shape[2] - query.shape[2]
    mask = None
    if before or (window is not None and length > window):
        mask = torch.ones(length - before, length, dtype=torch.bool, device=query.device).tril(before)
        mask = mask if window is None else mask.triu(before + 1 - window)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_rows: PackedRows | None = None,
    context_group: dist.ProcessGroup | None = None,
    *,
    kernel: str,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers calls it; return [batch, T, heads, d].

    Without `packed_rows`, each row of the batch is one sequence. With `context_group`, its ranks divide the
    tokens.
    """
    if context_group is not None:
        size = context_group.size()
        key, value = context_parallel.repeat_heads(key, size), context_parallel.repeat_heads(value, size)
        query, key, value = (
            context_parallel.exchange_for_heads(one, context_group) for one in (query, key, value)
        )
    if packed_rows is None:
        out = _attend_row(query, key, value, scaling, sliding_window)
    else:
        out = attend_packed(query, key, value, packed_rows, scaling, sliding_window, kernel)
    if context_group is not None:
        out = context_parallel.exchange_for_tokens(out, context_group)
    return out.transpose(1, 2), None


NAMES = tuple(f"packed_{kernel}" for kernel in KERNELS)
for _kernel_name in KERNELS:
    # Without a registered mask function, transformers makes no mask.
    AttentionInterface.register(f"packed_{_kernel_name}", functools.partial(attention, kernel=_kernel_name))


@functools.cache
def keep_uncompiled() -> None:
    """Let torch.compile leave the implementations as they are: they depend on the lengths of rows."""
    for name in NAMES:
        AttentionInterface.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name]))
