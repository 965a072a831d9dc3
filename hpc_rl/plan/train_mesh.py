"""Check a training mesh against its engine, the options, and the models that it divides. Pure.

A size that does not divide its dimension of the model (heads, layers, experts, …) is refused. The refusal
names the nearest mesh of the same number of ranks that does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hpc_rl.config.megatron_models import find_odd_layers, find_rotary_type
from hpc_rl.config.options.experiment import Config, has_trainer
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.config.rules.training_rules import find_trained_model, list_models
from hpc_rl.core.allocation import Allocation, Train, parse
from hpc_rl.core.backends import TRAIN_BACKENDS
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.plan.memory import Models, ModelShape
from hpc_rl.plan.schema import Plan

# rotary embeddings that depend on the longest row of a batch
BY_LENGTH = ("dynamic", "longrope")


_refuse = partial(Refusal, kind=Kind.CONFLICT, related=("allocation_mode",))


def check(config: Config, allocation: Allocation) -> Iterator[Refusal]:
    """Yield options that contradict the mesh, and sizes that do not divide it."""
    if train := allocation.train:
        for section, engine in list_models(config):
            if engine.backend not in ("", train.backend):
                why = f"contradicts allocation_mode {allocation}, which trains with {train.backend}"
                use = f"set {train.backend}, or remove the option"
                yield _refuse(option=f"{section}.backend", value=engine.backend, why=why, use=use)
            yield from _check_sizes(section, engine, train)
            yield from _check_context(section, engine, train, config.cluster.n_gpus_per_node > 0)


def _check_sizes(section: str, engine: TrainEngineConfig, train: Train) -> Iterator[Refusal]:
    """Yield replica groups and virtual stages that do not suit the mesh."""
    groups, parts = engine.fsdp.replicate_size, engine.megatron.virtual_pipeline_size
    if train.backend == "fsdp" and train.d and train.d % groups:
        fits = max(size for size in range(1, groups) if train.d % size == 0)
        why = f"must divide the data ranks, d {train.d} of {train}"
        yield _refuse(option=f"{section}.fsdp.replicate_size", value=groups, why=why, use=f"use {fits}")
    if train.backend == "megatron" and parts > 1 and train.p == 1:
        name, why = f"{section}.megatron.virtual_pipeline_size", f"has no effect with {train}"
        why += ", which has one stage"
        yield _refuse(
            option=name,
            value=parts,
            kind=Kind.NO_EFFECT,
            why=why,
            use="set p to 2 or more in allocation_mode, or remove the option",
        )


def _check_context(section: str, engine: TrainEngineConfig, train: Train, on_gpus: bool) -> Iterator[Refusal]:
    """Yield an attention without packed rows, which context parallelism in fsdp needs."""
    if train.backend != "fsdp" or train.c == 1:
        return
    fits = f"or d in place of c: {replace(train, d=train.d and train.d * train.c, c=1)}"
    why = f"can't be used with {train}"
    if engine.attn_impl in ("eager", "flex_attention"):
        use = f"use sdpa, {fits}"
        yield _refuse(option=f"{section}.attn_impl", value=engine.attn_impl, why=why, use=use)
    if on_gpus and engine.dtype == "float32":
        use = f"use bfloat16, {fits}"
        yield _refuse(option=f"{section}.dtype", value="float32", why=f"{why} on GPUs", use=use)


# -- the models


def find_problems(config: Config, plan: Plan, contents: Models) -> Iterator[Refusal]:
    """Yield why a mesh can't hold the models of a trial; models without a known config.json are skipped."""
    if not has_trainer(config):
        return
    train = parse(plan.allocation).train or Train("fsdp")
    stages = find_trained_model(config)[1].megatron.virtual_pipeline_size
    for section, engine in list_models(config):
        content = contents.get(engine.path)
        if content is None:
            continue
        yield from _check_model(section, engine, train, content, stages)


