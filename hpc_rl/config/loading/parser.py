"""The options of a configuration as a jsonargparse parser, made of the dataclasses.

`parse` makes a configuration of settings whose origin is known. The library judges types; added here are
limits, nearest choices, and refusals of all values at once, each with its origin.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, set_loader

from hpc_rl.config.loading.fields import (
    alternatives,
    base_of,
    extras_of,
    hints,
    is_optional,
    options,
    section_of,
)
from hpc_rl.config.loading.names import nearest
from hpc_rl.config.loading.source import Settings, SourceValue
from hpc_rl.config.loading.stored import construct
from hpc_rl.config.sections.limits import Grammar, Limits
from hpc_rl.errors import ConfigError

LARGEST_INT = 2**53 - 1  # exact in every JSON reader
# Values come from our own readers: the library must not read the text 'null' or '5' as YAML once more.
set_loader("as_it_is", lambda text: text)


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
    """Yield (prefix with its dot, dataclass, help) of the configuration and its sections, parents first."""
    yield prefix, cls, text
    texts = docstring_texts(cls) if any(section_of(hint) for hint in hints(cls).values()) else {}
    for name, hint in hints(cls).items():
        section = section_of(hint)
        if section:
            yield from sections(section, f"{prefix}{name}.", texts[name])


@dataclass(frozen=True)
class Option:
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
    """Return the `Args:` texts of a dataclass and its bases, by field."""
    import docstring_parser

    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) and base.__doc__:
            params = docstring_parser.parse(base.__doc__).params
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
        return ", ".join([_describe(base), *limits])
    if origin is Literal:
        return ", ".join(str(arg) or "empty" for arg in typing.get_args(kind))
    if origin is list:
        return f"a list ({_describe(typing.get_args(kind)[0])})"
    if origin is dict:
        return f"a mapping ({_describe(typing.get_args(kind)[1])})"
    names = {bool: "true, false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}
    return names[kind]


def parse(cls: type, settings: Settings, refusals: list[str]) -> Any:
    """Return the configuration. Raises ConfigError with these and every other refusal, one a line."""
    known, given = options(cls), {name: item for name, item in settings.items() if name in options(cls)}
    written: dict[str, Any] = {}
    for name, item in given.items():
        if section_of(known[name]):
            continue
        if item.value == "???":
            refusals = [*refusals, f"{name} ({item.origin}): ??? stands for a value that is missing; set it."]
        elif not (refusals and isinstance(item.value, str) and "${" in item.value):
            written[name] = as_written(known[name], item)
    values = typed(cls, written)
    for name in written:
        hint, item = known[name], given[name]
        reason = _limit_reason(hint, values[name], item) if name in values else _type_reason(hint, item)
        if reason is not None:
            line = f"{name} ({item.origin}): {item} can't be used; allowed: {allowed(hint)}. {reason}"
            refusals = [*refusals, line.strip()]
    if refusals:
        raise ConfigError("\n".join(refusals))
    tree: dict[str, Any] = {}
    for name, item in settings.items():
        section: dict[str, Any] | None = None if item.value is None else {}
        put(tree, name.split("."), values.get(name, section))
    return construct(cls, tree)


def typed(cls: type, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the right type, by dotted name; the others are left out."""
    found: dict[str, Any] = {}
    judged: dict[str, Any] = {}
    for name, value in written.items():
        # The library would convert them: the text 'null' to null, '1_0' to an integer, true to 1.
        if value is None or isinstance(value, bool | str):
            kinds = [base_of(kind) for kind in alternatives(options(cls)[name])]
            choices = [
                one for kind in kinds if typing.get_origin(kind) is Literal for one in typing.get_args(kind)
            ]
            if type(value) in kinds or (isinstance(value, str) and value in choices):
                found[name] = value
        elif not (isinstance(value, int) and abs(value) > LARGEST_INT):
            judged[name] = value
    return found | _judged(cls, judged)


def _judged(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the library accepts; as it stops at the first other one, ask for each then."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        put(tree, name.split("."), value)
    try:
        parsed = _parser_of(cls, frozenset(values)).parse_object(tree)
    except ArgumentError:
        if len(values) == 1:
            return {}
        return {key: one for name in values for key, one in _judged(cls, {name: values[name]}).items()}
    return {name: parsed[name] for name in values}


@lru_cache(maxsize=32)
def _parser_of(cls: type, names: frozenset[str]) -> ArgumentParser:
    return config_parser(cls, names)


def as_written(hint: Any, item: SourceValue) -> Any:
    """Return plain data as the option has it: text as in the source, integers for whole floats."""
    kinds = [base_of(kind) for kind in alternatives(hint)]
    value = item.value
    if isinstance(value, list | dict):
        inner = _inner(kinds, type(value))
        if inner is None:  # `a: b` on the command line is text where an option is
            return item.text if item.text is not None and str in kinds else item.plain()
        if isinstance(value, list):
            return [as_written(inner, part) for part in value]
        return {key: as_written(inner, part) for key, part in value.items()}
    if value is None:
        return "" if item.is_argument and not item.text and not is_optional(hint) else None
    if isinstance(value, float) and int in kinds and value.is_integer():
        return int(value)
    is_text = str in kinds and item.text is not None
    return item.text if is_text and (item.is_argument or not isinstance(value, bool)) else value


def _inner(kinds: list[Any], container: type) -> Any:
    """Return the type of the members of a list or mapping; None where an option takes none."""
    found = [typing.get_args(kind)[-1] for kind in kinds if typing.get_origin(kind) is container]
    return found[0] if found else None


def _type_reason(hint: Any, item: SourceValue) -> str:
    if isinstance(item.value, int) and abs(item.value) > LARGEST_INT:
        return f"Numbers end at {LARGEST_INT}."
    if isinstance(item.value, dict):
        for key, part in item.value.items():
            if isinstance(part.value, dict | list | bool | None):
                return f"{key} is {part}."
    choices = [
        str(one)
        for kind in alternatives(hint)
        if typing.get_origin(kind) is Literal
        for one in typing.get_args(kind)
    ]
    near = nearest(str(item.plain()), choices, cutoff=0.6)
    return f"Did you mean {near}?" if near else ""


def _limit_reason(hint: Any, value: Any, item: SourceValue) -> str | None:
    """Return why a value of the right type is refused, which may be empty; None where it is allowed."""
    if isinstance(value, list | dict):
        inner = _inner(list(alternatives(hint)), type(value))
        parts = item.value.items() if isinstance(value, dict) else enumerate(item.value)
        reasons = (_limit_reason(inner, value[key], part) for key, part in parts)
        return next((reason for reason in reasons if reason is not None), None)
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= char <= "\udfff" for char in value)):
        return "It must be text without NUL, in UTF-8."
    if isinstance(value, int | float) and not math.isfinite(value):
        return "It must be finite."
    is_bare_number = not isinstance(item.value, str) and not item.is_argument
    for kind in alternatives(hint):
        if type(value) is base_of(kind):
            reasons = (extra.refusal(value, is_bare_number) for extra in extras_of(kind))
            return next((reason for reason in reasons if reason is not None), None)
    return None


def put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """Set one value in nested mappings; a mapping that is there is not replaced by an empty one."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if not (isinstance(value, dict) and isinstance(tree.get(path[-1]), dict)):
        tree[path[-1]] = value
