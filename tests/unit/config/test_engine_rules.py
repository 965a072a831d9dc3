"""Options of one train engine are refused with the other; recomputation and overlap options must agree."""

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError

BASE = [
    "experiment_name=e",
    "trial_name=t",
    "train_dataset.path=/d.jsonl",
    "train_dataset.batch_size=8",
    "actor.path=/m",
    "gconfig.n_samples=4",
    "cluster.n_gpus_per_node=8",
]
MEGATRON = "allocation_mode=sglang:d4+megatron:d2t2"
M = "actor.megatron"


def load_checked(*overrides: str):
    return check(load([], [*BASE, *overrides]), files=False).config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{M}.ddp.overlap_grad_reduce=true"], "has no effect with the fsdp backend; use actor.backend megatron"),
        ([f"{M}.recompute_method=block", "allocation_mode=sglang:d4+fsdp:d4"], "with the fsdp backend"),
        ([MEGATRON, "actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap=[A]"], "layers are divided by t, p and e"),
        ([MEGATRON, "actor.fsdp.offload_params=true"], "actor.fsdp.offload_params has no effect with the megatron"),
        (["actor.backend=megatron", "actor.grad_reduce_dtype=bfloat16"], "use megatron.ddp.grad_reduce_in_fp32"),
        ([MEGATRON, "actor.optimizer.offload=true"], "use more data ranks"),
        ([MEGATRON, f"{M}.ddp.bucket_size=100"], f"can't be used with {M}.ddp.overlap_grad_reduce false"),
        (
            [MEGATRON, f"{M}.ddp.overlap_param_gather=true", f"{M}.ddp.overlap_grad_reduce=true",
             f"{M}.ddp.use_distributed_optimizer=false"],
            "can't be used with actor.megatron.ddp.use_distributed_optimizer false",
        ),
        ([MEGATRON, f"{M}.recompute_granularity=null"], "use actor.gradient_checkpointing false"),
        ([MEGATRON, f"{M}.recompute_num_layers=null"], "full needs recompute_method and recompute_num_layers"),
        ([MEGATRON, f"{M}.recompute_modules=[mlp]"], "with actor.megatron.recompute_granularity full"),
        (
            [MEGATRON, f"{M}.recompute_granularity=selective", f"{M}.recompute_modules=[mla]"],
            "mla can't be used; allowed: core_attn",
        ),
        (
            [MEGATRON, f"{M}.ddp.check_for_nan_in_grad=true", "actor.dtype=float16"],
            "check_for_nan_in_grad true can't be used with actor.dtype float16",
        ),
        (  # Megatron-core has it with grouped products only
            [MEGATRON, f"{M}.recompute_granularity=selective", f"{M}.recompute_modules=[moe_act]"],
            "moe_act can't be used; allowed: core_attn",
        ),
        (
            [MEGATRON, f"{M}.recompute_granularity=selective", f"{M}.recompute_method=block"],
            "is about whole layers",
        ),
        ([MEGATRON, f"{M}.use_torch_fsdp2=true"], "use the fsdp backend, which is FSDP2"),
        ([MEGATRON, "ref.path=/r", "ref.megatron.virtual_pipeline_size=2"], "set actor.megatron.virtual_pipe"),
        ([MEGATRON, "ref.path=/r", f"{M}.virtual_pipeline_size=2", "ref.megatron.virtual_pipeline_size=1"],
         "the reference model is divided as the actor is"),
        ([MEGATRON, "actor.attn_impl=flex_attention"], "actor.attn_impl flex_attention can't be used with the megatron"),
        ([MEGATRON, "ref.path=/r", "ref.attn_impl=eager"], "ref.attn_impl eager can't be used with the megatron"),
    ],
)  # fmt: skip
def test_refusals(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load_checked(*overrides)
    assert words in str(caught.value)


def test_what_areal_has_by_default_is_accepted_whole_and_the_rest_works():
    defaults = [f"{M}.wrap_with_ddp=true", f"{M}.async_save=false", f"{M}.exp_avg_dtype=float32"]
    used = [f"{M}.ddp.overlap_grad_reduce=true", f"{M}.ddp.overlap_param_gather=true"]
    used += [f"{M}.ddp.align_param_gather=true", f"{M}.ddp.bucket_size=1000", f"{M}.recompute_num_layers=2"]
    assert load_checked(MEGATRON, *defaults, *used).actor.megatron.ddp.bucket_size == 1000
    assert load_checked(*defaults)  # as AReaL's files have them, with fsdp too


def test_parts_of_layers_are_recomputed_without_the_numbers_of_whole_layers():
    options = load_checked(MEGATRON, f"{M}.recompute_granularity=selective", f"{M}.recompute_modules=[mlp]")
    found = options.actor.megatron
    assert (found.recompute_method, found.recompute_num_layers) == (None, None)


def test_the_reference_model_follows_the_actor():
    found = load_checked(
        MEGATRON, "ref.path=/r", f"{M}.virtual_pipeline_size=2", f"{M}.ddp.overlap_grad_reduce=true"
    )
    assert found.ref.megatron == found.actor.megatron
