"""The sizes of a model, by the content of its config.json, without weights and torch.

It knows decoders like Llama, Mistral, Qwen2 and Qwen3, also with experts, and no other kinds of model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Models = Mapping[str, Mapping[str, Any]]  # path of a model -> content of its config.json
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Numbers of parameters, and the widths that determine the size of activations."""

    num_layers: int
    width: int
    vocabulary: int
    query_width: int  # of all heads together
    key_width: int  # of keys, and of values
    num_heads: int
    num_key_heads: int  # of keys, and of values
    mlp_width: int  # of a layer without experts
    active_mlp_width: int  # for one token: the sum over its experts
    has_qk_norm: bool
    is_tied: bool  # the head is the embedding
    layer_params: int  # of one layer, all of its experts included
    num_experts: int  # of a layer
    expert_width: int
    dtype: str  # of the files

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ModelShape | None:
        """Return the shape that a config.json describes; None for an unknown kind of model."""
        content = content.get("text_config") or content
        sizes = [content.get(name) for name in _NEEDED]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        width, num_layers, num_heads, vocabulary, mlp_width = map(int, sizes)  # type: ignore[arg-type]
        head_dim = content.get("head_dim") or width // num_heads
        num_key_heads = content.get("num_key_value_heads") or num_heads
        key_width = num_key_heads * head_dim
        kind, query_width = str(content.get("model_type", "")), num_heads * head_dim
        attention = 2 * width * query_width + 2 * width * key_width
        if content.get("attention_bias", kind.startswith("qwen2")):
            attention += query_width + 2 * key_width + (0 if kind.startswith("qwen2") else width)
        has_qk_norm = kind.startswith("qwen3")
        norms = 2 * width + (2 * head_dim if has_qk_norm else 0)
        num_experts = next((content[name] for name in _EXPERTS if content.get(name)), 0)
        mlp_params, active = _measure_mlp(content, width, mlp_width, num_experts)
        return cls(
            num_layers=num_layers,
            width=width,
            vocabulary=vocabulary,
            query_width=query_width,
            key_width=key_width,
            num_heads=num_heads,
            num_key_heads=num_key_heads,
            mlp_width=mlp_width,
            active_mlp_width=active,
            has_qk_norm=has_qk_norm,
            is_tied=bool(content.get("tie_word_embeddings", False)),
            layer_params=attention + norms + mlp_params,
            num_experts=num_experts,
            expert_width=content.get("moe_intermediate_size") or mlp_width,
            dtype=_find_dtype(content),
        )

    @property
    def expert_params(self) -> int:
        """Parameters of all experts of a layer."""
        return 3 * self.width * self.num_experts * self.expert_width

    @property
    def table_params(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocabulary * self.width

    @property
    def outer_params(self) -> int:
        """Parameters outside of the layers: embedding, last norm, and the head if it is separate."""
        return (1 if self.is_tied else 2) * self.table_params + self.width

    @property
    def num_params(self) -> int:
        return self.outer_params + self.num_layers * self.layer_params

    def count_cache_bytes(self, value_bytes: int) -> int:
        """Return the bytes of the keys and values of a token."""
        return 2 * self.num_layers * self.key_width * value_bytes


def _measure_mlp(content: Mapping[str, Any], width: int, mlp_width: int, num_experts: int) -> tuple[int, int]:
    """Return the parameters of a layer's MLP, and its active width for one token."""
    if not num_experts:
        bias = 2 * mlp_width + width if content.get("mlp_bias") else 0
        return 3 * width * mlp_width + bias, mlp_width
    expert_width = content.get("moe_intermediate_size") or mlp_width
    shared_width = content.get("shared_expert_intermediate_size") or 0
    router = width * num_experts + (width if shared_width else 0)
    active = (content.get("num_experts_per_tok") or 1) * expert_width + shared_width
    return 3 * width * (num_experts * expert_width + shared_width) + router, active


def _find_dtype(content: Mapping[str, Any]) -> str:
    named = str(content.get("torch_dtype") or content.get("dtype") or "")
    return named if named in DTYPE_BYTES else "bfloat16"
