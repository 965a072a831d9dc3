"""Maps Megatron's parameters to the tensors of Hugging Face models. Pure.

A parameter of one rank consists of rectangles of tensors, one after another in memory. `linear_qkv` has rows
of q, k and v for each group of heads; `linear_fc1` has the rows of the gate, then the rows of the up
projection; the experts of a rank share a parameter. Loading, exports and recover state use these rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]


class Rectangle(NamedTuple):
    """A rectangle of a tensor of `shape`: `sizes` values at `offset`, at `start` in a parameter."""

    name: str
    start: int
    sizes: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RankPlace:
    """A rank's position among tensor ranks and experts."""

    tensor: int = 1
    tensor_rank: int = 0
    expert_tensor: int = 1
    expert_tensor_rank: int = 0
    first_expert: int = 0
    num_experts: int = 0  # of this rank


@dataclass(frozen=True)
class Architecture:
    """The special features of a family of models."""

    qkv_bias: bool = False
    head_norms: bool = False
    num_experts: str = ""  # the key of config.json with the number of experts


# model_type of config.json -> special features; the tensors have the same names otherwise
ARCHITECTURES = {
    "llama": Architecture(),
    "mixtral": Architecture(num_experts="num_local_experts"),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(head_norms=True),
    "qwen3_moe": Architecture(head_norms=True, num_experts="num_experts"),
}

# parameter of a layer -> tensor of a layer; every rank has the whole tensor
REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # Transformer Engine
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",  # Transformer Engine
    "mlp.router.weight": "mlp.gate.weight",
}
# parameter of a layer -> the matrices of an expert in it
EXPERTS = {"mlp.experts.gate_up": ("gate_proj", "up_proj"), "mlp.experts.down": ("down_proj",)}


def find_rectangles(
    parameter: str, layer: int, place: RankPlace, shapes: Shapes, groups: int
) -> list[Rectangle]:
    """Return the rectangles of a parameter of one rank, in memory order; they leave out vocabulary padding.

    Raises KeyError for an unknown parameter.

    Args:
        parameter: Its name in a model chunk, without the number of the layer.
        layer: The number of the layer in the whole model.
        place: The rank's position.
        shapes: Shapes of the tensors of the Hugging Face model.
        groups: Number of key-value heads.
    """
    top = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if parameter in top:
        name = top[parameter] if top[parameter] in shapes else "model.embed_tokens.weight"  # tied
        return list(_cut_vocabulary(name, shapes[name], place))
    if parameter == "decoder.final_layernorm.weight":
        return [_take_whole("model.norm.weight", shapes)]
    if parameter == "score.weight":
        return [_take_whole("score.weight", shapes)]
    parameter, within = parameter.removeprefix("decoder.layers."), f"model.layers.{layer}."
    if parameter in REPLICATED:
        return [_take_whole(within + REPLICATED[parameter], shapes)]
    if parameter.startswith("self_attention.linear_qkv."):
        kind = parameter.rpartition(".")[2]
        return list(
            _cut_qkv({one: f"{within}self_attn.{one}_proj.{kind}" for one in "qkv"}, place, shapes, groups)
        )
    if parameter == "self_attention.linear_proj.weight":
        return [_share(f"{within}self_attn.o_proj.weight", shapes, 1, place.tensor, place.tensor_rank)]
    if parameter == "mlp.linear_fc1.weight":
        names = [f"{within}mlp.{one}_proj.weight" for one in ("gate", "up")]
        return _place_in_a_row([_share(name, shapes, 0, place.tensor, place.tensor_rank) for name in names])
    if parameter == "mlp.linear_fc2.weight":
        return [_share(f"{within}mlp.down_proj.weight", shapes, 1, place.tensor, place.tensor_rank)]
    if parameter in EXPERTS:
        return _cut_experts(f"{within}mlp.experts.", EXPERTS[parameter], place, shapes)
    raise KeyError(parameter)


def pad_vocabulary(vocabulary: int, tensor: int) -> int:
    """Return the size of the vocabulary, padded to a multiple of the tensor ranks."""
    return -(-vocabulary // tensor) * tensor


def _cut_vocabulary(name: str, shape: tuple[int, ...], place: RankPlace) -> Iterator[Rectangle]:
    rows = pad_vocabulary(shape[0], place.tensor) // place.tensor
    first = rows * place.tensor_rank
    here = min(rows, shape[0] - first)
    if here > 0:
        yield Rectangle(name, 0, (here, shape[1]), (first, 0), shape)


def _cut_qkv(names: dict[str, str], place: RankPlace, shapes: Shapes, groups: int) -> Iterator[Rectangle]:
    """Yield a rank's share of the rows: q, k and v of the first group of heads, then of the next one."""
    num_rows = {one: shapes[name][0] // groups for one, name in names.items()}
    share = sum(num_rows.values()) * groups // place.tensor
    begin, at = share * place.tensor_rank, 0
    for group in range(groups):
        for one, name in names.items():
            rest = shapes[name][1:]
            first, last = max(at, begin), min(at + num_rows[one], begin + share)
            if first < last:
                offset = (group * num_rows[one] + first - at, *(0 for _ in rest))
                sizes = (last - first, *rest)
                yield Rectangle(name, (first - begin) * prod(rest), sizes, offset, shapes[name])
            at += num_rows[one]


def _cut_experts(within: str, matrices: tuple[str, ...], place: RankPlace, shapes: Shapes) -> list[Rectangle]:
    """Return the rectangles of a rank's experts, in a tensor of all experts or in separate tensors."""
    ranks, rank = place.expert_tensor, place.expert_tensor_rank
    first, num_experts = place.first_expert, place.num_experts
    dim = int(matrices == ("down_proj",))
    if f"{within}gate_up_proj" not in shapes:  # transformers 4
        names: dict[str, str] = {}
        if f"{within}{first}.w1.weight" in shapes:
            names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        tensors = [
            f"{within}{expert}.{names.get(one, one)}.weight"
            for expert in range(first, first + num_experts)
            for one in matrices
        ]
        return _place_in_a_row([_share(name, shapes, dim, ranks, rank) for name in tensors])
    name = within + ("down_proj" if dim else "gate_up_proj")
    shape = shapes[name]
    if dim or ranks == 1:
        columns = shape[2] // ranks if dim else shape[2]
        sizes = (num_experts, shape[1], columns)
        return [Rectangle(name, 0, sizes, (first, 0, columns * rank if dim else 0), shape)]
    rows = shape[1] // 2 // ranks
    return _place_in_a_row(
        [
            Rectangle(name, 0, (1, rows, shape[2]), (expert, half + rows * rank, 0), shape)
            for expert in range(first, first + num_experts)
            for half in (0, shape[1] // 2)
        ]
    )


def _take_whole(name: str, shapes: Shapes) -> Rectangle:
    return Rectangle(name, 0, shapes[name], (0,) * len(shapes[name]), shapes[name])


def _share(name: str, shapes: Shapes, dim: int, ranks: int, rank: int) -> Rectangle:
    shape = shapes[name]
    size = shape[dim] // ranks
    sizes = tuple(size if at == dim else full for at, full in enumerate(shape))
    return Rectangle(
        name, 0, sizes, tuple(size * rank if at == dim else 0 for at in range(len(shape))), shape
    )


def _place_in_a_row(parts: list[Rectangle]) -> list[Rectangle]:
    """Place rectangles one after another."""
    placed, at = [], 0
    for part in parts:
        placed.append(part._replace(start=at))
        at += prod(part.sizes)
    return placed
