"""Rules about the options of train engines: those of `fsdp` and `megatron` act in their own engine only."""

from collections.abc import Collection, Iterator
from typing import Any

from hpc_rl.config.load.fields import options, section_of
from hpc_rl.config.options.experiment import Config, GRPOConfig, value_of
from hpc_rl.config.options.megatron import MegatronConfig
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.config.rules.consistency import given
from hpc_rl.config.rules.training_rules import models, trained
from hpc_rl.core.allocation import parse
from hpc_rl.core.errors import ConfigError

PARTS = ("core_attn", "layernorm", "mlp", "moe")  # of a layer, that can be recomputed alone
_IN_PLACE = {  # option of another engine -> what to use with megatron
    "fsdp.wrap_policy": "layers are divided by t, p and e",
    "fsdp.offload_params": "more ranks hold less each",
    "fsdp.offload_activations": "t, c and p divide them",
    "fsdp.reshard_after_forward": "parameters are never gathered for a layer alone",
    "fsdp.replicate_size": "megatron.ddp.use_distributed_optimizer false keeps whole moments on each rank",
    "grad_reduce_dtype": "use megatron.ddp.grad_reduce_in_fp32",
    "optimizer.offload": "use more data ranks, which share out the moments",
}

_MEGATRON_OPTIONS = [name for name, hint in options(MegatronConfig).items() if not section_of(hint)]


def engine_of(config: Config) -> str:
    """Return the engine that the plan will have, or where it will be refused the likely one."""
    named = trained(config)[1].backend
    try:
        train = parse(config.allocation_mode, named).train if config.allocation_mode.strip() else None
    except ConfigError:
        train = None
    return train.backend if train else named or "fsdp"


def adapted(config: Config, explicit: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Return what the defaults of whole layers become where parts of layers are recomputed.

    The reference model is computed by the same groups of ranks as the actor, and by its options.
    """
    section, engine = trained(config)
    wanted: dict[str, tuple[Any, str]] = {}
    if engine.megatron.recompute_granularity == "selective":
        names = ["recompute_method", "recompute_num_layers"]
        wanted = {f"{section}.megatron.{name}": (None, "") for name in names}
    if isinstance(config, GRPOConfig) and config.ref is not None:
        names = [name for name in _MEGATRON_OPTIONS if f"actor.megatron.{name}" in explicit]
        wanted |= {f"ref.megatron.{name}": (value_of(engine.megatron, name), "") for name in names}
    return wanted


def other_engine(config: Config, explicit: Collection[str]) -> Iterator[str]:
    backend = engine_of(config)
    for section, _ in models(config):
        if backend == "megatron":
            for option, instead in _IN_PLACE.items():
                for name in given(config, explicit, f"{section}.{option}"):
                    yield f"{name} has no effect with the megatron backend: {instead}."
            continue
        for name in given(config, explicit, f"{section}.megatron."):
            use = f"use {section}.backend megatron, or omit it"
            yield f"{name} has no effect with the {backend} backend; {use}."


def megatron(config: Config, explicit: Collection[str]) -> Iterator[str]:
    section, engine = trained(config)
    if engine_of(config) == "megatron":
        for name, one in models(config):
            if one.attn_impl in ("eager", "flex_attention"):
                yield f"{name}.attn_impl {one.attn_impl} can't be used with the megatron backend; use sdpa."
    yield from _overlap(f"{section}.megatron.ddp", engine)
    yield from _recomputation(f"{section}.megatron", engine)


def _overlap(name: str, engine: TrainEngineConfig) -> Iterator[str]:
    if engine.megatron.ddp.check_for_nan_in_grad and engine.dtype == "float16":
        ends = "ends the trial where a float16 gradient overflows, as is usual until the loss scale is small"
        yield f"{name}.check_for_nan_in_grad {ends}; omit it, or use dtype bfloat16."
    needed = {
        "overlap_param_gather": ("overlap_grad_reduce", "use_distributed_optimizer"),
        "align_param_gather": ("overlap_param_gather",),
        "bucket_size": ("overlap_grad_reduce",),
    }
    ddp = engine.megatron.ddp
    for option, others in needed.items():
        for other in others:
            if getattr(ddp, option) and not getattr(ddp, other):
                yield f"{name}.{option} needs {name}.{other} true; set it, or omit {option}."


def _recomputation(name: str, engine: TrainEngineConfig) -> Iterator[str]:
    options = engine.megatron
    granularity, parts = options.recompute_granularity, options.recompute_modules
    checkpoints = f"{name.partition('.')[0]}.gradient_checkpointing"
    if granularity is None and engine.gradient_checkpointing:
        yield f"{name}.recompute_granularity null recomputes nothing: use {checkpoints} false instead."
    whole = (options.recompute_method, options.recompute_num_layers)
    if granularity == "selective" and whole != (None, None):
        given = f"{name}.recompute_method and recompute_num_layers are of whole layers"
        yield f"{given}, but recompute_granularity is selective; omit them."
    if granularity == "full" and None in whole:
        yield f"{name}.recompute_granularity full needs recompute_method and recompute_num_layers; set both."
    if parts is not None and granularity != "selective":
        yield f"{name}.recompute_modules needs recompute_granularity selective; set it, or omit the modules."
    for part in parts or ():
        if part not in PARTS:
            yield f"{name}.recompute_modules: {part} can't be used; allowed: {', '.join(PARTS)}."


def reference(config: Config, explicit: Collection[str]) -> Iterator[str]:
    for name in sorted(name for name in explicit if name.startswith("ref.megatron.")):
        actors = f"actor{name.removeprefix('ref')}"
        if value_of(config, name) != value_of(config, actors):
            yield f"{name}: the reference model is divided as the actor is; set {actors}, or omit it."


RULES = [other_engine, megatron, reference]
