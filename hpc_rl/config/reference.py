"""The reference page of the configuration, in Markdown, from the dataclasses. docs/configuration.md is it; a test compares."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_rl.config.loading.arguments import Option, describe_options
from hpc_rl.config.loading.load import ALIASES
from hpc_rl.config.sections.experiment import CONFIGS
from hpc_rl.config.tables.atlas import ALIASES as ATLAS
from hpc_rl.config.tables.departures import DEPARTURES
from hpc_rl.config.tables.unavailable import UNAVAILABLE

_HEAD = """# Configuration

Made by `hpc-rl config reference > docs/configuration.md`; do not edit.

A configuration is one or more YAML files (`--config FILE`, laid over each other from left to right) and options on the command
line (`--a.b VALUE`, `--a.b=VALUE` or `a.b=VALUE`), which win. `${a.b}` stands for another option's value. A section merges by
key; a list or a mapping of free keys is replaced. No key is accepted and then ignored: what can't be done is refused.
`hpc-rl config show` prints every value with where it came from, `hpc-rl config schema` a JSON Schema for editors.
"""


def reference() -> str:
    """The whole page."""
    return (
        "\n".join([_HEAD, *_sections(), *_short_names(), *_atlas(), *_departures(), *_unavailable()]) + "\n"
    )


def _sections() -> Iterator[str]:
    sections: dict[str, list[Option]] = {"": []}
    texts: dict[str, str] = {}
    owners: dict[str, list[str]] = {}
    for trainer, cls in CONFIGS.items():
        for option in describe_options(cls):
            owners.setdefault(option.name, []).append(trainer)
            if len(owners[option.name]) > 1:
                continue
            parent = option.name.rpartition(".")[0]
            if option.type:
                sections.setdefault(parent, []).append(option)
            else:
                texts[option.name] = option.text
                sections.setdefault(option.name, [])
    for name, options in sections.items():
        only = owners.get(name, list(CONFIGS))
        yield f"## `{name}`" if name else "## Top level"
        yield ""
        if name:
            yield texts[name] + ("" if len(only) == len(CONFIGS) else f" Trainer: {', '.join(only)}.")
            yield ""
        if options:
            yield "| option | type | default | meaning |"
            yield "|---|---|---|---|"
            yield from (
                f"| `{o.name.rpartition('.')[2]}` | {_cell(o.type)} | {_cell(o.default)} | {_cell(o.text)} |"
                for o in options
            )
            yield ""


def _short_names() -> Iterator[str]:
    yield "## Short names on the command line"
    yield ""
    yield "| short | option |"
    yield "|---|---|"
    yield from (f"| `--{short}` | `{full}` |" for short, full in ALIASES.items())
    yield ""


def _atlas() -> Iterator[str]:
    yield "## ATLAS names"
    yield ""
    yield "Accepted at the top level of a file and on the command line. A name and its alias with different values are an error."
    yield ""
    yield "| ATLAS | here |"
    yield "|---|---|"
    yield from (f"| `{name}` | {_cell(alias.describe())} |" for name, alias in ATLAS.items())
    yield ""


def _departures() -> Iterator[str]:
    yield "## Where our default departs from AReaL's"
    yield ""
    yield "| option | AReaL | why ours differs |"
    yield "|---|---|---|"
    yield from (
        f"| `{name}` | {_cell(theirs)} | {_cell(why)} |" for name, (theirs, why) in DEPARTURES.items()
    )
    yield ""


def _unavailable() -> Iterator[str]:
    yield "## What can be named and is refused"
    yield ""
    yield "| option | accepted | why, and what to use |"
    yield "|---|---|---|"
    for name, item in UNAVAILABLE.items():
        yield f"| `{name}` | {_cell(item.accepted())} | {_cell(item.why)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
