"""Rules about `pools`: what each is made of, its servers in `allocation_mode`, and who asks it."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hpc_rl.config.load.fields import did_you_mean, hints
from hpc_rl.config.load.parser import allowed, typed
from hpc_rl.config.load.source import with_origin
from hpc_rl.config.options.experiment import Config, GRPOConfig, TeacherConfig
from hpc_rl.config.options.pools import PoolConfig
from hpc_rl.config.pool_view import as_pool, reward_models, trained_pool_of, value_in_text
from hpc_rl.config.row_shapes import messages_of, named_rows
from hpc_rl.config.rules import consistency, sglang_rules, vllm_rules
from hpc_rl.config.rules.consistency import given, is_default, server_backend, server_pools
from hpc_rl.core.allocation import SERVER_BACKENDS, Allocation, Servers, Train, parse
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import read_json

_OF_ENDPOINTS = ("model", "api_key_env")
_OF_SERVERS = ("tokenizer_path", "stop_token_ids", "python", "options")
_OF_ANSWERS = ("max_new_tokens", "temperature", "top_p", "stop_token_ids")
_OF_BACKENDS = [consistency.unavailable, *sglang_rules.GRPO_RULES, *vllm_rules.GRPO_RULES]
_URL = r"https?://[^/\s@?#]+(/[^\s?#]*)?"  # paths are appended to it


def sources(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    for key, pool in config.pools.items():
        name = f"pools.{key}"
        if pool.path and pool.url:
            yield f"{name}.path and {name}.url can't both be set: its servers are here, or elsewhere."
        elif pool.url:
            yield from _endpoint(name, pool)
        elif pool.path:
            for option in _OF_ENDPOINTS:
                if getattr(pool, option):
                    yield f"{name}.{option} has no effect without {name}.url; omit it."
        else:
            yield f"{name} needs {name}.path, the model of its servers, or {name}.url of an endpoint."


def _endpoint(name: str, pool: PoolConfig) -> Iterator[str]:
    for option in _OF_SERVERS:
        if getattr(pool, option):
            yield f"{name}.{option} has no effect with {name}.url: servers elsewhere have their own; omit it."
    if not re.fullmatch(_URL, pool.url):
        yield f"{name}.url {pool.url!r} can't be used; allowed: a URL such as http://host:8000/v1, without ?."
    if pool.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", pool.api_key_env):
        yield f"{name}.api_key_env must be the name of an environment variable, not the key that it holds."


def servers(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    pools = server_pools(config)
    if not pools:
        return  # the plan refuses it
    is_derived = not config.allocation_mode.strip()
    train = Train("fsdp") if is_derived else parse(config.allocation_mode).train
    found, placed = Allocation(pools, train), [one.pool for one in pools]
    for name in placed:
        if name in config.pools and config.pools[name].url and not config.pools[name].path:
            shorter = Allocation(tuple(one for one in pools if one.pool != name), train)
            elsewhere = f"pools.{name}.url is an endpoint elsewhere"
            yield f"allocation_mode {found} has servers for {name}, but {elsewhere}; use {shorter}."
    missing = [name for name, pool in config.pools.items() if pool.path and name not in placed]
    if missing:
        longer = Allocation((*pools, *(Servers(pools[0].backend, pool=name) for name in missing)), train)
        has = ", which is derived," if is_derived else f" {found}"
        yield f"pools.{missing[0]}.path: allocation_mode{has} has no servers for it; use {longer}."
    if not isinstance(config, TeacherConfig) or "student" in config.pools:  # else teacher_rules ask for it
        try:
            trained_pool_of(config, found)
        except ConfigError as error:
            yield str(error)


def options(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the options of one pool's servers: names and types, else their values."""
    known = {refusal for rule in _OF_BACKENDS for refusal in rule(config, explicit)}
    for name, pool in config.pools.items():
        backend = server_backend(config, name)
        if pool.python and backend and not SERVER_BACKENDS[backend].is_process:
            yield f"pools.{name}.python has no effect: {backend} servers run in the role itself; omit it."
        if not pool.options or not backend:
            continue
        section = SERVER_BACKENDS[backend].section
        wrong = list(_wrong_options(f"pools.{name}", section, type(getattr(config, section)), pool.options))
        if not wrong:
            view = as_pool(config, name)
            found = [refusal for rule in _OF_BACKENDS for refusal in rule(view, explicit)]
            wrong = [f"pools.{name}.options: {refusal}" for refusal in found if refusal not in known]
        yield from wrong


