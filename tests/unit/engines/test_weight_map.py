"""Rectangles of Hugging Face tensors in Megatron's parameters: together the ranks have each number once."""

from math import prod

import pytest
import torch

from hpc_rl.engines.megatron.weight_map import RankPlace, find_rectangles

GROUPS, WIDTH, HEAD, INNER, EXPERTS, VOCABULARY = 2, 8, 4, 12, 4, 33
HEADS = {"q": 4, "k": GROUPS, "v": GROUPS}
LAYER = {
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
    **{f"self_attn.{one}_proj.weight": (n * HEAD, WIDTH) for one, n in HEADS.items()},
    **{f"self_attn.{one}_proj.bias": (n * HEAD,) for one, n in HEADS.items()},
    "self_attn.o_proj.weight": (WIDTH, 4 * HEAD),
    "self_attn.q_norm.weight": (HEAD,),
    "self_attn.k_norm.weight": (HEAD,),
}
DENSE = {f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")} | {
    "mlp.down_proj.weight": (WIDTH, INNER)
}
MERGED = {
    "mlp.gate.weight": (EXPERTS, WIDTH),
    "mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, WIDTH),
    "mlp.experts.down_proj": (EXPERTS, WIDTH, INNER),
}
EACH = {"mlp.gate.weight": (EXPERTS, WIDTH)} | {
    f"mlp.experts.{i}.{name}": shape
    for i in range(EXPERTS)
    for name, shape in {
        "gate_proj.weight": (INNER, WIDTH),
        "up_proj.weight": (INNER, WIDTH),
        "down_proj.weight": (WIDTH, INNER),
    }.items()
}
OUTER = {
    "model.embed_tokens.weight": (VOCABULARY, WIDTH),
    "model.norm.weight": (WIDTH,),
    "lm_head.weight": (VOCABULARY, WIDTH),
}
REPLICATED = ("norm", "mlp.gate.weight")
SHARED = (
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_proj.weight",
)


def parameters(num_experts: int) -> list[str]:
    mlp = ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    if num_experts:
        mlp = ["mlp.router.weight", "mlp.experts.gate_up", "mlp.experts.down"]
    outer = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    return [f"decoder.layers.{name}" for name in (*SHARED, *mlp)] + outer


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("mlp", [DENSE, MERGED, EACH], ids=["dense", "merged", "each"])
def test_ranks_have_each_number_once(mlp, tensor):
    shapes = {f"model.layers.7.{name}": shape for name, shape in (LAYER | mlp).items()} | OUTER
    experts = 0 if mlp is DENSE else 2  # ranks of experts, each with two
    counts = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rank in range(tensor):
        for expert_rank in range(experts or 1):
            place = RankPlace(tensor, rank, tensor, rank, 2 * expert_rank, experts)
            for parameter in parameters(experts):
                if expert_rank and ".experts." not in parameter:
                    continue
                at = 0
                for one in find_rectangles(parameter, 7, place, shapes, GROUPS):
                    assert one.start == at and one.shape == shapes[one.name]
                    at += prod(one.sizes)
                    part = tuple(slice(o, o + n) for o, n in zip(one.offset, one.sizes, strict=True))
                    counts[one.name][part] += 1
    for name, count in counts.items():
        times = tensor if any(word in name for word in REPLICATED) else 1
        assert bool((count == times).all()), name


def test_heads_of_a_group_are_neighbours():
    shapes = {f"model.layers.0.{name}": shape for name, shape in LAYER.items()}
    parameter = "decoder.layers.self_attention.linear_qkv.weight"
    found = find_rectangles(parameter, 0, RankPlace(2, 1), shapes, GROUPS)
    names = [one.name.removeprefix("model.layers.0.self_attn.") for one in found]
    assert names == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    places = [(one.offset[0], one.sizes[0]) for one in found]
    assert places == [(2 * HEAD, 2 * HEAD), (HEAD, HEAD), (HEAD, HEAD)]


def test_tied_embeddings_have_one_name_and_padding_has_none():
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    last = find_rectangles("output_layer.weight", 0, RankPlace(4, 3), shapes, GROUPS)
    (one,) = last
    assert (one.name, one.offset, one.sizes) == ("model.embed_tokens.weight", (27, 0), (6, WIDTH))


def test_a_parameter_without_a_tensor_is_refused():
    with pytest.raises(KeyError, match="mtp"):
        find_rectangles("decoder.layers.mtp.weight", 0, RankPlace(), OUTER, GROUPS)
