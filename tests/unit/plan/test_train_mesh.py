"""Meshes of both engines: their plans, and refusals with meshes that fit."""

import pytest
from model_shapes import QWEN3_8B, QWEN3_30B_A3B

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.allocation import Train, parse
from hpc_rl.core.backends import TRAIN_BACKENDS
from hpc_rl.core.errors import ConfigError, DoesNotFit
from hpc_rl.plan import train_mesh
from hpc_rl.plan.memory import ModelShape
from hpc_rl.plan.plan import make_plan

GRPO = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d.jsonl",
    "train_dataset.batch_size=8",
    "actor.path=/m",
    "gconfig.n_samples=4",
    "cluster.n_gpus_per_node=8",
]
SFT = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d.jsonl",
    "train_dataset.batch_size=8",
    "model.path=/m",
    "trainer=sft",
    "cluster.n_gpus_per_node=8",
]


def plan_trial(*overrides: str, base=GRPO):
    checked = check(load([], [*base, *overrides]), files=False)
    made = make_plan(checked.config, checked.explicit, interpreter="python", scheduler="slurm")
    return checked.config, made


@pytest.mark.parametrize(
    ("overrides", "allocation"),
    [
        (["allocation_mode=sglang:d4+d2t2"], "sglang:d4+fsdp:d2t2"),
        (["allocation_mode=sglang:d4+d2t2", "actor.backend=megatron"], "sglang:d4+megatron:d2t2"),
        (["allocation_mode=sglang:d4+d2p2", "actor.backend="], "sglang:d4+megatron:d2p2"),
        (["allocation_mode=sglang:d4+fsdp:d*t2c2"], "sglang:d4+fsdp:t2c2"),
        (["allocation_mode=sglang:d4+attn:d4|ffn:d1e4t1"], "sglang:d4+megatron:d4e4"),
        (["actor.backend=megatron"], "sglang:d4+megatron:d4"),
    ],
)
def test_the_engine_is_that_of_the_expression_or_of_the_model_section(overrides, allocation):
    _, made = plan_trial(*overrides)
    assert made.allocation == allocation
    assert made.units[-1].num_tasks == 4


def test_two_engines_in_one_trial_must_agree():
    with pytest.raises(
        ConfigError, match=r"actor.backend fsdp contradicts allocation_mode .*; set megatron, or"
    ):
        plan_trial("actor.backend=fsdp", "allocation_mode=sglang:d4+megatron:d4")
    with pytest.raises(
        ConfigError, match=r"ref\.backend megatron contradicts allocation_mode .*fsdp:d4.*; set fsdp"
    ):
        plan_trial("ref.path=/r", "ref.backend=megatron")


def test_rows_are_shared_out_among_data_ranks_only():
    # 8 * 4 / 4 rows per update: 16 ranks have 8 data ranks, or 16
    many = ["cluster.n_nodes=4", "allocation_mode=sglang:d16+fsdp:d8t2"]
    assert plan_trial(*many)[1].units[-1].num_tasks == 16
    with pytest.raises(DoesNotFit, match=r"an update has 8 row.* for 16 data ranks.* use fsdp:d8 or less"):
        plan_trial("cluster.n_nodes=4", "allocation_mode=sglang:d16+fsdp:d16")
    with pytest.raises(
        DoesNotFit, match=r"an update has 8 row.* for 12 data ranks.* use megatron:d8p2 or less"
    ):
        plan_trial("cluster.n_nodes=5", "allocation_mode=sglang:d16+megatron:d12p2")


@pytest.mark.parametrize(
    ("overrides", "base", "fits"),
    [
        (["allocation_mode=sglang:d4+fsdp:d3t2"], GRPO, "sglang:d2+fsdp:d3t2"),
        (["allocation_mode=sglang:d4+megatron:d2p4"], GRPO, "sglang:d4+megatron:p4"),
        (["allocation_mode=fsdp:d3t2"], SFT, "fsdp:d4t2"),
        (["cluster.n_nodes=2", "allocation_mode=megatron:d3t4"], SFT, "megatron:d4t4"),
    ],
)
def test_what_does_not_fit_names_the_nearest_with_the_same_sizes(overrides, base, fits):
    with pytest.raises(DoesNotFit) as caught:
        plan_trial(*overrides, base=base)
    assert f"the nearest that fits: {fits}." in str(caught.value)


