"""Rules about models under training and the reference model: sections `actor`, `ref` and `model`. Part of check.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from hpc_rl.config.loading.fields import default_of
from hpc_rl.config.sections.experiment import Config, GRPOConfig, RWConfig
from hpc_rl.config.sections.training import TrainEngineConfig

_ONLY_FOR_TRAINING = ("gradient_checkpointing", "disable_dropout", "grad_reduce_dtype")
_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def trained(config: Config) -> tuple[str, TrainEngineConfig]:
    """Name and section of the model that the trial trains."""
    return ("actor", config.actor) if isinstance(config, GRPOConfig) else ("model", config.model)


def models(config: Config) -> Iterator[tuple[str, TrainEngineConfig]]:
    """Name and section of each model in the trainer's ranks."""
    yield trained(config)
    if isinstance(config, GRPOConfig) and config.ref is not None:
        yield "ref", config.ref


def changed(section: Any) -> list[str]:
    """Options of a section that are not at their default. Not what somebody wrote: a file may spell every default out."""
    found = []
    for field in dataclasses.fields(section):
        default = default_of(field)
        if default is not dataclasses.MISSING and getattr(section, field.name) != default:
            found.append(field.name)
    return found


def adapted(config: Config) -> dict[str, tuple[Any, str]]:
    """Option -> (value that its default becomes, why; empty where there is nothing to tell)."""
    wanted: dict[str, tuple[Any, str]] = {}
    if not config.cluster.n_gpus_per_node:
        for section, _ in models(config):
            wanted |= {
                f"{section}.dtype": ("float32", "the plan has no GPUs"),
                f"{section}.attn_impl": ("sdpa", "the plan has no GPUs"),
            }
    if isinstance(config, RWConfig):
        wanted |= {"model.is_critic": (True, ""), "model.mb_spec.granularity": (2, "")}
        wanted |= {f"{section}.type": ("rw", "") for section in ("train_dataset", "valid_dataset")}
    wanted |= {
        name: (bound, f"{limit} holds no more")
        for name, bound, limit in sorted(too_long(config), key=lambda one: -one[1])
    }
    if config.total_train_steps is not None or config.total_train_n_seqs is not None:
        wanted["total_train_epochs"] = (None, "")
    if isinstance(config, GRPOConfig) and config.ref is None and config.actor.compat is None:
        wanted["actor.kl_ctl"] = (0.0, "there is no section ref, so no reference model")
    elif isinstance(config, GRPOConfig) and config.actor.beta:
        wanted["actor.kl_ctl"] = (0.0, "actor.beta is the KL term, in the loss")
    if isinstance(config, GRPOConfig) and config.actor.use_decoupled_loss:
        wanted["actor.recompute_logprob"] = (True, "")
    return wanted


def too_long(config: Config) -> Iterator[tuple[str, int, str]]:
    """(Option, what it can be at most, the option that bounds it) where a sequence could be longer than a micro-batch."""
    for section, engine in models(config):
        name, limit = f"{section}.mb_spec.max_tokens_per_mb", engine.mb_spec.max_tokens_per_mb
        if limit is None:
            continue
        if isinstance(config, GRPOConfig):
            g, prompt = config.gconfig, config.train_dataset.max_length
            longest = g.max_tokens if prompt is None else min(g.max_tokens, prompt + g.max_new_tokens)
            if longest > limit > g.max_new_tokens:  # where not even a completion fits, `lengths` says so
                yield "gconfig.max_tokens", limit, name
            continue
        bound = limit // 2 if isinstance(config, RWConfig) else limit  # a pair stays together
        for dataset in ("train_dataset", "valid_dataset"):
            rows = getattr(config, dataset)
            if rows is not None and (rows.max_length is None or rows.max_length > bound) and bound:
                yield f"{dataset}.max_length", bound, name


