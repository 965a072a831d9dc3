"""What help says of the options: names of sections, help of one section, and the reference page in Markdown.

docs/configuration.md is the page; a test compares.
"""

import argparse
from collections.abc import Iterator

from hpc_rl.config.loading.fields import options, section_of
from hpc_rl.config.loading.names import ALIASES
from hpc_rl.config.loading.parser import config_parser, describe_options, sections
from hpc_rl.config.sections.experiment import CONFIGS
from hpc_rl.config.tables.areal_options import DEPARTURES, UNAVAILABLE
from hpc_rl.config.tables.atlas import ALIASES as ATLAS
from hpc_rl.errors import ConfigError

_HEAD = """# Configuration

Made by `hpc-rl config reference > docs/configuration.md`; do not edit.

A configuration is one or more YAML files (`hpc-rl submit FILE`, laid over each other from left to right)
and options on the command line (`--a.b VALUE`, `--a.b=VALUE` or `a.b=VALUE`), which win. `${a.b}` is another
option's value. A section merges by key; a list or a mapping of free keys is replaced. No key is accepted and
then ignored: what can't be done is refused. `hpc-rl config show` prints every value with its origin,
`hpc-rl submit --help SECTION` the options of a section, `hpc-rl config schema` a JSON Schema for editors.
"""


def section_names() -> list[str]:
    """Return the sections at the top level, of all trainers."""
    found = [name for cls in CONFIGS.values() for name, hint in options(cls).items() if section_of(hint)]
    return sorted({name for name in found if "." not in name})


def section_help(topic: str) -> str:
    """Return the help of a section, of one option, or of "all". Raises ConfigError for another name."""
    found: dict[str, type] = {}
    for cls in CONFIGS.values():
        for name, hint in options(cls).items():
            if section_of(hint) is None and (topic in ("all", name) or name.startswith(f"{topic}.")):
                found.setdefault(name, cls)
    if not found:
        raise ConfigError(
            f"--help {topic}: there is no such section; known: {', '.join(section_names())}, all."
        )
    texts = []
    for cls in CONFIGS.values():
        chosen = [name for name, owner in found.items() if owner is cls]
        if chosen:
            texts.append(config_parser(cls, chosen, usage=argparse.SUPPRESS, add_help=False).format_help())
    return "\n".join(texts)


def reference() -> str:
    """Return the whole page."""
    return (
        "\n".join([_HEAD, *_sections(), *_short_names(), *_atlas(), *_departures(), *_unavailable()]) + "\n"
    )


def _sections() -> Iterator[str]:
    owners: dict[str, list[str]] = {}
    shown: dict[str, tuple[type, str, list[str]]] = {}
    for trainer, cls in CONFIGS.items():
        for prefix, section, text in sections(cls):
            owners.setdefault(prefix, []).append(trainer)
            known = shown.setdefault(prefix, (section, text, []))[2]
            for option in describe_options(section):
                cells = (_cell(text) for text in (option.type, option.default, option.text))
                row = f"| `{option.name}` | {' | '.join(cells)} |"
                if row not in known and not any(other.startswith(f"| `{option.name}` ") for other in known):
                    known.append(row)
    for prefix, (_, text, rows) in shown.items():
        yield f"## `{prefix[:-1]}`" if prefix else "## Top level"
        yield ""
        if prefix:
            only = owners[prefix]
            yield text + ("" if len(only) == len(CONFIGS) else f" Trainer: {', '.join(only)}.")
            yield ""
        if rows:
            yield "| option | type | default | meaning |"
            yield "|---|---|---|---|"
            yield from rows
            yield ""


def _short_names() -> Iterator[str]:
    yield "## Short names on the command line"
    yield ""
    yield "| short | option |"
    yield "|---|---|"
    names = {short: full.replace("{model}", "actor") for short, full in ALIASES.items()}
    yield from (f"| `--{short}` | `{full}` |" for short, full in names.items())
    yield ""


def _atlas() -> Iterator[str]:
    yield "## ATLAS names"
    yield ""
    yield "Accepted at the top level of a file and on the command line."
    yield "A name and its alias with different values are an error."
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
