"""Rules about generation: groups, sampling, lengths, the rollout role and the options of servers."""

import difflib
import re
from collections.abc import Collection, Iterator

from hpc_rl.allocation import SERVER_BACKENDS
from hpc_rl.config.rules.consistency import given, server_backend, server_context
from hpc_rl.config.sections.experiment import Config, GRPOConfig
from hpc_rl.config.sections.inference import GenerationHyperparameters, SGLangConfig
from hpc_rl.config.tables.sglang_versions import ALSO, DROPPED, FLAGS, SET_BY_THE_TRIAL

BUILT_IN = {"workflow": ["single_turn"], "reward_fn": ["exact_match", "contains"]}
_IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"


def no_servers(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if isinstance(config, GRPOConfig):
        return
    sections = tuple(f"{backend.section}." for backend in SERVER_BACKENDS.values())
    for name in given(config, explicit, sections)[:1]:
        yield f"{name} has no effect: trainer {config.trainer} has no generation servers; omit it."


def devices(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    if config.cluster.n_gpus_per_node:
        return
    backend, allowed = config.sglang.attention_backend, ("torch_native", "intel_amx")
    without = "can't be used without GPUs (cluster.n_gpus_per_node 0)"
    if backend is not None and backend not in allowed:
        yield f"sglang.attention_backend {backend} {without}; allowed: {', '.join(allowed)}."
    if config.sglang.dtype == "float16":
        yield f"sglang.dtype float16 {without}; allowed: bfloat16, float32."


def groups(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    actor, n_samples = config.actor, config.gconfig.n_samples
    for name, norm in (("reward_norm", actor.reward_norm), ("adv_norm", actor.adv_norm)):
        if norm and "group" in (norm.mean_level, norm.std_level) and n_samples < 2:
            yield f"gconfig.n_samples {n_samples}: actor.{name} normalizes by group; use at least 2."
    rows, parts = config.train_dataset.batch_size * n_samples, actor.ppo_n_minibatches
    if rows % parts:
        most = min(parts, rows)
        # The bound keeps the search short for absurd numbers.
        nearest = next((n for n in range(most, max(0, most - 100_000), -1) if rows % n == 0), 1)
        product = f"train_dataset.batch_size * gconfig.n_samples = {rows} rows"
        yield f"actor.ppo_n_minibatches {parts} must divide {product}; the nearest that does is {nearest}."


def sampling(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    g = config.gconfig
    if g.greedy or g.temperature == 0:
        option = "gconfig.greedy true" if g.greedy else "gconfig.temperature 0"
        equal = f"all {g.n_samples} samples of a prompt would be equal, so nothing is learned"
        yield f"{option}: {equal}; use a temperature above 0."
    if g.min_new_tokens > g.max_new_tokens:
        most = f"gconfig.max_new_tokens {g.max_new_tokens}"
        yield f"gconfig.min_new_tokens {g.min_new_tokens} must not exceed {most}."


def lengths(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    new, total = config.gconfig.max_new_tokens, config.gconfig.max_tokens
    limit, (option, context) = config.actor.mb_spec.max_tokens_per_mb, server_context(config)
    if new >= total:
        yield f"gconfig.max_new_tokens {new} leaves no room for a prompt: gconfig.max_tokens is {total}."
    if limit is not None and limit <= new:
        yield f"actor.mb_spec.max_tokens_per_mb {limit} can't hold gconfig.max_new_tokens {new} and a prompt."
    if context is not None and new >= context:
        yield f"gconfig.max_new_tokens {new} leaves no room for a prompt: {option} is {context}."


def rollout(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    options, batch_size = config.rollout, config.train_dataset.batch_size
    if options.queue_size is not None and options.queue_size < batch_size:
        size = options.queue_size
        yield f"rollout.queue_size {size} can't hold a batch: train_dataset.batch_size is {batch_size}."
    ahead = options.max_head_offpolicyness
    if not config.async_training and ahead:
        yield (
            f"rollout.max_head_offpolicyness {ahead} contradicts async_training false; "
            "use 0, or async_training true."
        )
    for name, known in BUILT_IN.items():
        value = getattr(options, name)
        if value not in known and not re.fullmatch(_IMPORT_PATH, value):
            near = difflib.get_close_matches(value, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            allowed = f"allowed: {', '.join(known)}, or package.module:name of your own"
            yield f"rollout.{name} {value!r} is not known; {allowed}.{hint}"


def servers(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    g, sglang = config.gconfig, config.sglang
    for name, why in DROPPED.get(sglang.version, {}).items():
        value = getattr(sglang, name)
        if value:
            shown = str(value).lower()
            yield f"sglang.{name} {shown} can't be used: SGLang {sglang.version} has no such option; {why}."
    yield from _sglang_extra_args(sglang)
    if g.stop and sglang.skip_tokenizer_init:
        yield (
            "gconfig.stop needs the server's tokenizer: set sglang.skip_tokenizer_init to false, "
            "or use gconfig.stop_token_ids."
        )
    used, defaults = server_backend(config), GenerationHyperparameters()
    for name, instead in SERVER_BACKENDS[used].lacks.items() if used else ():
        value = getattr(g, name)
        if value and value != getattr(defaults, name):
            yield f"gconfig.{name} {value} can't be used with {used} servers; {instead}."


def _sglang_extra_args(sglang: SGLangConfig) -> Iterator[str]:
    # SGLang would silently take the later one of two equal flags.
    options = {flag: name for name, flag in FLAGS[sglang.version].items() if isinstance(flag, str)}
    for arg in sglang.extra_args:
        came = arg.partition("=")[0]
        flag = ALSO.get(came, came)
        name = options.get(flag)
        if flag in SET_BY_THE_TRIAL or (name and not hasattr(sglang, name)) or name == "model_path":
            yield f"sglang.extra_args: {came} is derived from the plan and can't be given."
        elif name and getattr(sglang, name) not in (None, False):
            yield f"sglang.extra_args: {came} can't be given; use sglang.{name}."


RULES = [no_servers]
GRPO_RULES = [devices, groups, sampling, lengths, rollout, servers]
