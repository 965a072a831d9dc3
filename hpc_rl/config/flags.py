"""Flags of servers of other projects: how their tables are made, and what `extra_args` may not contain."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Flags = dict[str, str | tuple[str, ...]]  # option -> its flag; for a switch also its arguments


def flags_of(section: type, without: Collection[str], own: Collection[str], renamed: Flags) -> Flags:
    """Return name -> flag, of the options of a section and of what the role sets itself."""
    names = {field.name for field in dataclasses.fields(section)} - set(without)
    return {name: f"--{name.replace('_', '-')}" for name in sorted({*names, *own})} | renamed


@dataclass(frozen=True)
class Reserved:
    """Flags beside those of a table: other names of its flags, and what only the trial sets."""

    also: Mapping[str, str]
    set_by_the_trial: Collection[str]


def refusals(name: str, section: Any, flags: Flags, reserved: Reserved) -> Iterator[str]:
    """Yield why something in `extra_args` of section `name` can't be used.

    Of two equal flags a server would silently take the later one.
    """
    names = {flag: option for option, flag in flags.items() if isinstance(flag, str)}
    for arg in section.extra_args:
        came = arg.partition("=")[0]
        flag = reserved.also.get(came, came)
        option = names.get(flag)
        if flag in reserved.set_by_the_trial or (option and not hasattr(section, option)):
            yield f"{name}.extra_args: {came} is derived from the plan and can't be given."
        elif option and getattr(section, option) not in (None, False):
            yield f"{name}.extra_args: {came} can't be given; use {name}.{option}."
