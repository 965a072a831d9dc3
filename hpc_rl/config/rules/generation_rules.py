"""Rules about generation: groups, sampling, lengths, the rollout role and the options of servers."""

import difflib
import re
from collections.abc import Collection, Iterator

from hpc_rl.config.rules.consistency import server_backend
from hpc_rl.config.sections.experiment import Config, GRPOConfig, value_of
from hpc_rl.config.sections.inference import SGLangConfig
from hpc_rl.config.tables.sglang_versions import ALSO, DROPPED, FLAGS, SET_BY_THE_TRIAL

BUILT_IN = {"workflow": ["single_turn"], "reward_fn": ["exact_match", "contains"]}
_IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
_EMBEDDED: dict[
    str, tuple[tuple, str]
] = {  # sampling options that embedded servers lack: the values that change nothing, and what to use
    "stop": ((None, []), "use gconfig.stop_token_ids, or sglang servers"),
    "frequency_penalty": ((0.0,), "use sglang servers"),
    "min_p": ((0.0,), "use sglang servers"),
    "repetition_penalty": ((1.0,), "use sglang servers"),
}


def no_servers(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if isinstance(config, GRPOConfig):
        return
    defaults = SGLangConfig()  # an option at its default, as `config show` prints it, changes nothing
    for name in sorted(explicit):
        section, _, option = name.rpartition(".")
        if section == "sglang" and value_of(config, name) != getattr(defaults, option):
            yield f"{name} has no effect: trainer {config.trainer} has no generation servers; omit it."
            return


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
    if actor.group_size not in (None, n_samples):
        yield (
            f"actor.group_size {actor.group_size} must equal gconfig.n_samples {n_samples}; "
            "omit it: it defaults to that."
        )
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
    g, actor = config.gconfig, config.actor
    if g.greedy or g.temperature == 0:
        option = "gconfig.greedy true" if g.greedy else "gconfig.temperature 0"
        equal = f"all {g.n_samples} samples of a prompt would be equal, so nothing is learned"
        yield f"{option}: {equal}; use a temperature above 0."
    elif actor.temperature not in (None, g.temperature):
        yield (
            f"actor.temperature {actor.temperature} must equal gconfig.temperature {g.temperature}; "
            "omit it: it defaults to that."
        )
    if g.min_new_tokens > g.max_new_tokens:
        most = f"gconfig.max_new_tokens {g.max_new_tokens}"
        yield f"gconfig.min_new_tokens {g.min_new_tokens} must not exceed {most}."


def lengths(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    new, total = config.gconfig.max_new_tokens, config.gconfig.max_tokens
    limit, context = config.actor.mb_spec.max_tokens_per_mb, config.sglang.context_length
    if new >= total:
        yield f"gconfig.max_new_tokens {new} leaves no room for a prompt: gconfig.max_tokens is {total}."
    if limit is not None and limit <= new:
        yield f"actor.mb_spec.max_tokens_per_mb {limit} can't hold gconfig.max_new_tokens {new} and a prompt."
    if server_backend(config) != "embedded" and context is not None and new >= context:
        yield f"gconfig.max_new_tokens {new} leaves no room for a prompt: sglang.context_length is {context}."


def rollout(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    options, batch_size = config.rollout, config.train_dataset.batch_size
    if options.consumer_batch_size not in (None, batch_size):
        yield (
            f"rollout.consumer_batch_size {options.consumer_batch_size} must equal train_dataset.batch_size "
            f"{batch_size}; omit it: it defaults to that."
        )
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
    if sglang.model_path not in ("", config.actor.path):
        yield (
            f"sglang.model_path {sglang.model_path} must equal actor.path {config.actor.path}; "
            "omit it: it defaults to that."
        )
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
    if server_backend(config) == "embedded":
        for name, (neutral, instead) in _EMBEDDED.items():
            if getattr(g, name) not in neutral:
                yield f"gconfig.{name} {getattr(g, name)} can't be used with embedded servers; {instead}."


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
