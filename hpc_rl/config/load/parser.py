"""Parse options with jsonargparse, by the dataclasses of the configuration.

`parse` makes a configuration from settings with origins. jsonargparse checks types. This module adds limits,
nearest choices, and refusals of all values at once, each with its origin.
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
    find_members,
    find_section,
    get_default,
    is_mapping,
    is_optional,
    list_alternatives,
    list_hints,
    list_limits,
    list_options,
    strip_limits,
    suggest_name,
)
from hpc_rl.config.load.source import Settings, SourceValue
from hpc_rl.config.load.stored import construct
from hpc_rl.config.options.limits import AsWritten, Grammar, Limits
from hpc_rl.core.refusal import Kind, Refusal

LARGEST_INT = 2**53 - 1  # exact in every JSON reader
# Our own readers have parsed the values: jsonargparse must not read the text 'null' or '5' as YAML again.
set_loader("as_it_is", lambda text: text)
set_parsing_settings(docstring_parse_attribute_docstrings=True)


def make_parser(cls: type, chosen: Collection[str] | None = None, **settings: Any) -> ArgumentParser:
    """Return a parser for all options of a configuration, or the `chosen` ones, with a group per section."""
    parser = ArgumentParser(exit_on_error=False, parser_mode="as_it_is", **settings)
    add_options(parser, cls, chosen)
    return parser


def add_options(parser: ArgumentParser, cls: type, chosen: Collection[str] | None = None) -> None:
    """Add the options of a configuration that a parser lacks."""
    present = parser._option_string_actions
    wanted = {name for name in list_options(cls) if f"--{name}" not in present}
    if chosen is not None:
        wanted &= set(chosen)
    for prefix, section, text in list_sections(cls):
        own = {name for name, hint in list_hints(section).items() if find_section(hint) is None}
        here = {name for name in own if prefix + name in wanted}
        if here:
            title = f"{prefix[:-1]}: {text.rstrip('.')}" if prefix else "top level"
            group = parser.add_argument_group(title.replace("%", "%%"))
            skip: set[str | int] = {name for name in list_hints(section) if name not in here}
            group.add_class_arguments(section, prefix[:-1] or None, as_group=False, skip=skip)


def list_sections(cls: type, prefix: str = "", text: str = "") -> Iterator[tuple[str, type, str]]:
    """Yield (prefix with its dot, dataclass, help) of the configuration and its sections, parents first.

    In a mapping of sections one member, with the prefix `pools.NAME.`, stands for all.
    """
    yield prefix, cls, text
    texts = parse_docstrings(cls) if any(find_section(hint) for hint in list_hints(cls).values()) else {}
    for name, hint in list_hints(cls).items():
        section = find_section(hint)
        if section:
            key = f"{FREE_KEY}." if is_mapping(hint) else ""
            yield from list_sections(section, f"{prefix}{name}.{key}", texts[name])


class Option(NamedTuple):
    """One option as help shows it."""

    name: str
    type: str
    default: str
    text: str


def describe_options(cls: type) -> list[Option]:
    """Return the options of one section, subsections left out."""
    texts = parse_docstrings(cls)
    return [
        Option(
            field.name,
            describe_allowed(list_hints(cls)[field.name]),
            _describe_default(field),
            texts[field.name],
        )
        for field in dataclasses.fields(cls)
        if find_section(list_hints(cls)[field.name]) is None
    ]


@cache
def parse_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass and its bases."""
    import docstring_parser

    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            params = docstring_parser.parse_from_object(base).params
            found |= {param.arg_name: " ".join((param.description or "").split()) for param in params}
    return found


def _describe_default(field: dataclasses.Field) -> str:
    if field.default is None or isinstance(field.default, bool):
        return str(field.default).lower().replace("none", "null")
    if field.default is not dataclasses.MISSING:
        return str(field.default) or "empty"
    return "empty" if field.default_factory is not dataclasses.MISSING else "required"


def describe_allowed(hint: Any) -> str:
    """Describe the values that an option accepts."""
    return " or ".join(_describe(kind) for kind in list_alternatives(hint))


def _describe(kind: Any) -> str:
    origin, base = typing.get_origin(kind), strip_limits(kind)
    if origin is typing.Annotated:
        limits = [str(extra) for extra in list_limits(kind) if isinstance(extra, Limits | Grammar)]
        # A format says more than "text".
        is_format = any(isinstance(extra, Grammar) for extra in list_limits(kind))
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


def can_convert(hint: Any) -> bool:
    """Return whether `convert_value` knows a type. All options have such types, not all fields of users."""
    kinds = [strip_limits(kind) for kind in list_alternatives(hint)]
    known = (Any, bool, int, float, str, types.NoneType)
    return all(kind in known or typing.get_origin(kind) in (Literal, list, dict) for kind in kinds)


