"""Rules about the options of train engines: `fsdp` and `megatron` each affect only their own engine."""

from collections.abc import Collection, Iterator
from typing import Any

from hpc_rl.config.load.fields import find_section, list_options
from hpc_rl.config.options.experiment import Config, get_value
from hpc_rl.config.options.megatron import MegatronConfig
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.config.rules.consistency import list_given
from hpc_rl.config.rules.training_rules import find_trained_model, list_models
from hpc_rl.core.allocation import Train, parse
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

PARTS = ("core_attn", "layernorm", "mlp", "moe")  # the parts of a layer that can be recomputed alone
_IN_PLACE = {  # option of another engine -> replacement with megatron
    "fsdp.wrap_policy": "layers are divided by t, p and e",
    "fsdp.offload_params": "to save GPU memory, use more ranks",
    "fsdp.offload_activations": "t, c and p divide the activations among ranks",
    "fsdp.reshard_after_forward": "parameters are never gathered for a layer alone",
    "fsdp.replicate_size": "to replicate the state, set megatron.ddp.use_distributed_optimizer false",
    "fsdp.float32_head": "logits are float32, but the head's weights have the type `dtype`",
    "enable_torch_compile": "only layers of the fsdp backend are compiled",
    "grad_reduce_dtype": "use megatron.ddp.grad_reduce_in_fp32",
    "optimizer.offload": "to save GPU memory, use more data ranks",
}

_MEGATRON_OPTIONS = [name for name, hint in list_options(MegatronConfig).items() if not find_section(hint)]


def find_train(config: Config) -> Train | None:
    """Return the trainer's part of `allocation_mode`; None without one, or if the plan will refuse it."""
    try:
        named = find_trained_model(config)[1].backend
        return parse(config.allocation_mode, named).train if config.allocation_mode.strip() else None
    except ConfigError:
        return None


def find_engine(config: Config) -> str:
    """Return the train engine of the plan, or the likely one if the plan will refuse the allocation."""
    train = find_train(config)
    return train.backend if train else find_trained_model(config)[1].backend or "fsdp"


def adapt_defaults(config: Config, explicit: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Return option -> (new default, reason) for recomputing parts of layers, and for further models.

    The same groups of ranks compute critic and reference model, so these take the options of the trained one.
    """
    section, engine = find_trained_model(config)
    wanted: dict[str, tuple[Any, str]] = {}
    if engine.megatron.recompute_granularity == "selective":
        names = ["recompute_method", "recompute_num_layers"]
        wanted = {f"{section}.megatron.{name}": (None, "") for name in names}
    for other, _ in list_models(config):
        if other != section:
            names = [name for name in _MEGATRON_OPTIONS if f"{section}.megatron.{name}" in explicit]
            wanted |= {f"{other}.megatron.{name}": (get_value(engine.megatron, name), "") for name in names}
    return wanted


def check_other_engine(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    backend = find_engine(config)
    for section, _ in list_models(config):
        if backend == "megatron":
            for option, instead in _IN_PLACE.items():
                for name in list_given(config, explicit, f"{section}.{option}"):
                    why = f"has no effect with the megatron backend: {instead}"
                    yield Refusal(option=name, kind=Kind.NO_EFFECT, why=why)
            continue
        for name in list_given(config, explicit, f"{section}.megatron."):
            yield Refusal(
                option=name,
                kind=Kind.NO_EFFECT,
                why=f"has no effect with the {backend} backend",
                use=f"use {section}.backend megatron, or remove it",
                related=(f"{section}.backend",),
            )


def check_compiled_layers(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    train = find_train(config)
    if train is None or train.backend != "fsdp" or train.t == 1:
        return
    for section, engine in list_models(config):
        if engine.enable_torch_compile:
            yield Refusal(
                option=f"{section}.enable_torch_compile",
                value="true",
                kind=Kind.CONFLICT,
                why=f"can't be used with matrices that are divided among ranks (t{train.t})",
                use="use d or c in place of t, or set the option to false",
                related=("allocation_mode",),
            )


def check_megatron(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    section, engine = find_trained_model(config)
    if find_engine(config) == "megatron":
        for name, one in list_models(config):
            if one.attn_impl in ("eager", "flex_attention"):
                yield Refusal(
                    option=f"{name}.attn_impl",
                    value=one.attn_impl,
                    kind=Kind.CONFLICT,
                    why="can't be used with the megatron backend",
                    use="use sdpa",
                )
    yield from _check_recomputation(f"{section}.megatron", engine)


def _check_recomputation(name: str, engine: TrainEngineConfig) -> Iterator[Refusal]:
    options = engine.megatron
    granularity, parts = options.recompute_granularity, options.recompute_modules
    if granularity == "full" and None in (options.recompute_method, options.recompute_num_layers):
        yield Refusal(
            option=f"{name}.recompute_granularity",
            value="full",
            kind=Kind.CONFLICT,
            why="needs recompute_method and recompute_num_layers",
            use="set both",
        )
    for part in parts or ():
        if part not in PARTS:
            why, use = f": {part} can't be used", f"allowed: {', '.join(PARTS)}"
            yield Refusal(option=f"{name}.recompute_modules", kind=Kind.VALUE, why=why, use=use)


def check_equal_layout(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    section, _ = find_trained_model(config)
    for name in sorted(name for name in explicit if name.startswith(("ref.megatron.", "critic.megatron."))):
        trained = f"{section}.{name.partition('.')[2]}"
        what = "the critic" if name.startswith("critic") else "the reference model"
        if get_value(config, name) != get_value(config, trained):
            yield Refusal(
                option=name,
                kind=Kind.CONFLICT,
                why=f"must equal {trained}, because {what} is divided among the ranks as {section} is",
                use=f"set {trained} instead, or remove {name}",
                related=(trained,),
            )


RULES = [check_other_engine, check_compiled_layers, check_megatron, check_equal_layout]
