"""The fields of the configuration's dataclasses: names, types and defaults.

A field is an option, a section, or a mapping of sections with free keys, such as `pools`. The sections of a
mapping are its members. Without a configuration, one member with the key NAME stands for all of them.
"""

import dataclasses
import difflib
import itertools
import types
import typing
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any


@cache
def list_hints(cls: type) -> dict[str, Any]:
    """Return the type of each field, with its limits."""
    known = typing.get_type_hints(cls, include_extras=True)
    return {field.name: known[field.name] for field in dataclasses.fields(cls)}


def list_alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; for a plain type, the type itself."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def strip_limits(kind: Any) -> Any:
    """Return a type without its limits."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def list_limits(hint: Any) -> tuple[Any, ...]:
    """Return the limits of a type, or of the members of a union."""
    annotated = (kind for kind in list_alternatives(hint) if typing.get_origin(kind) is typing.Annotated)
    return tuple(extra for kind in annotated for extra in typing.get_args(kind)[1:])


FREE_KEY = "NAME"


@cache
def find_section(hint: Any) -> type | None:
    """Return the dataclass of a section, optional or not, or of a mapping's members; None for an option."""
    for kind in typing.get_args(hint) if typing.get_origin(hint) is dict else list_alternatives(hint):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None


@cache
def is_mapping(hint: Any) -> bool:
    """Return whether a type is a mapping of sections."""
    return typing.get_origin(hint) is dict and find_section(hint) is not None


@cache
def is_optional(hint: Any) -> bool:
    """Return whether null is allowed."""
    return types.NoneType in list_alternatives(hint)


def get_default(field: dataclasses.Field) -> Any:
    """Return the default of a field; dataclasses.MISSING if the field is required."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def find_nearest(name: str, names: Collection[str], cutoff: float = 0.8) -> str:
    """Return the most similar name; empty if the similarity of every name is below `cutoff`."""
    return next(iter(difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)), "")


def guess_name(name: str, names: Collection[str]) -> str:
    """Return the name that a misspelled one means; empty if no name has the same words."""
    close = difflib.get_close_matches(name.lower(), names, n=5, cutoff=0.6)
    found = next((one for one in close if _is_misspelt(name.lower(), one)), "")
    begin_so = {
        one for one in names if one.startswith(f"{name}_")
    }  # as freq_secs and freq_steps do with `freq`
    return "" if found in begin_so and len(begin_so) > 1 else found


def _is_misspelt(given: str, name: str) -> bool:
    """Return whether two names have the same words, except for a few letters, or for one word more or less.

    Thus `lr_scheduler` matches `lr_scheduler_type`, but `eta` does not match `beta`, nor `sp_size` `ep_size`.
    """
    if given.replace("_", "") == name.replace("_", "") or is_one_slip(given, name):
        return True
    fewer, more = sorted((given.split("_"), name.split("_")), key=len)
    if len(fewer) == len(more):
        return all(map(_is_same_word, fewer, more))
    if len(more) - len(fewer) > 1 or len(fewer) == 1:
        return name.startswith(f"{given}_")
    without = (more[:i] + more[i + 1 :] for i in range(len(more)))
    return any(all(map(_is_same_word, fewer, words)) for words in without)


def is_one_slip(given: str, name: str) -> bool:
    """Return whether one letter after the first is wrong, missing or extra, or two letters are swapped."""
    start = _count_common(given, name)
    given, name = given[start:][::-1], name[start:][::-1]
    end = _count_common(given, name)
    given, name = given[end:], name[end:]
    return start > 0 and (max(len(given), len(name)) < 2 or (len(given) == 2 and given == name[::-1]))


def _count_common(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _is_same_word(given: str, word: str) -> bool:
    alike = difflib.SequenceMatcher(None, given, word).ratio()
    return given == word or (given[:1] == word[:1] and min(len(given), len(word)) > 2 and alike >= 0.75)


def suggest_name(name: str, names: Collection[str]) -> str:
    """Return a question with the most similar name; empty if no name is similar enough."""
    near = find_nearest(name, names, cutoff=0.6)
    return f"Did you mean {near}?" if near else ""


@cache
def list_options(cls: type, prefix: str = "", members: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the type of every option and section by dotted name, parents first.

    `members` names the members of mappings; None means one member NAME in each.
    """
    found: dict[str, Any] = {}
    for name, hint in list_hints(cls).items():
        found[prefix + name] = hint
        section = find_section(hint)
        if section and is_mapping(hint):
            for member in _list_members(prefix + name, members):
                found |= {member: section | None} | list_options(section, f"{member}.", members)
        elif section:
            found |= list_options(section, f"{prefix}{name}.", members)
    return found


@cache
def list_defaults(cls: type, prefix: str = "", members: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the default of every option by dotted name; required options are missing.

    The options of a section come before its own default. An optional section has the default null, and its
    options have their own defaults. The same holds for members, which are as in `list_options`.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, list_hints(cls)[field.name]
        section, default = find_section(hint), get_default(field)
        if section and is_mapping(hint):
            found[name] = {}
            for member in _list_members(name, members):
                found |= {member: None} | list_defaults(section, f"{member}.", members)
        elif section:
            found |= list_defaults(section, f"{name}.", members)
        if default is None or (default is not dataclasses.MISSING and not section):
            found[name] = default
    return found


def _list_members(mapping: str, members: tuple[str, ...] | None) -> list[str]:
    if members is None:
        return [f"{mapping}.{FREE_KEY}"]
    return [member for member in members if member.rpartition(".")[0] == mapping]


@cache
def _list_mappings(cls: type) -> tuple[str, ...]:
    return tuple(name for name, hint in list_options(cls).items() if is_mapping(hint))


@cache
def make_generic(cls: type, name: str) -> str:
    """Replace the key of a member by NAME: `pools.student.path` becomes `pools.NAME.path`."""
    for mapping in _list_mappings(cls):
        if name.startswith(f"{mapping}."):
            _, dot, inside = name.removeprefix(f"{mapping}.").partition(".")
            return f"{mapping}.{FREE_KEY}{dot}{inside}"
    return name


def find_members(cls: type, names: Iterable[str]) -> tuple[str, ...]:
    """Return the members, such as `pools.student`, that appear in dotted names."""
    found: dict[str, None] = {}
    for name in names:
        like = make_generic(cls, name).split(".")
        if FREE_KEY in like:
            found[".".join(name.split(".")[: like.index(FREE_KEY) + 1])] = None
    return tuple(found)