def test_copies_divide_the_data_ranks_and_parts_of_stages_need_stages():
    assert plan_trial("actor.fsdp.replicate_size=2", "allocation_mode=sglang:d4+fsdp:d4")
    with pytest.raises(
        ConfigError, match=r"fsdp\.replicate_size 3 must divide the data ranks, d 4 .*; use 2"
    ):
        plan_trial("actor.fsdp.replicate_size=3", "allocation_mode=sglang:d4+fsdp:d4")
    parts = "actor.megatron.virtual_pipeline_size=2"
    assert plan_trial(parts, "allocation_mode=sglang:d4+megatron:d2p2")
    with pytest.raises(ConfigError, match=r"virtual_pipeline_size 2 has no effect .* one stage; set p to 2"):
        plan_trial(parts, "allocation_mode=sglang:d4+megatron:d4")


def test_tensor_ranks_on_two_nodes_are_noted():
    def notes(allocation):
        return plan_trial("cluster.n_nodes=4", f"allocation_mode={allocation}")[1].notes

    assert any(
        "t 16 does not divide the 8 ranks of a node" in note
        for note in map(str, notes("sglang:d16+megatron:t16"))
    )
    assert not any("tensor ranks" in note for note in map(str, notes("sglang:d16+megatron:d2t8")))


def find_problem(content: dict, allocation: str, *overrides: str) -> str:
    config, made = plan_trial(f"allocation_mode={allocation}", "cluster.n_nodes=3", *overrides)
    return "\n".join(map(str, train_mesh.find_problems(config, made, {"/m": content})))


@pytest.mark.parametrize(
    ("content", "mesh", "words"),
    [
        (QWEN3_8B, "megatron:d2t4", ""),
        (QWEN3_8B, "megatron:d2p4", ""),
        (QWEN3_8B, "fsdp:d2t2c2", ""),
        (QWEN3_30B_A3B, "megatron:d8e8", ""),
        (QWEN3_30B_A3B, "megatron:(attn:d4t2|ffn:d1t1e8)", ""),
        (QWEN3_8B | {"num_attention_heads": 28}, "megatron:t8", "28 attention heads, not a multiple of t 8"),
        (QWEN3_8B | {"num_attention_heads": 28}, "megatron:t8", "use megatron:d2t4"),
        (QWEN3_8B | {"num_attention_heads": 12}, "fsdp:t2c4", "not a multiple of t 2 * c 4"),
        (QWEN3_8B, "fsdp:d1t16", "8 key-value heads, which t 16 does not divide"),
        (QWEN3_8B, "megatron:p8", "36 layers, not a multiple of p 8"),
        (QWEN3_8B, "megatron:p8", "use megatron:d2p4"),
        (QWEN3_8B, "megatron:d4e2", "no experts, but e is 2"),
        (QWEN3_8B, "megatron:d8e2", "use megatron:d8."),
        (QWEN3_30B_A3B | {"num_experts": 60}, "megatron:d8e8", "60 experts, not a multiple of e 8"),
        (QWEN3_30B_A3B | {"num_experts": 60}, "megatron:d8e8", "use megatron:d8e4"),
        (QWEN3_8B | {"model_type": "gemma2"}, "megatron:d8", "can't train gemma2 models, only llama"),
        (QWEN3_8B | {"model_type": "gemma2"}, "megatron:d4t2", "use fsdp:d8"),
        (QWEN3_8B | {"vocab_size": 151935}, "megatron:d4t2", ""),
        (QWEN3_8B | {"vocab_size": 151935}, "fsdp:d4t2", "a vocabulary of 151935, not a multiple of t 2"),
        (QWEN3_30B_A3B, "fsdp:d4c2", ""),
        (QWEN3_30B_A3B, "fsdp:d4t2", "fsdp can't divide qwen3_moe models by t, only gemma,"),
        (QWEN3_30B_A3B, "fsdp:d4t2", "use fsdp:d8."),
        (QWEN3_8B | {"rope_scaling": {"rope_type": "yarn"}}, "megatron:d8", "rope_type: yarn (config.json); use "),
        (QWEN3_8B | {"sliding_window": 4096, "use_sliding_window": False}, "megatron:d8", ""),
        (QWEN3_8B | {"hidden_act": "gelu"}, "megatron:d8", "hidden_act: gelu"),
        (QWEN3_8B | {"hidden_act": "gelu"}, "fsdp:d8", ""),
        (QWEN3_8B | {"rope_scaling": {"rope_type": "longrope"}}, "fsdp:d8", ""),
        (QWEN3_8B | {"rope_scaling": {"type": "longrope"}}, "fsdp:d4c2", "longrope, which does not work with c in allocation_mode; use fsdp:d8"),
        (QWEN3_8B | {"attention_dropout": 0.1}, "fsdp:d4t2", ""),
        (QWEN3_8B | {"attention_dropout": 0.1}, "fsdp:d4c2", "set actor.disable_dropout true"),
        (QWEN3_8B | {"attention_dropout": 0.1}, "megatron:d8", "set actor.disable_dropout true"),
    ],
)  # fmt: skip
def test_models_that_a_mesh_divides_or_not(content, mesh, words):
    units = parse(mesh).train.num_units
    found = find_problem(content, f"sglang:d{24 - units}+{mesh}")
    assert words in found and bool(found) == bool(words)


