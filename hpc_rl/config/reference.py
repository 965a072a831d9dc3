"""What help says of the options: names of sections, help of one section, and the reference page in Markdown.

docs/configuration.md is the page; a test compares.
"""

import argparse
import json
from collections.abc import Iterator

from hpc_rl.config.compat.areal_names import AS_UNWRITTEN, NAMES, OF_WORKFLOWS, WORKFLOW, WORKFLOW_ARGS
from hpc_rl.config.compat.areal_options import DEPARTURES, MODEL_UNAVAILABLE, UNAVAILABLE
from hpc_rl.config.compat.atlas import ALIASES as ATLAS
from hpc_rl.config.compat.atlas import PRESET_DEPARTURES
from hpc_rl.config.compat.other_names import ROWS
from hpc_rl.config.load.fields import hints, section_of
from hpc_rl.config.load.names import ALIASES
from hpc_rl.config.load.parser import config_parser, describe_options, sections
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.core.errors import ConfigError

_HEAD = """# Configuration

Made by `hpc-rl config reference > docs/configuration.md`; do not edit.

A configuration is one or more YAML files (`hpc-rl submit FILE`, laid over each other from left to right)
and options on the command line (`--a.b VALUE`, `--a.b=VALUE` or `a.b=VALUE`), which win. Hydra's forms work
too: `+a.b=VALUE` and `++a.b=VALUE` set an option, `~a.b` deletes the value that files, presets and earlier
arguments set, so that the default applies. `${a.b}` is another option's value. A section merges by key, and
so do `pools`, sections with names of your own (NAME below stands for each); a list or another mapping of free
keys is replaced. No key is accepted and then ignored: what can't be done is refused. `hpc-rl config show`
prints every value with its origin, `hpc-rl submit --help SECTION` the options of a section, `--help WORD`
those about it, `hpc-rl config schema` a JSON Schema for editors.
In a path `~` is your home directory, and a relative path starts at the working directory; `$NAME` is refused:
write `${oc.env:NAME}` for an environment variable.
Options marked *hpc-rl extension* are not in AReaL; most others keep AReaL's names.
"""


def section_names() -> list[str]:
    """Return the sections at the top level, of all trainers."""
    return sorted({name for cls in CONFIGS.values() for name, hint in hints(cls).items() if section_of(hint)})


def section_help(topic: str) -> str:
    """Return the help of a section, of one option, or of "all"; else of options that have the topic in it.

    That is as a part of their names, else in their texts. Raises ConfigError where there are none.
    """
    owners: dict[str, type] = {}
    texts_of: dict[str, str] = {}
    for cls in CONFIGS.values():
        for prefix, section, _ in sections(cls):
            for option in describe_options(section):
                owners.setdefault(prefix + option.name, cls)
                texts_of.setdefault(prefix + option.name, option.text.lower())
    ways = (
        [name for name in owners if topic in ("all", name) or name.startswith(f"{topic}.")],
        [name for name in owners if f".{topic}." in f".{name}."],
        [name for name, text in texts_of.items() if topic.replace("_", " ").lower() in text],
    )
    found = {name: owners[name] for name in next(filter(None, ways), [])}
    if not found:
        known = ", ".join(section_names())
        raise ConfigError(f"--help {topic}: no option has that in its name or text; sections: {known}, all.")
    texts = []
    for cls in CONFIGS.values():
        chosen = [name for name, owner in found.items() if owner is cls]
        if chosen:
            texts.append(config_parser(cls, chosen, usage=argparse.SUPPRESS, add_help=False).format_help())
    return "\n".join(texts)


def reference() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *_sections(), *_tables()])


