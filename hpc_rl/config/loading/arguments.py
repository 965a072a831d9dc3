"""The options of a configuration as help texts of a command: names and types from the dataclasses, words from their docstrings.

The standard argparse shows them; load.py reads them. (jsonargparse would do both, at ten times the start-up cost, without
file and line in its refusals, and with a null section passing as None.)

A command parses what is its own with a parser *without* these options, by `parse_known_args`, and hands the rest, in its
order, to `load` as overrides; it calls `add_config_arguments` when `--help` is asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_rl.config.loading.build import alternatives, describe, hints, section_of
from hpc_rl.config.loading.load import ALIASES
from hpc_rl.config.sections.experiment import CONFIGS


@dataclass(frozen=True)
class Option:
    """One option or section as a person reads it."""

    name: str
    type: str  # in words; empty for a section
    default: str  # in words; empty for a section
    text: str


def describe_options(cls: type, prefix: str = "") -> Iterator[Option]:
    """Every section and option of a configuration class, parents first."""
    texts = docstring_texts(cls)
    for field in dataclasses.fields(cls):
        hint, name = hints(cls)[field.name], prefix + field.name
        section = section_of(hint)
        if section:
            yield Option(name, "", "", texts[field.name])
            yield from describe_options(section, f"{name}.")
        else:
            words = " or ".join(describe(kind) for kind in alternatives(hint))
            yield Option(name, words, _default(field), texts[field.name])


def docstring_texts(cls: type) -> dict[str, str]:
    """What the `Args:` of a configuration class and of its bases say, by field."""
    import docstring_parser  # only help needs it

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


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """List every option of every trainer in the parser's help, by section."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    short = {full: alias for alias, full in ALIASES.items()}
    seen: set[str] = set()
    top = parser.add_argument_group(
        "options of the configuration", "--a.b VALUE, --a.b=VALUE or a.b=VALUE; the last one wins"
    )
    for trainer, cls in CONFIGS.items():
        for option in describe_options(cls):
            if option.name in seen:
                continue
            seen.add(option.name)
            head = option.name.partition(".")[0]
            if not option.type:
                only = "" if trainer == next(iter(CONFIGS)) else f" (trainer: {trainer})"
                if head not in groups:
                    groups[head] = parser.add_argument_group(f"{head}{only}", option.text.replace("%", "%%"))
                continue
            names = [f"--{short[option.name]}"] if option.name in short else []
            text = f"{option.text} ({option.type}; default: {option.default})".replace("%", "%%")
            groups.get(head, top).add_argument(
                *names, f"--{option.name}", metavar="VALUE", help=text, default=argparse.SUPPRESS
            )
