"""Where the values of Megatron's parameters are in the tensors of Hugging Face models. Pure.

A parameter of one rank consists of rectangles of tensors, one after another in its memory: `linear_qkv` has,
for each of its groups of heads, rows of q, k and v; `linear_fc1` has the gate's rows and then those of the up
projection. Loading, exports and recover state are made of these rectangles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]


class Rectangle(NamedTuple):
    """`sizes` values at `offset` of a tensor of `shape`, in a parameter from its value `start` on."""

    name: str
    start: int
    sizes: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RankPlace:
    """What of the model a rank has, beside its layers."""

    tensor: int = 1
    tensor_rank: int = 0
    expert_tensor: int = 1
    expert_tensor_rank: int = 0
    first_expert: int = 0


@dataclass(frozen=True)
class Architecture:
    """How a family of models differs from the others."""

    qkv_bias: bool = False
    head_norms: bool = False
    num_experts: str = ""  # the key of config.json with the number of experts


# model_type of config.json -> what is special. Their tensors have the same names otherwise.
ARCHITECTURES = {
    "llama": Architecture(),
    "mixtral": Architecture(num_experts="num_local_experts"),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(head_norms=True),
    "qwen3_moe": Architecture(head_norms=True, num_experts="num_experts"),
}

# parameter of a layer -> tensor of a layer, of which every rank has all
REPLICATED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # Transformer Engine
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",  # Transformer Engine
    "mlp.router.weight": "mlp.gate.weight",
}
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.weight")


def rectangles(parameter: str, layer: int, place: RankPlace, shapes: Shapes, groups: int) -> list[Rectangle]:
    """Return the rectangles of a parameter of one rank, in the order of its memory.

    `parameter` is its name in a model chunk, without the number of its layer; `layer` counts over the whole
    model. `shapes`: of the Hugging Face model's tensors. `groups`: heads of keys and values. Padding of the
    vocabulary is in no rectangle. Raises KeyError for a parameter that no tensor has.
    """
    top = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if parameter in top:
        name = top[parameter] if top[parameter] in shapes else "model.embed_tokens.weight"  # tied
        return list(_vocabulary(name, shapes[name], place))
    if parameter == "decoder.final_layernorm.weight":
        return [_whole("model.norm.weight", shapes)]
    if parameter == "score.weight":
        return [_whole("score.weight", shapes)]
    parameter, within = parameter.removeprefix("decoder.layers."), f"model.layers.{layer}."
    if parameter in REPLICATED:
        return [_whole(within + REPLICATED[parameter], shapes)]
    if parameter.startswith("self_attention.linear_qkv."):
        kind = parameter.rpartition(".")[2]
        return list(
            _qkv({one: f"{within}self_attn.{one}_proj.{kind}" for one in "qkv"}, place, shapes, groups)
        )
    if parameter == "self_attention.linear_proj.weight":
        return [_share(f"{within}self_attn.o_proj.weight", shapes, 1, place.tensor, place.tensor_rank)]
    if parameter == "mlp.linear_fc1.weight":
        names = [f"{within}mlp.{one}_proj.weight" for one in ("gate", "up")]
        return _in_a_row([_share(name, shapes, 0, place.tensor, place.tensor_rank) for name in names])
    if parameter == "mlp.linear_fc2.weight":
        return [_share(f"{within}mlp.down_proj.weight", shapes, 1, place.tensor, place.tensor_rank)]
    if found := EXPERT.fullmatch(parameter):
        return _expert(f"{within}mlp.experts.", place.first_expert + int(found[1]), found[2], place, shapes)
    raise KeyError(parameter)


def padded_vocabulary(vocabulary: int, tensor: int) -> int:
    """Return the size of a vocabulary that can be divided by the tensor ranks."""
    return -(-vocabulary // tensor) * tensor


def _vocabulary(name: str, shape: tuple[int, ...], place: RankPlace) -> Iterator[Rectangle]:
    rows = padded_vocabulary(shape[0], place.tensor) // place.tensor
    first = rows * place.tensor_rank
    here = min(rows, shape[0] - first)
    if here > 0:
        yield Rectangle(name, 0, (here, shape[1]), (first, 0), shape)


def _qkv(names: dict[str, str], place: RankPlace, shapes: Shapes, groups: int) -> Iterator[Rectangle]:
    """Yield a rank's share of all rows: those of q, k and v of the first group of heads, then the next."""
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


def _expert(within: str, expert: int, kind: str, place: RankPlace, shapes: Shapes) -> list[Rectangle]:
    """Return the rectangles of one expert: of a tensor of all experts, or of tensors of its own."""
    ranks, rank = place.expert_tensor, place.expert_tensor_rank
    if f"{within}gate_up_proj" not in shapes:  # transformers 4
        kinds, names = {"fc1": ("gate_proj", "up_proj"), "fc2": ("down_proj",)}, {}
        if f"{within}{expert}.w1.weight" in shapes:
            names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        tensors = [f"{within}{expert}.{names.get(one, one)}.weight" for one in kinds[kind]]
        return _in_a_row([_share(name, shapes, int(kind == "fc2"), ranks, rank) for name in tensors])
    name = within + {"fc1": "gate_up_proj", "fc2": "down_proj"}[kind]
    shape = shapes[name]
    if kind == "fc2":
        columns = shape[2] // ranks
        return [Rectangle(name, 0, (1, shape[1], columns), (expert, 0, columns * rank), shape)]
    rows = shape[1] // 2 // ranks
    return _in_a_row(
        [
            Rectangle(name, 0, (1, rows, shape[2]), (expert, half + rows * rank, 0), shape)
            for half in (0, shape[1] // 2)
        ]
    )


def _whole(name: str, shapes: Shapes) -> Rectangle:
    return Rectangle(name, 0, shapes[name], (0,) * len(shapes[name]), shapes[name])


def _share(name: str, shapes: Shapes, dim: int, ranks: int, rank: int) -> Rectangle:
    shape = shapes[name]
    size = shape[dim] // ranks
    sizes = tuple(size if at == dim else full for at, full in enumerate(shape))
    return Rectangle(
        name, 0, sizes, tuple(size * rank if at == dim else 0 for at in range(len(shape))), shape
    )


def _in_a_row(parts: list[Rectangle]) -> list[Rectangle]:
    """RankPlace rectangles one after another."""
    placed, at = [], 0
    for part in parts:
        placed.append(part._replace(start=at))
        at += prod(part.sizes)
    return placed