def test_parts_of_stages_divide_the_layers_too():
    parts = "actor.megatron.virtual_pipeline_size"
    assert not find_problem(QWEN3_8B, "sglang:d16+megatron:d4p2", f"{parts}=2")
    assert "36 layers, not a multiple of p 2 * megatron.virtual_pipeline_size 4" in find_problem(
        QWEN3_8B, "sglang:d16+megatron:d4p2", f"{parts}=4"
    )
    # a mesh of one stage is refused with parts
    layers = QWEN3_8B | {"num_hidden_layers": 94}
    found = find_problem(layers, "sglang:d16+megatron:d4p2", f"{parts}=2")
    assert "use megatron:d4p2 with megatron.virtual_pipeline_size 1." in found
    assert not find_problem(layers, "sglang:d16+megatron:d4p2", f"{parts}=1")


def test_layers_that_are_recomputed_together_divide_those_of_a_stage():
    mesh, together = "sglang:d16+megatron:d4p2", "actor.megatron.recompute_num_layers"
    found = find_problem(QWEN3_8B, mesh, f"{together}=4")
    assert found == (
        "actor.megatron.recompute_num_layers 4 must divide the 18 layers of each part of a stage of "
        "megatron:d4p2; use 3."
    )
    assert not find_problem(QWEN3_8B, mesh, f"{together}=3")
    assert not find_problem(QWEN3_8B, mesh, f"{together}=4", "actor.gradient_checkpointing=false")
    assert not find_problem(QWEN3_8B, mesh, f"{together}=4", "actor.megatron.recompute_method=block")
    assert "the 9 layers" in find_problem(
        QWEN3_8B, mesh, f"{together}=2", "actor.megatron.virtual_pipeline_size=2"
    )


@pytest.mark.parametrize(
    ("mesh", "option", "words"),
    [
        ("fsdp:d4c2", "attn_impl=eager", "attn_impl eager can't be used with fsdp:d4c2; use sdpa, or .*: fsdp:d8"),
        ("fsdp:d4c2", "attn_impl=flex_attention", "attn_impl flex_attention can't be used with fsdp:d4c2"),
        ("fsdp:d4c2", "dtype=float32", "dtype float32 can't be used with fsdp:d4c2 on GPUs; use bfloat16"),
        ("fsdp:d8", "attn_impl=flex_attention", ""),
        ("megatron:d4c2", "dtype=float32", ""),
    ],
)  # fmt: skip
def test_context_parallelism_by_fsdp_needs_packed_rows(mesh, option, words):
    overrides = [f"allocation_mode=sglang:d8+{mesh}", f"actor.{option}", "cluster.n_nodes=2"]
    if not words:
        assert plan_trial(*overrides)
        return
    with pytest.raises(ConfigError, match=words):
        plan_trial(*overrides)


def test_the_reference_model_is_divided_too():
    config, made = plan_trial("allocation_mode=sglang:d4+megatron:t4", "ref.path=/r")
    small = QWEN3_8B | {"num_attention_heads": 14, "num_key_value_heads": 2}
    [found] = train_mesh.find_problems(config, made, {"/m": QWEN3_8B, "/r": small})
    assert (found.option, found.use) == ("ref.path", "use megatron:d2t2")
    assert "has 14 attention heads" in found.why


def test_the_nearest_mesh_keeps_the_number_of_ranks_and_divides_the_model():
    shape = ModelShape.of(QWEN3_8B | {"num_attention_heads": 12, "num_key_value_heads": 2})
    found = train_mesh.find_nearest(Train("megatron", d=1, p=8, t=8), shape)
    assert found.num_units == 64 and not list(train_mesh.find_remainders(found, shape))
    assert (found.t, found.p) == (4, 4)


def test_the_plan_knows_the_models_that_the_engines_can_divide():
    from transformers import AutoConfig

    from hpc_rl.engines.megatron.weight_map import ARCHITECTURES
    from hpc_rl.engines.shared import (
        attention,
        tensor_parallel,
    )

    assert set(TRAIN_BACKENDS["megatron"].model_types) == set(ARCHITECTURES)
    known = TRAIN_BACKENDS["fsdp"].divided_types
    assert set(known["c"]) == set(attention.STANDARD)
    for kind in attention.STANDARD:
        plan = AutoConfig.for_model(kind).base_model_tp_plan
        assert (kind in known["t"]) == (set(plan.values()) <= tensor_parallel.STYLES.keys()), kind
