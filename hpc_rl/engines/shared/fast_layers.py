"""Faster forward passes of some architectures of transformers; modules, parameters and results stay the same.

transformers computes norms and rotary embeddings with many small operators, each of which reads and writes
all activations, and prepares masks and options anew in each pass. Here a norm and a rotation are one operator
each, with a special backward pass; on the CPU, matrices with the same input are one product. In float32
the results differ from transformers' by rounding only (tests/unit/engines/test_fast_layers.py, for each
architecture in ARCHITECTURES); others are left as they are. torch.compile gets plain formulas, which it fuses
with the operators around them.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hpc_rl.engines.shared import attention

# model_type; all have RMS norms, rotary embeddings and an MLP with a gate
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def fits(hf: Any) -> bool:
    """Return whether `install` supports a model of transformers."""
    config = hf.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (
        config.model_type in ARCHITECTURES
        and kinds == {"full_attention"}
        and not has_window
        and getattr(config, "hidden_act", "") == "silu"
        and config._attn_implementation in ("sdpa", *attention.NAMES)
    )


def install(hf: Any) -> None:
    """Give the layers of a model their faster forward passes."""
    for layer in hf.base_model.layers:
        layer.self_attn.forward = MethodType(_attend, layer.self_attn)
        layer.mlp.forward = MethodType(_compute_mlp, layer.mlp)
        for module in (layer, layer.self_attn):
            for name in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"):
                if (norm := getattr(module, name, None)) is not None:
                    norm.forward = MethodType(_normalize, norm)
    hf.base_model.norm.forward = MethodType(_normalize, hf.base_model.norm)


def compute_trunk(
    base: Any, input_ids: torch.Tensor, position_ids: torch.Tensor | None, **more: Any
) -> torch.Tensor:
    """Return the last hidden states [B, W, width] of a model with `install`ed layers.

    position_ids: [1, W]; None: 0, 1, 2, … in every row. `more` goes to the attention.
    """
    hidden_BWH = base.embed_tokens(input_ids)
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    turns = base.rotary_emb(hidden_BWH, position_ids)
    for layer in base.layers:
        hidden_BWH = layer(hidden_BWH, attention_mask=None, position_embeddings=turns, **more)
    return base.norm(hidden_BWH)


def _normalize(module: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * (wide * scale).to(x.dtype)
    if x.is_cuda and x.dtype == module.weight.dtype:  # PyTorch has a fused operator
        return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)
    return _Norm.apply(x, module.weight, module.variance_epsilon)


def _attend(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers calls it."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    layers = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (one.view(shape) for one in _multiply(layers, hidden_states))
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    cos, sin = (one[:, :, None] for one in position_embeddings)
    turn = _turn if torch.compiler.is_compiling() else _Rotation.apply
    query, key = turn(query, cos, sin), turn(key, cos, sin)
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    output, _ = attend(
        module,
        *(one.transpose(1, 2) for one in (query, key, value)),
        attention_mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        **more,
    )
    return module.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None


def _compute_mlp(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    layers = [module.gate_proj, module.up_proj]
    if _can_join(layers):
        return module.down_proj(_GatedUnit.apply(_multiply_joined(layers, hidden_states)))
    gate, up = (layer(hidden_states) for layer in layers)
    return module.down_proj(F.silu(gate) * up)


def _multiply(layers: Sequence[Any], hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the results of linear layers with the same input, if possible from one product."""
    if not _can_join(layers):
        return [layer(hidden_states) for layer in layers]
    output = _multiply_joined(layers, hidden_states)
    return output.split([layer.out_features for layer in layers], dim=-1)


def _multiply_joined(layers: Sequence[Any], hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the results of plain linear layers with the same input, side by side."""
    biases = [layer.bias for layer in layers]
    bias = None if biases[0] is None else torch.cat(biases)
    return _JoinedProduct.apply(hidden_states, bias, *(layer.weight for layer in layers))


def _can_join(layers: Sequence[Any]) -> bool:
    """Return whether layers are matrices on the CPU: not cut over ranks, without an adapter or hooks."""
    return not torch.compiler.is_compiling() and all(
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and layer.weight.device.type == "cpu"
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        for layer in layers
    )


class _JoinedProduct(torch.autograd.Function):
    """x @ joined.T + bias, where the rows of several matrices are joined; the joined matrix is not kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = bias is not None
        return F.linear(x, torch.cat(weights), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grad_NV, x_NH = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        of_x = (grad_NV @ torch.cat(weights)).view_as(x) if ctx.needs_input_grad[0] else None
        of_weights: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[2:]):
            of_weights = (grad_NV.T @ x_NH).split([len(one) for one in weights])
        return of_x, grad_NV.sum(0) if ctx.has_bias else None, *of_weights


class _GatedUnit(torch.autograd.Function):
    """silu(gate) * up of [..., 2 * width], with gate in the first half; its gradient is made in one piece."""

    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor) -> torch.Tensor:
        gate, up = joined.chunk(2, dim=-1)
        active = F.silu(gate)
        ctx.save_for_backward(joined, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        joined, active = ctx.saved_tensors
        (gate, up), of_joined = joined.chunk(2, dim=-1), torch.empty_like(joined)
        of_gate, of_up = of_joined.chunk(2, dim=-1)
        torch.mul(grad, active, out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return of_joined


class _Norm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = wide * scale
        ctx.save_for_backward(normed, scale, weight)
        ctx.dtype = x.dtype
        return weight * normed.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        normed, scale, weight = ctx.saved_tensors
        grad = grad.float()
        width = normed.shape[-1]
        product = torch.mul(grad, normed, out=torch.empty_like(normed)).view(-1, width)
        share = torch.mv(product, weight.float()).div_(width).view(scale.shape)
        of_weight = product.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_x = torch.mul(grad, weight, out=product.view(grad.shape))
        return of_x.addcmul_(normed, share, value=-1).mul_(scale).to(ctx.dtype), of_weight, None


class _Rotation(torch.autograd.Function):
    """Rotary embedding of x [B, T, heads, D] by angles: cos and sin, [1, T, 1, D], of equal halves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute the same as `_Rotation`, of operators that a compiler fuses."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out
