"""Rules about `pools`: their models and endpoints, their servers in `allocation_mode`, and their users."""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_rl.config.compat.areal_options import ONE_VALUE
from hpc_rl.config.load.fields import list_hints, suggest_name
from hpc_rl.config.load.parser import convert_value, describe_allowed
from hpc_rl.config.load.source import add_origin
from hpc_rl.config.options.experiment import Config, GRPOConfig, TeacherConfig
from hpc_rl.config.options.pools import PoolConfig
from hpc_rl.config.pool_view import (
    find_teacher_pool,
    find_trained_pool_in,
    list_reward_models,
    parse_value,
    view_pool,
)
from hpc_rl.config.row_shapes import get_messages, load_named_rows
from hpc_rl.config.rules import sglang_rules, vllm_rules
from hpc_rl.config.rules.consistency import find_server_backend, is_default, list_given, list_server_pools
from hpc_rl.config.rules.dataset_rules import has_chat_template
from hpc_rl.core.allocation import Allocation, Servers, Train, parse
from hpc_rl.core.backends import SERVER_BACKENDS
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import UNSET, Kind, Refusal

_OF_ENDPOINTS = ("model", "api_key_env")
_OF_SERVERS = ("tokenizer_path", "stop_token_ids", "python", "options")
_OF_ANSWERS = ("max_new_tokens", "temperature", "top_p", "stop_token_ids")
_OF_BACKENDS = [*sglang_rules.GRPO_RULES, *vllm_rules.GRPO_RULES]
_URL = r"https?://[^/\s@?#]+(/[^\s?#]*)?"  # clients append paths