def notes(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """What was written and changes nothing, where that is harmless."""
    if not isinstance(config, GRPOConfig):
        return
    yield from _actor_notes(config)
    if config.ref is None:
        return
    if config.actor.kl_ctl and config.actor.beta:
        yield "actor.kl_ctl and actor.beta are both set: the KL term counts twice, in the reward and in the loss."
    if not (config.actor.kl_ctl or config.actor.beta):
        yield "ref has no effect, and the reference model is not loaded: actor.kl_ctl and actor.beta are 0."
    idle = [f"ref.{name}" for name in _ONLY_FOR_TRAINING if name in changed(config.ref)]
    if idle:
        yield f"{', '.join(idle)}: no effect, for the reference model is not trained."


def _actor_notes(config: GRPOConfig) -> Iterator[str]:
    actor = config.actor
    for name, norm in (("reward_norm", actor.reward_norm), ("adv_norm", actor.adv_norm)):
        idle = (
            [one for one in ("std_unbiased", "eps") if one in changed(norm)]
            if norm and norm.std_level is None
            else []
        )
        if idle:
            yield f"actor.{name}.{', '.join(idle)}: no effect, for std_level is null."
    if not actor.overlong_reward_penalty:
        for name in ("overlong_tokens", "overlong_penalty_factor"):
            if getattr(actor, name) is not None:
                yield f"actor.{name} has no effect: actor.overlong_reward_penalty is false."
    if actor.compat and actor.kl_ctl and config.ref is None:
        yield f"actor.kl_ctl {actor.kl_ctl:g} without a reference model rewards improbable tokens, as AReaL did (compat: areal)."


# -- rules


def rewards(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """What shapes rewards and the loss of a policy."""
    if not isinstance(config, GRPOConfig):
        return
    actor, budget, n_samples = config.actor, config.gconfig.max_new_tokens, config.gconfig.n_samples
    if actor.max_new_tokens not in (None, budget):
        yield f"actor.max_new_tokens {actor.max_new_tokens} must equal gconfig.max_new_tokens {budget}; leave it out, it follows."
    if actor.overlong_reward_penalty:
        lacking = [
            f"actor.{n}" for n in ("overlong_tokens", "overlong_penalty_factor") if getattr(actor, n) is None
        ]
        if lacking:
            yield f"actor.overlong_reward_penalty needs {' and '.join(lacking)}: how long the tail is, and what its end costs."
        elif (actor.overlong_tokens or 0) > budget:
            yield f"actor.overlong_tokens {actor.overlong_tokens} is above gconfig.max_new_tokens {budget}: it is its tail."
    for name, norm in (("reward_norm", actor.reward_norm), ("adv_norm", actor.adv_norm)):
        if norm and norm.group_size not in (None, n_samples):
            follows = "leave it out, it follows"
            yield f"actor.{name}.group_size {norm.group_size} must equal gconfig.n_samples {n_samples}; {follows}."
        if norm and norm.mean_leave1out and norm.mean_level is None:
            yield f"actor.{name}.mean_leave1out has no effect: mean_level is null."
    if actor.log_agent_stats != bool(actor.log_agent_stats_keys):
        have, lack = ("log_agent_stats", "log_agent_stats_keys")[:: 1 if actor.log_agent_stats else -1]
        yield f"actor.{have} has no effect without actor.{lack}: set both, or neither."
    if actor.compat and actor.loss_aggregation != "token_mean":
        yield f"actor.loss_aggregation {actor.loss_aggregation} is not AReaL's: with actor.compat areal use token_mean."
    if actor.dynamic_sampling and n_samples < 2:
        yield f"gconfig.n_samples {n_samples}: actor.dynamic_sampling would drop every group of one; use at least 2."


def micro_batches(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """The longest sequence fits into a micro-batch: a step would end the training there."""
    for name, bound, limit in too_long(config):
        section, option = name.split(".")
        value = getattr(getattr(config, section), option)
        yield f"{name} {value}: {limit} holds at most {bound} tokens of a sequence; lower the one, or raise the other."


def reference_model(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """A KL term without a reference model would reward improbable tokens, whatever they are."""
    if not isinstance(config, GRPOConfig):
        return
    for name in ("kl_ctl", "beta"):
        value = getattr(config.actor, name)
        if value and config.ref is None and not (name == "kl_ctl" and config.actor.compat):
            yield f"actor.{name} {value:g} needs a reference model: add a section ref with ref.path, or set actor.{name} to 0."
    for name in (
        changed(config.ref.optimizer) if config.ref is not None and config.ref.optimizer is not None else ()
    ):
        if name != "type":
            yield f"ref.optimizer.{name}: the reference model is not trained; leave ref.optimizer out, or set it to null."


def reference_micro_batches(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, GRPOConfig) or config.ref is None:
        return
    limit, new = config.ref.mb_spec.max_tokens_per_mb, config.gconfig.max_new_tokens
    if limit is not None and limit <= new:
        yield f"ref.mb_spec.max_tokens_per_mb {limit} can't hold gconfig.max_new_tokens {new} and a prompt."


def optimizers(config: Config, explicit: Collection[str]) -> Iterator[str]:
    section, engine = trained(config)
    optimizer = engine.optimizer
    if optimizer is None or optimizer.type == "empty":
        what = "null" if optimizer is None else ".type empty"
        yield f"{section}.optimizer{' ' if optimizer is None else ''}{what}: nothing would be trained; use type adam."
        return
    if optimizer.offload and not config.cluster.n_gpus_per_node:
        yield f"{section}.optimizer.offload has no effect without GPUs (cluster.n_gpus_per_node 0): everything is in CPU memory."
    for name in _LOSS_SCALE:
        if name in changed(optimizer) and engine.dtype != "float16":
            yield f"{section}.optimizer.{name} has no effect with dtype {engine.dtype}: only float16 needs loss scaling."
    if engine.dtype == "float16" and optimizer.min_loss_scale > optimizer.initial_loss_scale:
        yield f"{section}.optimizer.min_loss_scale is above initial_loss_scale {optimizer.initial_loss_scale:g}."
    if optimizer.lr_scheduler_type == "constant" and optimizer.min_lr_ratio:
        yield f"{section}.optimizer.min_lr_ratio has no effect with lr_scheduler_type constant; use linear or cosine."


def devices(config: Config, explicit: Collection[str]) -> Iterator[str]:
    allowed = ["eager", "sdpa", "flash_attention_2"] if config.cluster.n_gpus_per_node else ["eager", "sdpa"]
    where = "" if config.cluster.n_gpus_per_node else " without GPUs (cluster.n_gpus_per_node 0)"
    for section, engine in models(config):
        if engine.attn_impl not in allowed:
            yield f"{section}.attn_impl {engine.attn_impl} can't be used{where}; allowed: {', '.join(allowed)}."


def engines(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """What this engine can't do."""
    for section, engine in models(config):
        if engine.ds_auto_tp.autotp_size != 1:
            yield (
                f"{section}.ds_auto_tp.autotp_size {engine.ds_auto_tp.autotp_size}: the DeepSpeed backend and tensor parallelism "
                "are not implemented; use 1, and more data-parallel ranks."
            )
        if engine.fsdp.offload_params:
            yield f"{section}.fsdp.offload_params is not implemented; use {section}.optimizer.offload, or more ranks."
        spec = engine.mb_spec
        if engine.pad_to_maximum and spec.max_tokens_per_mb is None:
            yield f"{section}.pad_to_maximum has no effect without {section}.mb_spec.max_tokens_per_mb: set that too."
        yield from _critic(config, section, engine)


def _critic(config: Config, section: str, engine: TrainEngineConfig) -> Iterator[str]:
    granularity = engine.mb_spec.granularity
    if isinstance(config, RWConfig):
        if not engine.is_critic:
            yield f"{section}.is_critic false: a reward model ends in one number; leave it out, it is true here."
        if granularity % 2:
            yield f"{section}.mb_spec.granularity {granularity} would part chosen from rejected; leave it out, or use 2."
        return
    if engine.is_critic:
        other = (
            "a critic is not implemented; leave it out: without one, advantages come from the group"
            if section == "actor"
            else ""
        )
        yield f"{section}.is_critic true: {other or 'only a reward model (trainer: rw) is one; leave it out'}."
    if granularity != 1:
        yield f"{section}.mb_spec.granularity {granularity}: only a reward model has sequences that belong together; use 1."


TRAIN_RULES = [engines, rewards, micro_batches, reference_model, reference_micro_batches, optimizers, devices]
