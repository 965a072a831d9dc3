"""Command-line flags of SGLang and vLLM: their tables, and the flags that `extra_args` may not contain."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.core.refusal import Kind, Refusal

Flags = dict[str, str | tuple[str, ...]]  # option -> its flag; for a switch also its arguments


def list_flags(section: type, without: Collection[str], own: Collection[str], renamed: Flags) -> Flags:
    """Return name -> flag for the options of a section and for the flags that the role itself sets."""
    names = {field.name for field in dataclasses.fields(section)} - set(without)
    return {name: f"--{name.replace('_', '-')}" for name in sorted({*names, *own})} | renamed


@dataclass(frozen=True)
class Reserved:
    """Flags that no table lists: other names of listed flags, and flags that only the trial may set."""

    also: Mapping[str, str]
    set_by_the_trial: Collection[str]


def check_flags(name: str, section: Any, flags: Flags, reserved: Reserved) -> Iterator[Refusal]:
    """Yield a refusal for each flag that `extra_args` of section `name` may not contain.

    If a flag comes twice, a server silently uses the later one.
    """
    names = {flag: option for option, flag in flags.items() if isinstance(flag, str)}
    for arg in section.extra_args:
        came = arg.partition("=")[0]
        flag = reserved.also.get(came, came)
        option = names.get(flag)
        if flag in reserved.set_by_the_trial or (option and not hasattr(section, option)):
            why = f": {came} can't be given, because the trial sets it itself; remove it"
            yield Refusal(option=f"{name}.extra_args", kind=Kind.VALUE, why=why)
        elif option and getattr(section, option) not in (None, False):
            yield Refusal(
                option=f"{name}.extra_args",
                kind=Kind.CONFLICT,
                why=f": {came} can't be given",
                use=f"set {name}.{option} instead",
                related=(f"{name}.{option}",),
            )
