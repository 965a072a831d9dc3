"""Options of one train engine are refused with the other; recomputation and overlap options must agree."""

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind

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
    ("overrides", "option", "kind"),
    [
        ([f"{M}.ddp.overlap_grad_reduce=true"], f"{M}.ddp.overlap_grad_reduce", Kind.NO_EFFECT),
        (
            [f"{M}.recompute_method=block", "allocation_mode=sglang:d4+fsdp:d4"],
            f"{M}.recompute_method",
            Kind.NO_EFFECT,
        ),
        (
            [MEGATRON, "actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap=[A]"],
            "actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap",
            Kind.NO_EFFECT,
        ),
        ([MEGATRON, "actor.fsdp.offload_params=true"], "actor.fsdp.offload_params", Kind.NO_EFFECT),
        (
            ["actor.backend=megatron", "actor.grad_reduce_dtype=bfloat16"],
            "actor.grad_reduce_dtype",
            Kind.NO_EFFECT,
        ),
        ([MEGATRON, "actor.optimizer.offload=true"], "actor.optimizer.offload", Kind.NO_EFFECT),
        ([MEGATRON, "actor.enable_torch_compile=true"], "actor.enable_torch_compile", Kind.NO_EFFECT),
        (
            ["allocation_mode=sglang:d4+fsdp:d2t2", "ref.path=/m", "ref.enable_torch_compile=true"],
            "ref.enable_torch_compile",
            Kind.CONFLICT,
        ),
        ([MEGATRON, f"{M}.ddp.bucket_size=100"], f"{M}.ddp.bucket_size", Kind.CONFLICT),
        (
            [
                MEGATRON,
                f"{M}.ddp.overlap_param_gather=true",
                f"{M}.ddp.overlap_grad_reduce=true",
                f"{M}.ddp.use_distributed_optimizer=false",
            ],
            f"{M}.ddp.overlap_param_gather",
            Kind.CONFLICT,
        ),
        ([MEGATRON, f"{M}.recompute_granularity=null"], f"{M}.recompute_granularity", Kind.CONFLICT),
        ([MEGATRON, f"{M}.recompute_num_layers=null"], f"{M}.recompute_granularity", Kind.CONFLICT),
        ([MEGATRON, f"{M}.recompute_modules=[mlp]"], f"{M}.recompute_modules", Kind.CONFLICT),
        (
            [MEGATRON, f"{M}.recompute_granularity=selective", f"{M}.recompute_modules=[mla]"],
            f"{M}.recompute_modules",
            Kind.VALUE,
        ),
        (
            [MEGATRON, f"{M}.ddp.check_for_nan_in_grad=true", "actor.dtype=float16"],
            f"{M}.ddp.check_for_nan_in_grad",
            Kind.CONFLICT,
        ),
        (
            [MEGATRON, f"{M}.recompute_granularity=selective", f"{M}.recompute_modules=[moe_act]"],
            f"{M}.recompute_modules",
            Kind.VALUE,
        ),
        (
            [MEGATRON, f"{M}.recompute_granularity=selective", f"{M}.recompute_method=block"],
            f"{M}.recompute_method",
            Kind.CONFLICT,
        ),
        ([MEGATRON, f"{M}.use_torch_fsdp2=true"], f"{M}.use_torch_fsdp2", Kind.UNSUPPORTED),
        (
            [MEGATRON, "ref.path=/r", "ref.megatron.virtual_pipeline_size=2"],
            "ref.megatron.virtual_pipeline_size",
            Kind.CONFLICT,
        ),
        (
            [MEGATRON, "ref.path=/r", f"{M}.virtual_pipeline_size=2", "ref.megatron.virtual_pipeline_size=1"],
            "ref.megatron.virtual_pipeline_size",
            Kind.CONFLICT,
        ),
        ([MEGATRON, "actor.attn_impl=flex_attention"], "actor.attn_impl", Kind.CONFLICT),
        ([MEGATRON, "ref.path=/r", "ref.attn_impl=eager"], "ref.attn_impl", Kind.CONFLICT),
    ],
)
def test_refusals(overrides, option, kind):
    with pytest.raises(ConfigError) as caught:
        load_checked(*overrides)
    assert (option, kind) in {(one.option, one.kind) for one in caught.value.refusals}


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


def test_layers_are_compiled_with_ranks_that_share_rows_or_tokens():
    loaded = load_checked("allocation_mode=sglang:d4+fsdp:d2c2", "actor.enable_torch_compile=true")
    assert loaded.actor.enable_torch_compile


def test_the_reference_model_follows_the_actor():
    found = load_checked(
        MEGATRON, "ref.path=/r", f"{M}.virtual_pipeline_size=2", f"{M}.ddp.overlap_grad_reduce=true"
    )
    assert found.ref.megatron == found.actor.megatron