def sampling(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    """Yield options of a pool that its servers can't do."""
    for name, pool in config.pools.items():
        backend = server_backend(config, name)
        for option, instead in SERVER_BACKENDS[backend].lacks.items() if backend else ():
            value = getattr(pool, option, None)
            if value and not is_default(config, f"pools.{name}.{option}"):
                yield f"pools.{name}.{option} {value} can't be used with {backend} servers; {instead}."


def scoring(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    """Yield what a pool can't be, or has no use for, whose model scores completions."""
    for name in reward_models(config):
        pool, asks = f"pools.{name}", f"rollout.reward_fn {name} asks it for scores"
        if config.pools[name].url:
            yield f"{pool}.url: {asks}, which OpenAI's API has not; use {pool}.path, and servers for it."
        if name in _asked_by_chat(config):
            yield f"{pool}: {asks}, but the workflow or the judge asks it by chat; use a pool for each."
        for option in given(config, explicit, tuple(f"{pool}.{one}" for one in _OF_ANSWERS)):
            yield f"{option} has no effect: {asks}, and it writes nothing; omit it."


def _wrong_options(pool: str, section: str, cls: type, given: dict[str, str]) -> Iterator[str]:
    kinds: dict[str, Any] = hints(cls)
    for key, text in given.items():
        if key == "model_path":
            yield f"{pool}.options: model_path is derived from {pool}.path and can't be given."
        elif key not in kinds:
            hint = did_you_mean(key, kinds) or f"`hpc-rl submit --help {section}` lists them."
            yield f"{pool}.options: {section} has no option {key}. {hint}"
        elif reason := _wrong_value(kinds[key], text):
            line = f"{pool}.options: {key} {text!r} can't be used; allowed: {allowed(kinds[key])}."
            yield f"{line} {reason}".strip()


def _wrong_value(hint: Any, text: str) -> str:
    """Return why a text can't stand for a value; empty where it can."""
    try:
        value = value_in_text(hint, text)
    except ValueError:
        value = text
    try:
        typed(hint, with_origin(value, ""))
    except ValueError as error:
        return str(error) or " "
    return ""


def asked(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    rollout = config.rollout
    if ":" in rollout.workflow or ":" in rollout.reward_fn:  # code of the user's may ask any
        return
    used = _asked_by_chat(config) + reward_models(config)
    for name in config.pools:
        if name not in used:
            others = f"rollout.workflow {rollout.workflow} and rollout.reward_fn {rollout.reward_fn}"
            yield f"pools.{name} has no effect: {others} ask no pool of that name; omit it."


def _asked_by_chat(config: GRPOConfig) -> list[str]:
    """Return the names of the pools that our own workflow and judge ask."""
    found = ["student"] if isinstance(config, TeacherConfig) else []
    return found + ([config.rollout.judge.pool] if config.rollout.judge else [])


GRPO_RULES = [sources, servers, options, sampling, scoring, asked]


def chat_templates(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """Yield models without a template that our own workflow and reward ask by chat."""
    if not isinstance(config, GRPOConfig):
        return
    teacher = ("actor.path", config.actor.path, "tokenizer_path", config.tokenizer_path)
    models = [teacher] if isinstance(config, TeacherConfig) else []
    scoring_chats = reward_models(config) if _has_chats(config) else []
    for name in dict.fromkeys(_asked_by_chat(config) + scoring_chats):
        pool = config.pools.get(name)
        if pool is not None and pool.path:
            option = f"pools.{name}"
            models.append((f"{option}.path", pool.path, f"{option}.tokenizer_path", pool.tokenizer_path))
    for name, path, option, own in models:
        folder = Path(own or path)
        found = read_json(folder / "tokenizer_config.json")
        has_one = (folder / "chat_template.jinja").is_file()
        has_one = has_one or (isinstance(found, dict) and bool(found.get("chat_template")))
        # file_rules refuse a folder without a tokenizer
        if (folder / "tokenizer.json").is_file() and not has_one:
            came = f"{option if own else name} {folder} has no chat template, but it is asked by chat"
            yield f"{came}: add chat_template.jinja, or set {option} to another directory."


def _has_chats(config: GRPOConfig) -> bool:
    dataset = config.train_dataset
    return any(messages_of(row) is not None for row in named_rows(dataset.path, dataset.columns))


FILE_RULES = [chat_templates]