def _check_model(
    section: str, engine: TrainEngineConfig, train: Train, content: Mapping[str, Any], stages: int
) -> Iterator[Refusal]:
    refuse = partial(_refuse, option=f"{section}.path", value=engine.path)
    by_fsdp = f"use {Train('fsdp', d=train.num_units)}"
    backend, kind = TRAIN_BACKENDS[train.backend], str(content.get("model_type", ""))
    if backend.model_types and kind not in backend.model_types:
        known = (
            f"the {train.backend} backend can't train {kind} models, only {', '.join(backend.model_types)}"
        )
        yield refuse(why=f": {known}", use=by_fsdp)
        return
    if train.backend == "megatron" and (odd := find_odd_layers(content)):
        named = ", ".join(f"{key}: {value}" for key, value in odd.items())
        why = f": the megatron backend can't train a model with {named} (config.json)"
        yield refuse(why=why, use=by_fsdp)
        return
    for letter, kinds in backend.divided_types.items():
        if getattr(train, letter) > 1 and kind not in kinds:
            known = f"{train.backend} can't divide {kind} models by {letter}, only {', '.join(kinds)}"
            yield refuse(why=f": {known}", use=f"use {Train(train.backend, d=train.num_units)}")
            return
    is_packed = section != "ref" if train.backend == "megatron" else train.c > 1
    if is_packed and content.get("attention_dropout") and not engine.disable_dropout:
        use = f"set {section}.disable_dropout true, or use fsdp:d{train.num_units}"
        why = f"has attention_dropout {content['attention_dropout']}, which {train} does not support"
        related = (f"{section}.disable_dropout", "allocation_mode")
        yield refuse(why=why, use=use, related=related)
    if train.backend == "fsdp" and train.c > 1 and (kind := find_rotary_type(content)) in BY_LENGTH:
        # each rank would rotate its tokens by the longest row of its part
        yield refuse(why=f"has rope_type {kind}, which does not work with c in allocation_mode", use=by_fsdp)
    shape = ModelShape.of(content)
    if shape is None:
        return
    found = list(find_remainders(train, shape, stages))
    if not found and section != "ref":
        yield from _check_recomputation(section, engine, train, shape)
    if found:
        other, parts = find_nearest(train, shape, stages), ""
        if other is None and stages > 1:
            other, parts = find_nearest(train, shape), " with megatron.virtual_pipeline_size 1"
        fits = (
            f"use {other}{parts}"
            if other
            else "no allocation with this number of ranks fits; use another number"
        )
        yield refuse(why=f"has {'; '.join(found)}: {train} can't divide it", use=fits)


def _check_recomputation(
    section: str, engine: TrainEngineConfig, train: Train, shape: ModelShape
) -> Iterator[Refusal]:
    options = engine.megatron
    layers, several = (
        shape.num_layers // (train.p * options.virtual_pipeline_size),
        options.recompute_num_layers,
    )
    is_uniform = options.recompute_granularity == "full" and options.recompute_method == "uniform"
    is_uniform = is_uniform and train.backend == "megatron" and engine.gradient_checkpointing
    if is_uniform and several and layers % several:
        of = f"the {layers} layers of each part of a stage of {train}"
        use = max(size for size in _list_divisors(layers, several))
        name = f"{section}.megatron.recompute_num_layers"
        yield _refuse(option=name, value=several, why=f"must divide {of}", use=f"use {use}")


def find_remainders(train: Train, shape: ModelShape, stages: int = 1) -> Iterator[str]:
    """Yield the sizes of a model that a mesh does not divide; `stages` is the number of virtual stages."""
    t, c, p, e = train.t, train.c, train.p, train.e
    is_fsdp = train.backend == "fsdp"
    per_rank = t * c if is_fsdp else t  # a rank exchanges its heads for more tokens
    by = f"t {t} * c {c}" if is_fsdp and c > 1 else f"t {t}"
    if shape.num_heads % per_rank:
        yield f"{shape.num_heads} attention heads, not a multiple of {by}"
    if shape.num_key_heads % t and (is_fsdp or t % shape.num_key_heads):
        yield f"{shape.num_key_heads} key-value heads, which t {t} does not divide"
    elif is_fsdp and c > 1 and (shape.num_key_heads // t) % c and c % (shape.num_key_heads // t):
        yield f"{shape.num_key_heads} key-value heads, which t {t} and c {c} do not divide"
    if is_fsdp and shape.vocabulary % t:
        yield f"a vocabulary of {shape.vocabulary}, not a multiple of t {t}"
    if shape.mlp_width % t and (is_fsdp or not shape.num_experts):
        yield f"an MLP of width {shape.mlp_width}, not a multiple of t {t}"
    if shape.num_layers % (p * stages):
        by = f"p {p} * megatron.virtual_pipeline_size {stages}" if stages > 1 else f"p {p}"
        yield f"{shape.num_layers} layers, not a multiple of {by}"
    if e > 1 and not shape.num_experts:
        yield f"no experts, but e is {e}"
    elif shape.num_experts % e:
        yield f"{shape.num_experts} experts, not a multiple of e {e}"
    if shape.num_experts and shape.expert_width % (expert_tensor := train.etp if e > 1 else t):
        yield f"experts of width {shape.expert_width}, not a multiple of their t {expert_tensor}"


def find_nearest(train: Train, shape: ModelShape, stages: int = 1) -> Train | None:
    """Return the nearest mesh with the same number of ranks that divides the model; None if none does.

    Only d may grow. With several virtual stages the mesh keeps several pipeline stages.
    """
    units = train.num_units
    if units is None:
        return None
    sizes = (_list_divisors(units, most) for most in (train.t, train.c, train.p, train.e))
    found = []
    for t, c, p, e in itertools.product(*sizes):
        if stages > 1 and p == 1:
            continue
        for expert_tensor in dict.fromkeys((t, train.etp)) if e > 1 else (1,):
            if units % (t * c * p) or units % (expert_tensor * e * p):
                continue
            other = replace(train, d=units // (t * c * p), t=t, c=c, p=p, e=e, etp=expert_tensor)
            if not any(find_remainders(other, shape, stages)):
                found.append(other)
    return min(found, key=lambda other: _measure_change(train, other), default=None)


def _list_divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def _measure_change(train: Train, other: Train) -> float:
    return sum(abs(math.log(getattr(train, letter) / getattr(other, letter))) for letter in "tcpe")
