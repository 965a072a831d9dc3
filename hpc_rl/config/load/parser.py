"""The options of a configuration as a jsonargparse parser, made of the dataclasses.

`parse` makes a configuration of settings whose origin is known. The library judges types; added here are
limits, nearest choices, and refusals of all values at once, each with its origin.
"""

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

from jsonargparse import ArgumentError, ArgumentParser, set_loader, set_parsing_settings

from hpc_rl.config.compat.other_names import FIXED_NODES
from hpc_rl.config.load.fields import (
    FREE_KEY,
    alternatives,
    base_of,
    default_of,
    did_you_mean,
    extras_of,
    hints,
    is_mapping,
    is_optional,
    members_of,
    options,
    section_of,
)
from hpc_rl.config.load.source import Settings, SourceValue
from hpc_rl.config.load.stored import construct
from hpc_rl.config.options.limits import AsWritten, Grammar, Limits

LARGEST_INT = 2**53 - 1  # exact in every JSON reader
# Values come from our own readers: the library must not read the text 'null' or '5' as YAML once more.
set_loader("as_it_is", lambda text: text)
set_parsing_settings(docstring_parse_attribute_docstrings=True)


def config_parser(cls: type, chosen: Collection[str] | None = None, **settings: Any) -> ArgumentParser:
    """Return a parser of all options of a configuration, or the `chosen` ones; one group per section."""
    parser = ArgumentParser(exit_on_error=False, parser_mode="as_it_is", **settings)
    add_options(parser, cls, chosen)
    return parser


def add_options(parser: ArgumentParser, cls: type, chosen: Collection[str] | None = None) -> None:
    """Add the options of a configuration that a parser does not have yet."""
    present = parser._option_string_actions
    wanted = {name for name in options(cls) if f"--{name}" not in present}
    if chosen is not None:
        wanted &= set(chosen)
    for prefix, section, text in sections(cls):
        own = {name for name, hint in hints(section).items() if section_of(hint) is None}
        here = {name for name in own if prefix + name in wanted}
        if here:
            title = f"{prefix[:-1]}: {text.rstrip('.')}" if prefix else "top level"
            group = parser.add_argument_group(title.replace("%", "%%"))
            skip: set[str | int] = {name for name in hints(section) if name not in here}
            group.add_class_arguments(section, prefix[:-1] or None, as_group=False, skip=skip)


def sections(cls: type, prefix: str = "", text: str = "") -> Iterator[tuple[str, type, str]]:
    """Yield (prefix with its dot, dataclass, help) of the configuration and its sections, parents first.

    One member stands for those of a mapping of sections: its prefix is `pools.NAME.`.
    """
    yield prefix, cls, text
    texts = docstring_texts(cls) if any(section_of(hint) for hint in hints(cls).values()) else {}
    for name, hint in hints(cls).items():
        section = section_of(hint)
        if section:
            key = f"{FREE_KEY}." if is_mapping(hint) else ""
            yield from sections(section, f"{prefix}{name}.{key}", texts[name])


class Option(NamedTuple):
    """One option as help shows it."""

    name: str
    type: str
    default: str
    text: str


def describe_options(cls: type) -> list[Option]:
    """Return the options of one section, subsections left out."""
    texts = docstring_texts(cls)
    return [
        Option(field.name, allowed(hints(cls)[field.name]), _default(field), texts[field.name])
        for field in dataclasses.fields(cls)
        if section_of(hints(cls)[field.name]) is None
    ]


@cache
def docstring_texts(cls: type) -> dict[str, str]:
    """Return the texts below the fields of a dataclass and its bases, by field."""
    import docstring_parser

    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            params = docstring_parser.parse_from_object(base).params
            found |= {param.arg_name: " ".join((param.description or "").split()) for param in params}
    return found


def _default(field: dataclasses.Field) -> str:
    if field.default is None or isinstance(field.default, bool):
        return str(field.default).lower().replace("none", "null")
    if field.default is not dataclasses.MISSING:
        return str(field.default) or "empty"
    return "empty" if field.default_factory is not dataclasses.MISSING else "required"


def allowed(hint: Any) -> str:
    """Return a description of what an option accepts."""
    return " or ".join(_describe(kind) for kind in alternatives(hint))


def _describe(kind: Any) -> str:
    origin, base = typing.get_origin(kind), base_of(kind)
    if origin is typing.Annotated:
        limits = [str(extra) for extra in extras_of(kind) if isinstance(extra, Limits | Grammar)]
        # The format of a text says more than that it is one.
        is_format = any(isinstance(extra, Grammar) for extra in extras_of(kind))
        return ", ".join(limits if is_format else [_describe(base), *limits])
    if origin is Literal:
        return ", ".join(str(arg) or "empty" for arg in typing.get_args(kind))
    if origin is list:
        return f"a list ({_describe(typing.get_args(kind)[0])})"
    if origin is dict:
        return f"a mapping ({_describe(typing.get_args(kind)[1])})"
    names = {
        Any: "any value",
        bool: "true, false",
        int: "an integer",
        float: "a number",
        str: "text",
        types.NoneType: "null",
    }
    return names[kind]


