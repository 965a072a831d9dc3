"""The fields of the configuration's dataclasses: names, types and defaults."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection
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


def section_of(hint: Any) -> type | None:
    """Return the dataclass of a section, optional or not; None for an option."""
    for kind in alternatives(hint):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None


def is_optional(hint: Any) -> bool:
    """Return whether null is allowed."""
    return types.NoneType in alternatives(hint)


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of a field; dataclasses.MISSING where it is required."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def nearest(name: str, names: Collection[str], cutoff: float = 0.8) -> str:
    """Return the most similar name; empty where none is as similar as `cutoff`."""
    return next(iter(difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)), "")


def did_you_mean(name: str, names: Collection[str], cutoff: float = 0.6) -> str:
    """Return a question with the most similar name; empty where none is similar enough."""
    near = nearest(name, names, cutoff)
    return f"Did you mean {near}?" if near else ""


@cache
def options(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of every option and section by dotted name, parents first."""
    found: dict[str, Any] = {}
    for name, hint in hints(cls).items():
        found[prefix + name] = hint
        section = section_of(hint)
        if section:
            found |= options(section, f"{prefix}{name}.")
    return found


@cache
def defaults(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return the default of every option by dotted name, sections before what has them; required ones lack.

    An optional section has the default null, and its options have theirs.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        section, default = section_of(hints(cls)[field.name]), default_of(field)
        if section:
            found |= defaults(section, f"{prefix}{field.name}.")
        if default is None or (default is not dataclasses.MISSING and not section):
            found[prefix + field.name] = default
    return found