def _sections() -> Iterator[str]:
    owners: dict[str, list[str]] = {}
    # prefix -> text of the section, option -> its row
    shown: dict[str, tuple[str, dict[str, list[str]]]] = {}
    for trainer, cls in CONFIGS.items():
        for prefix, section, text in sections(cls):
            owners.setdefault(prefix, []).append(trainer)
            rows = shown.setdefault(prefix, (text, {}))[1]
            for option in describe_options(section):
                rows.setdefault(option.name, [f"`{option.name}`", *option[1:]])
    for prefix, (text, rows) in shown.items():
        only = "" if len(owners[prefix]) == len(CONFIGS) else f" Trainer: {', '.join(owners[prefix])}."
        title, texts = (f"`{prefix[:-1]}`", [f"{text}{only}"]) if prefix else ("Top level", [])
        yield from _table(title, texts, ["option", "type", "default", "meaning"], list(rows.values()))


def _tables() -> Iterator[str]:
    short = [[f"`--{name}`", f"`{full.replace('{model}', 'actor')}`"] for name, full in ALIASES.items()]
    yield from _table("Short names on the command line", [], ["short", "option"], short)
    accepted = "Accepted at the top level of a file and on the command line."
    conflict = "A name and its alias with different values are an error."
    names = [[f"`{name}`", alias.describe()] for name, alias in ATLAS.items()]
    yield from _table("ATLAS names", [accepted, conflict], ["ATLAS", "here"], names)
    yield from _names_of_areal()
    title = "Names of TRL, verl and others"
    texts = ["No options here: a refusal says what is in their place. In `sft` and `rw`, `actor` is `model`."]
    others = [[", ".join(f"`{one}`" for one in names.split()), said] for names, said in ROWS.items()]
    answers = [[names, said.replace("{model}", "actor")] for names, said in others]
    yield from _table(title, texts, ["name", "here"], answers)
    departures = [[f"`{name}`", theirs, why] for name, (theirs, why) in DEPARTURES.items()]
    title = "Where our default departs from AReaL's"
    yield from _table(title, [], ["option", "AReaL", "why ours differs"], departures)
    texts = ["Documented defaults of ATLAS that `--preset atlas` does not have."]
    rows = [[f"`{name}`", *row] for name, row in PRESET_DEPARTURES.items()]
    yield from _table("Where --preset atlas departs from ATLAS", texts, ["ATLAS", "documented", "here"], rows)
    of_models = {f"actor.{name}": item for name, item in MODEL_UNAVAILABLE.items()}
    refused = [[f"`{name}`", item.accepted(), item.why] for name, item in (UNAVAILABLE | of_models).items()]
    heads = ["option", "accepted", "why, and what to use"]
    alike = "What is said of `actor` holds for `ref` and `model` too."
    yield from _table("What can be named and is refused", [alike], heads, refused)


def _names_of_areal() -> Iterator[str]:
    rows: dict[str, list[str]] = {}  # what is said -> names
    for name, row in NAMES.items():
        if not name.startswith(("{model}.", "ref.", "model.")):
            rows.setdefault(row.describe(), []).append(f"`{name}`")
    rows[f"`{WORKFLOW_ARGS}.NAME`"] = [f"`{name}`" for name in OF_WORKFLOWS]
    unwritten = (f"`{name}` {json.dumps(value)}" for name, (value, _) in AS_UNWRITTEN.items())
    texts = [
        "No options here, but in AReaL's files. What is said of `actor` holds for `ref` and `model` too.",
        "Options of the policy's loss in `ref`, and levels of normalization that are `none`, are accepted.",
        f"Keys for `{WORKFLOW_ARGS}` need a `{WORKFLOW}`; for those of the multi-turn example it is "
        "`multi_turn` by default.",
        f"These defaults, which its saved files spell out, count as not written: {', '.join(unwritten)}.",
    ]
    names = [[", ".join(names), said] for said, names in rows.items()]
    yield from _table("Names of AReaL v0.3.0 to v0.4.1", texts, ["AReaL", "here"], names)


def _table(title: str, texts: list[str], heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"## {title}\n"
    if texts:
        yield "\n".join(texts) + "\n"
    if rows:
        yield f"| {' | '.join(heads)} |"
        yield "|---" * len(heads) + "|"
        yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows)
        yield ""


def _cell(text: str) -> str:
    """Return a text on one line of a table, with no HTML but its line breaks; code stays as it is."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("\n", "<br>") for part in parts[::2]]
    return "`".join(parts)