def parse(cls: type, settings: Settings, refusals: list[str]) -> tuple[Any, list[str]]:
    """Return the configuration of the values that can be used, and these and every other refusal.

    With refusals, values that are missing are texts without a character.
    """
    known, is_unresolved = options(cls, members=members_of(cls, settings)), bool(refusals)
    refusals = list(refusals)
    tree: dict[str, Any] = {}
    for name, item in settings.items():
        if name not in known:
            continue  # it is among the refusals
        value: Any = None if item.value is None else {}
        if item.value == "???":
            refusals.append(f"{name} ({item.origin}): ??? stands for a value that is missing; set it.")
            continue
        if section_of(known[name]) is None:
            if is_unresolved and "${" in str(item.value):
                continue
            try:
                value = typed(known[name], item)
            except ValueError as error:
                # Of a value within the type that the option has, only its limits are wrong.
                value = item.shown if isinstance(error, OutOfLimits) else item
                line = f"{name} ({item.origin}): {value} can't be used; allowed: {allowed(known[name])}."
                is_range = name == "cluster.n_nodes" and re.fullmatch(r"\d+-\d+", str(item.value))
                refusals.append(f"{line} {FIXED_NODES if is_range else error}".strip())
                continue
        put(tree, name.split("."), value)
    if refusals:
        _complete(cls, tree)
    return construct(cls, tree), refusals


def _complete(cls: type, tree: dict[str, Any]) -> None:
    """Put empty texts where required options are missing, which are all texts."""
    for field in dataclasses.fields(cls):
        hint, is_needed = hints(cls)[field.name], default_of(field) is dataclasses.MISSING
        section = section_of(hint)
        if section is None:
            if is_needed:
                tree.setdefault(field.name, "")
        elif is_mapping(hint):
            for member in (tree.get(field.name) or {}).values():
                _complete(section, member)
        elif is_needed or (field.name in tree and not is_optional(hint)) or tree.get(field.name) is not None:
            tree[field.name] = tree.get(field.name) or {}
            _complete(section, tree[field.name])


def typed(hint: Any, item: SourceValue) -> Any:
    """Return a value as the option has it: text as in the source, integers for whole floats.

    Raises ValueError, with the reason where there is more to say than what is allowed.
    """
    kinds = [base_of(kind) for kind in alternatives(hint)]
    if any(isinstance(extra, AsWritten) for extra in extras_of(hint)) and not isinstance(item.value, str):
        return json.dumps(item.plain())
    value = item.value
    if hint is Any and isinstance(value, list | dict):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        made = {key: typed(Any, part) for key, part in parts}
        return made if isinstance(value, dict) else list(made.values())
    if isinstance(value, list | dict):
        inner = [typing.get_args(kind)[-1] for kind in kinds if typing.get_origin(kind) is type(value)]
        if inner and isinstance(value, dict):
            return {key: _member(inner[0], key, part) for key, part in value.items()}
        if inner:
            return [typed(inner[0], part) for part in value]
        # `a: b` on the command line is text where an option is
        value = item.plain() if item.text is None else item.text
    elif value is None:
        value = "" if item.is_argument and not item.text and not (is_optional(hint) or hint is Any) else None
    elif isinstance(value, float) and int in kinds and value.is_integer():
        value = int(value)
    elif str in kinds and item.text is not None and (item.is_argument or not isinstance(value, bool)):
        value = item.text
    value = _judged(hint, kinds, value)
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= char <= "\udfff" for char in value)):
        raise ValueError("It must be text without NUL, in UTF-8.")
    if isinstance(value, int | float) and not math.isfinite(value):
        raise ValueError("It must be finite.")
    is_bare_number = not isinstance(item.value, str) and not item.is_argument
    of_its_type = (kind for kind in alternatives(hint) if base_of(kind) is type(value))
    for limit in (limit for kind in of_its_type for limit in extras_of(kind)):
        reason = limit.refusal(value, is_bare_number)
        if reason is not None:
            # A number in place of a text is told by its type.
            raise ValueError(reason) if is_bare_number and isinstance(value, str) else OutOfLimits(reason)
    return value


class OutOfLimits(ValueError):
    """A value of the right type that the limits of its option leave out."""


def _member(hint: Any, key: str, item: SourceValue) -> Any:
    try:
        return typed(hint, item)
    except ValueError as error:
        raise type(error)(str(error) or f"{key} is {item}.") from error


def _judged(hint: Any, kinds: list[Any], value: Any) -> Any:
    """Return the value if the library accepts it. Raises ValueError, with the nearest choice."""
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError(f"Numbers end at {LARGEST_INT}.")
    choices = [one for kind in kinds if typing.get_origin(kind) is Literal for one in typing.get_args(kind)]
    try:
        # The library would convert them: the text 'null' to null, '1_0' to an integer, true to 1.
        if Any in kinds:
            return value
        if value is None or isinstance(value, bool | str):
            if type(value) in kinds or (isinstance(value, str) and value in choices):
                return value
        else:
            return _parser_of(hint).parse_object({"value": value})["value"]
    except ArgumentError:
        pass
    raise ValueError(did_you_mean(str(value), [str(one) for one in choices]))


@cache
def _parser_of(hint: Any) -> ArgumentParser:
    """Return a parser of one value."""
    parser = ArgumentParser(exit_on_error=False, parser_mode="as_it_is", add_help=False)
    parser.add_argument("--value", type=hint)
    return parser


def put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """Set one value in nested mappings; a mapping that is there is not replaced by an empty one."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if value != {} or not isinstance(tree.get(path[-1]), dict):
        tree[path[-1]] = value
