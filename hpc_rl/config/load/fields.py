"""The fields of the configuration's dataclasses: names, types and defaults.

A field is an option, a section, or a mapping of sections by keys of the user's own, such as `pools`, whose
members those sections are. Where no configuration is at hand, one with the key NAME stands for all of them.
"""

import dataclasses
import difflib
import itertools
import re
import types
import typing
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any


@cache
def hints(cls: type) -> dict[str, Any]:
    """Return the type of each field, with its limits."""
    known = typing.get_type_hints(cls, include_extras=True)
    return {field.name: known[field.name] for field in dataclasses.fields(cls)}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; a plain type is its own only member."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def base_of(kind: Any) -> Any:
    """Return a type without its limits."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def extras_of(hint: Any) -> tuple[Any, ...]:
    """Return the limits of a type, or of the members of a union."""
    annotated = (kind for kind in alternatives(hint) if typing.get_origin(kind) is typing.Annotated)
    return tuple(extra for kind in annotated for extra in typing.get_args(kind)[1:])


FREE_KEY = "NAME"


def section_of(hint: Any) -> type | None:
    """Return the dataclass of a section, optional or not, or of a mapping's; None for an option."""
    for kind in typing.get_args(hint) if typing.get_origin(hint) is dict else alternatives(hint):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None


def is_mapping(hint: Any) -> bool:
    """Return whether it is a mapping of sections."""
    return typing.get_origin(hint) is dict and section_of(hint) is not None


def is_optional(hint: Any) -> bool:
    """Return whether null is allowed."""
    return types.NoneType in alternatives(hint)


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of a field; dataclasses.MISSING where it is required."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def nearest(name: str, names: Collection[str], cutoff: float = 0.8) -> str:
    """Return the most similar name; empty where none is as similar as `cutoff`."""
    return next(iter(difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)), "")


def meant(name: str, names: Collection[str]) -> str:
    """Return the name of which this is a misspelling; empty where none consists of the same words."""
    close = difflib.get_close_matches(name.lower(), names, n=5, cutoff=0.6)
    found = next((one for one in close if _is_misspelt(name.lower(), one)), "")
    begin_so = {
        one for one in names if one.startswith(f"{name}_")
    }  # as freq_secs and freq_steps do with `freq`
    return "" if found in begin_so and len(begin_so) > 1 else found


def _is_misspelt(given: str, name: str) -> bool:
    """Return whether the words are the same but for a few letters, or but for one word more or less.

    So `lr_scheduler` is `lr_scheduler_type`, but `eta` is not `beta`, nor `sp_size` `ep_size`.
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
    """Return whether one letter but the first is wrong, missing or too many, or two have changed places."""
    start = _num_common(given, name)
    given, name = given[start:][::-1], name[start:][::-1]
    end = _num_common(given, name)
    given, name = given[end:], name[end:]
    return start > 0 and (max(len(given), len(name)) < 2 or (len(given) == 2 and given == name[::-1]))


def _num_common(a: str, b: str) -> int:
    """Return the number of letters with which both begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _is_same_word(given: str, word: str) -> bool:
    alike = difflib.SequenceMatcher(None, given, word).ratio()
    return given == word or (given[:1] == word[:1] and min(len(given), len(word)) > 2 and alike >= 0.75)


def names_in(text: str) -> list[str]:
    """Return the words of a message that may be names of options, dotted or not."""
    return re.findall(r"[a-z_0-9]+(?:\.[A-Za-z_0-9-]+)*", text)


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return a question with the most similar name; empty where none is similar enough."""
    near = nearest(name, names, cutoff=0.6)
    return f"Did you mean {near}?" if near else ""


@cache
def options(cls: type, prefix: str = "", members: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the type of every option and section by dotted name, parents first.

    `members` are the names of those that mappings have; None means one in each, with the key NAME.
    """
    found: dict[str, Any] = {}
    for name, hint in hints(cls).items():
        found[prefix + name] = hint
        section = section_of(hint)
        if section and is_mapping(hint):
            for member in _members_in(prefix + name, members):
                found |= {member: section | None} | options(section, f"{member}.", members)
        elif section:
            found |= options(section, f"{prefix}{name}.", members)
    return found


@cache
def defaults(cls: type, prefix: str = "", members: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the default of every option by dotted name, sections before what has them; required ones lack.

    An optional section has the default null, and its options have theirs; so has a member, as in `options`.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, hints(cls)[field.name]
        section, default = section_of(hint), default_of(field)
        if section and is_mapping(hint):
            found[name] = {}
            for member in _members_in(name, members):
                found |= {member: None} | defaults(section, f"{member}.", members)
        elif section:
            found |= defaults(section, f"{name}.", members)
        if default is None or (default is not dataclasses.MISSING and not section):
            found[name] = default
    return found


def _members_in(mapping: str, members: tuple[str, ...] | None) -> list[str]:
    if members is None:
        return [f"{mapping}.{FREE_KEY}"]
    return [member for member in members if member.rpartition(".")[0] == mapping]


@cache
def _mappings(cls: type) -> tuple[str, ...]:
    return tuple(name for name, hint in options(cls).items() if is_mapping(hint))


def generic(cls: type, name: str) -> str:
    """Return a dotted name with NAME for the key of a member: `pools.student.path` is `pools.NAME.path`."""
    for mapping in _mappings(cls):
        if name.startswith(f"{mapping}."):
            _, dot, inside = name.removeprefix(f"{mapping}.").partition(".")
            return f"{mapping}.{FREE_KEY}{dot}{inside}"
    return name


def members_of(cls: type, names: Iterable[str]) -> tuple[str, ...]:
    """Return the members, such as `pools.student`, that dotted names are, or are in."""
    found: dict[str, None] = {}
    for name in names:
        like = generic(cls, name).split(".")
        if FREE_KEY in like:
            found[".".join(name.split(".")[: like.index(FREE_KEY) + 1])] = None
    return tuple(found)