def check_sources(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    for key, pool in config.pools.items():
        name = f"pools.{key}"
        if pool.path and pool.url:
            why = f"and {name}.url are both set, but the trial starts servers for a path and none for a URL"
            yield Refusal(
                option=f"{name}.path", kind=Kind.CONFLICT, why=why, use="remove one", related=(f"{name}.url",)
            )
        elif pool.url:
            asks_tokens = key == find_teacher_pool(config) and config.actor.algorithm != "sft_distill"
            yield from _check_endpoint(name, pool, asks_tokens)
        elif pool.path:
            for option in _OF_ENDPOINTS:
                if getattr(pool, option):
                    yield _refuse_idle(f"{name}.{option}", f"has no effect without {name}.url", f"{name}.url")
        else:
            why = f"needs {name}.path, the model of its servers, or {name}.url of an endpoint"
            sources = (f"{name}.path", f"{name}.url")
            yield Refusal(option=name, kind=Kind.MISSING, why=why, related=sources)


def _refuse_idle(option: str, why: str, *related: str) -> Refusal:
    return Refusal(option=option, kind=Kind.NO_EFFECT, why=why, use="remove it", related=related)


def _check_endpoint(name: str, pool: PoolConfig, asks_tokens: bool) -> Iterator[Refusal]:
    for option in _OF_SERVERS:
        if getattr(pool, option) and not (option == "tokenizer_path" and asks_tokens):
            why = f"has no effect with {name}.url, because the trial does not start the servers of a URL"
            yield _refuse_idle(f"{name}.{option}", why, f"{name}.url")
    if not re.fullmatch(_URL, pool.url):
        use = "allowed: a URL such as http://host:8000/v1, without ? or #"
        yield Refusal(
            option=f"{name}.url", value=repr(pool.url), kind=Kind.VALUE, why="can't be used", use=use
        )
    if pool.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", pool.api_key_env):
        why = "must be the name of an environment variable, not the key that it holds"
        yield Refusal(option=f"{name}.api_key_env", kind=Kind.VALUE, why=why)


def check_servers(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    pools = list_server_pools(config)
    if not pools:
        return  # the plan refuses it
    is_derived = not config.allocation_mode.strip()
    train = Train("fsdp") if is_derived else parse(config.allocation_mode).train
    found, placed = Allocation(pools, train), [one.pool for one in pools]
    for name in placed:
        if name in config.pools and config.pools[name].url and not config.pools[name].path:
            shorter = Allocation(tuple(one for one in pools if one.pool != name), train)
            url = f"pools.{name}.url"
            yield Refusal(
                option="allocation_mode",
                value=found,
                kind=Kind.CONFLICT,
                why=f"has servers for pool {name}, but {url} names an endpoint that runs already",
                use=f"use {shorter}",
                related=(url,),
            )
    missing = [name for name, pool in config.pools.items() if pool.path and name not in placed]
    if missing:
        longer = Allocation((*pools, *(Servers(pools[0].backend, pool=name) for name in missing)), train)
        has = ", which is derived," if is_derived else f" {found}"
        yield Refusal(
            option=f"pools.{missing[0]}.path",
            kind=Kind.CONFLICT,
            why=f": allocation_mode{has} has no servers for this pool",
            use=f"use {longer}",
            related=("allocation_mode",),
        )
    if not isinstance(config, TeacherConfig) or "student" in config.pools:  # else teacher_rules ask for it
        try:
            find_trained_pool_in(config, found)
        except ConfigError as error:
            yield from error.refusals


def check_options(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse wrong options of a pool's servers: names and types first, else values."""
    known = {str(refusal) for rule in _OF_BACKENDS for refusal in rule(config, explicit)}
    for name, pool in config.pools.items():
        backend = find_server_backend(config, name)
        if pool.python and backend and not SERVER_BACKENDS[backend].is_process:
            why = f"has no effect, because {backend} servers use launcher.python"
            yield _refuse_idle(f"pools.{name}.python", why)
        if not pool.options or not backend:
            continue
        section = SERVER_BACKENDS[backend].section
        wrong = list(
            _check_server_options(f"pools.{name}", section, type(getattr(config, section)), pool.options)
        )
        if not wrong:
            view = view_pool(config, name)
            found = [refusal for rule in _OF_BACKENDS for refusal in rule(view, explicit)]
            new = (refusal for refusal in found if str(refusal) not in known)
            wrong = [_move(refusal, f"pools.{name}.options") for refusal in new]
        yield from wrong


def _move(refusal: Refusal, option: str) -> Refusal:
    """Return the refusal of an option of a section as one of the pool's option that replaces it."""
    why = f": {replace(refusal, use='')}".removesuffix(".")
    related = tuple(one for one in refusal.options if one != option)
    return replace(refusal, option=option, value=UNSET, why=why, related=related)


def check_sampling(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse options of a pool that its servers don't support."""
    for name, pool in config.pools.items():
        backend = find_server_backend(config, name)
        for option, instead in SERVER_BACKENDS[backend].lacks.items() if backend else ():
            value = getattr(pool, option, None)
            if value and not is_default(config, f"pools.{name}.{option}"):
                why = f"can't be used with {backend} servers"
                yield Refusal(
                    option=f"pools.{name}.{option}", value=value, kind=Kind.CONFLICT, why=why, use=instead
                )


def check_scoring(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse wrong or useless options of pools whose model scores completions."""
    for name in list_reward_models(config):
        pool, asks = f"pools.{name}", f": rollout.reward_fn {name} asks this pool for scores"
        if config.pools[name].url:
            yield Refusal(
                option=f"{pool}.url",
                kind=Kind.CONFLICT,
                why=f"{asks}, which an endpoint with OpenAI's API can't give",
                use=f"use {pool}.path, and servers for it",
                related=("rollout.reward_fn", f"{pool}.path"),
            )
        if name in _list_chat_pools(config):
            yield Refusal(
                option=pool,
                kind=Kind.CONFLICT,
                why=f"{asks}, but the workflow or the judge asks for answers",
                use="make a second pool for the answers",
                related=("rollout.reward_fn",),
            )
        for option in list_given(config, explicit, tuple(f"{pool}.{one}" for one in _OF_ANSWERS)):
            why = f"has no effect{asks}, not for texts"
            yield _refuse_idle(option, why, "rollout.reward_fn")


def _check_server_options(pool: str, section: str, cls: type, given: dict[str, str]) -> Iterator[Refusal]:
    kinds: dict[str, Any] = list_hints(cls)
    option = f"{pool}.options"
    for key, text in given.items():
        if key == "model_path":
            why = f": model_path can't be given, because it is {pool}.path; remove it"
            yield Refusal(option=option, kind=Kind.CONFLICT, why=why, related=(f"{pool}.path",))
        elif row := ONE_VALUE.get(f"{section}.{key}"):
            name = f"{section}.{key}"
            why, related = f": {name} {text} can't be used: {row.why}", (name, *row.related_options)
            yield Refusal(option=option, kind=Kind.UNSUPPORTED, why=why, related=related)
        elif key not in kinds:
            hint = suggest_name(key, kinds) or f"`hpc-rl submit --help {section}` lists them."
            why = f": {section} has no such option. {hint}"
            yield Refusal(option=f"{option}.{key}", kind=Kind.UNKNOWN, why=why, related=(option, section))
        elif reason := _explain_wrong_value(kinds[key], text):
            why, use = f": {key} {text!r} can't be used", f"allowed: {describe_allowed(kinds[key])}. {reason}"
            yield Refusal(option=option, kind=Kind.VALUE, why=why, use=use.strip())


def _explain_wrong_value(hint: Any, text: str) -> str:
    """Return why a text is not valid; empty if it is."""
    try:
        value = parse_value(hint, text)
    except ValueError:
        value = text
    try:
        convert_value(hint, add_origin(value, ""))
    except ValueError as error:
        return str(error) or " "
    return ""


def check_asked(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    rollout = config.rollout
    if ":" in rollout.workflow or ":" in rollout.reward_fn:  # the user's code may ask any pool
        return
    used = [*_list_chat_pools(config), *list_reward_models(config), find_teacher_pool(config)]
    for name in config.pools:
        if name not in used:
            others = f"rollout.workflow {rollout.workflow} and rollout.reward_fn {rollout.reward_fn}"
            why = f"has no effect: {others} ask no pool of that name"
            yield _refuse_idle(f"pools.{name}", why, "rollout.workflow", "rollout.reward_fn")


def _list_chat_pools(config: GRPOConfig) -> list[str]:
    """Return the pools that our own workflow and judge ask by chat."""
    found = ["student"] if isinstance(config, TeacherConfig) else []
    return found + ([config.rollout.judge.pool] if config.rollout.judge else [])


GRPO_RULES = [check_sources, check_servers, check_options, check_sampling, check_scoring, check_asked]


def check_chat_templates(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse models without a chat template that our own workflow or reward asks by chat."""
    if not isinstance(config, GRPOConfig):
        return
    teacher = ("actor.path", config.actor.path, "tokenizer_path", config.tokenizer_path)
    models = [teacher] if isinstance(config, TeacherConfig) else []
    scoring_chats = list_reward_models(config) if _has_chats(config) else []
    for name in dict.fromkeys(_list_chat_pools(config) + scoring_chats):
        pool = config.pools.get(name)
        if pool is not None and pool.path:
            option = f"pools.{name}"
            models.append((f"{option}.path", pool.path, f"{option}.tokenizer_path", pool.tokenizer_path))
    for name, path, option, own in models:
        folder = Path(own or path)

        # file_rules refuse a folder without a tokenizer
        if (folder / "tokenizer.json").is_file() and not has_chat_template(folder):
            add = f"add chat_template.jinja, or set {option} to another directory"
            yield Refusal(
                option=option if own else name,
                value=folder,
                kind=Kind.FILE,
                why=f"has no chat template, but this pool is asked with chat messages: {add}",
                related=() if own else (option,),
            )


def _has_chats(config: GRPOConfig) -> bool:
    dataset = config.train_dataset
    return any(get_messages(row) is not None for row in load_named_rows(dataset.path, dataset.columns))


FILE_RULES = [check_chat_templates]