def parse(cls: type, settings: Settings, refusals: list[Refusal]) -> tuple[Any, list[Refusal]]:
    """Return a configuration of the usable values, and all refusals, the given ones first.

    If there are refusals, missing values become empty texts.
    """
    known, is_unresolved = list_options(cls, members=find_members(cls, settings)), bool(refusals)
    refusals = list(refusals)
    tree: dict[str, Any] = {}
    for name, item in settings.items():
        if name not in known:
            continue  # it is among the refusals
        value: Any = None if item.value is None else {}
        if item.value == "???":
            why = "means that a value must be given here"
            refusals.append(
                Refusal(
                    option=name,
                    origin=item.origin,
                    value="???",
                    kind=Kind.MISSING,
                    why=why,
                    use="set the option",
                )
            )
            continue
        if find_section(known[name]) is None:
            if is_unresolved and "${" in str(item.value):
                continue
            try:
                value = convert_value(known[name], item)
            except ValueError as error:
                # A value of the right type is outside its limits; its type need not be shown.
                value = item.shown if isinstance(error, OutOfLimits) else item
                is_range = name == "cluster.n_nodes" and re.fullmatch(r"\d+-\d+", str(item.value))
                allowed = f"allowed: {describe_allowed(known[name])}. {FIXED_NODES if is_range else error}"
                refusals.append(
                    Refusal(
                        option=name,
                        origin=item.origin,
                        value=value,
                        kind=Kind.VALUE,
                        why="can't be used",
                        use=allowed.strip(),
                    )
                )
                continue
        insert_value(tree, name.split("."), value)
    if refusals:
        _complete(cls, tree)
    return construct(cls, tree), refusals


def _complete(cls: type, tree: dict[str, Any]) -> None:
    """Set missing required options to empty texts; all of them are texts."""
    for field in dataclasses.fields(cls):
        hint, is_needed = list_hints(cls)[field.name], get_default(field) is dataclasses.MISSING
        section = find_section(hint)
        if section is None:
            if is_needed:
                tree.setdefault(field.name, "")
        elif is_mapping(hint):
            for member in (tree.get(field.name) or {}).values():
                _complete(section, member)
        elif is_needed or (field.name in tree and not is_optional(hint)) or tree.get(field.name) is not None:
            tree[field.name] = tree.get(field.name) or {}
            _complete(section, tree[field.name])


def convert_value(hint: Any, item: SourceValue) -> Any:
    """Convert a value to the type of its option: text as in the source, whole floats to integers.

    Raises ValueError. Its message is the reason, or empty if the allowed values explain it.
    """
    kinds = [strip_limits(kind) for kind in list_alternatives(hint)]
    if any(isinstance(extra, AsWritten) for extra in list_limits(hint)) and not isinstance(item.value, str):
        return json.dumps(item.to_plain())
    value = item.value
    if hint is Any and isinstance(value, list | dict):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        made = {key: convert_value(Any, part) for key, part in parts}
        return made if isinstance(value, dict) else list(made.values())
    if isinstance(value, list | dict):
        inner = [typing.get_args(kind)[-1] for kind in kinds if typing.get_origin(kind) is type(value)]
        if inner and isinstance(value, dict):
            return {key: _convert_member(inner[0], key, part) for key, part in value.items()}
        if inner:
            return [convert_value(inner[0], part) for part in value]
        # `a: b` on the command line is text if the option is not a mapping
        value = item.to_plain() if item.text is None else item.text
    elif value is None:
        value = "" if item.is_argument and not item.text and not (is_optional(hint) or hint is Any) else None
    elif isinstance(value, float) and int in kinds and value.is_integer():
        value = int(value)
    elif str in kinds and item.text is not None and (item.is_argument or not isinstance(value, bool)):
        value = item.text
    value = _check_value(hint, kinds, value)
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= char <= "\udfff" for char in value)):
        raise ValueError("It must be text without NUL, in UTF-8.")
    if isinstance(value, int | float) and not math.isfinite(value):
        raise ValueError("It must be finite.")
    is_bare_number = not isinstance(item.value, str) and not item.is_argument
    of_its_type = (kind for kind in list_alternatives(hint) if strip_limits(kind) is type(value))
    for limit in (limit for kind in of_its_type for limit in list_limits(kind)):
        reason = limit.explain_refusal(value, is_bare_number)
        if reason is not None:
            # For a number in place of a text the message shows the type.
            raise ValueError(reason) if is_bare_number and isinstance(value, str) else OutOfLimits(reason)
    return value


class OutOfLimits(ValueError):
    """A value of the right type is outside the limits of its option."""


def _convert_member(hint: Any, key: str, item: SourceValue) -> Any:
    try:
        return convert_value(hint, item)
    except ValueError as error:
        raise type(error)(str(error) or f"{key} is {item}.") from error


def _check_value(hint: Any, kinds: list[Any], value: Any) -> Any:
    """Return the value if jsonargparse accepts it. Raises ValueError with the nearest choice."""
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError(f"It must be from -{LARGEST_INT} to {LARGEST_INT}.")
    choices = [one for kind in kinds if typing.get_origin(kind) is Literal for one in typing.get_args(kind)]
    try:
        # jsonargparse would convert these: the text 'null' to null, '1_0' to an integer, true to 1.
        if Any in kinds:
            return value
        if type(value) in kinds or (isinstance(value, str) and value in choices):
            return value
        if value is not None and not isinstance(value, bool | str):
            return _make_value_parser(hint).parse_object({"value": value})["value"]
    except ArgumentError:
        pass
    raise ValueError(suggest_name(str(value), [str(one) for one in choices]))


@cache
def _make_value_parser(hint: Any) -> ArgumentParser:
    """Return a parser of one value."""
    parser = ArgumentParser(exit_on_error=False, parser_mode="as_it_is", add_help=False)
    parser.add_argument("--value", type=hint)
    return parser


def insert_value(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """Set one value in nested mappings; an empty mapping does not replace an existing one."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if value != {} or not isinstance(tree.get(path[-1]), dict):
        tree[path[-1]] = value
