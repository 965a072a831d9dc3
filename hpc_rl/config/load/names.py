"""Names that are not options: short names, the answers to names of other toolkits, and what may be meant.

Also refused: what stands for a section and is none, and required options that are missing.
"""

import dataclasses
import difflib
import itertools
import typing
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any

from hpc_rl.config.compat import atlas
from hpc_rl.config.compat.areal_names import OF_WORKFLOWS, WORKFLOW_ARGS
from hpc_rl.config.compat.other_names import ANSWERS, SECTIONS
from hpc_rl.config.load.fields import (
    default_of,
    extras_of,
    generic,
    hints,
    is_mapping,
    is_one_slip,
    is_optional,
    meant,
    members_of,
    options,
    section_of,
)
from hpc_rl.config.load.source import Settings, SourceValue
from hpc_rl.config.options.experiment import CONFIGS

ALIASES = {  # short names on the command line; {model} is actor or model
    "n_nodes": "cluster.n_nodes",
    "nodes": "cluster.n_nodes",
    "time": "launcher.slurm.time",
    "partition": "launcher.slurm.partition",
    "account": "launcher.slurm.account",
    "qos": "launcher.slurm.qos",
    "nodelist": "launcher.slurm.nodelist",
    "exclude": "launcher.slurm.exclude",
    "fileroot": "cluster.fileroot",
    "name": "trial_name",
    "model": "{model}.path",
    "data": "train_dataset.path",
    "lr": "{model}.optimizer.lr",
    "max_steps": "total_train_steps",
}
MOST_SHOWN = 12  # names of a section in a message
LONGEST_WORD = 5  # letters


def is_top_level(name: str) -> bool:
    """Return whether a name without a dot stands for an option or a section, here or in another toolkit."""
    known: list[Collection[str]] = [ALIASES, atlas.ALIASES, ANSWERS, *map(options, CONFIGS.values())]
    return any(name in names for names in known)


def refused_names(cls: type, settings: Settings, aliases: Mapping[str, str]) -> list[str]:
    """Return refusals: names that are no options, what stands for a section, what is missing."""
    known = options(cls, members=members_of(cls, settings))
    refusals: dict[str, str] = {}
    suggested: set[str] = set()
    for name, item in settings.items():
        parents = itertools.accumulate(name.split("."), "{}.{}".format)  # a, a.b, a.b.c
        unknown = next((parent for parent in parents if parent not in known), "")
        if unknown in SECTIONS:  # verl's: what its option is here
            unknown = name
        if unknown:
            meant, hint = _meant(cls, known, unknown, aliases)
            suggested.add(meant)
            shown = unknown if unknown.isprintable() else repr(unknown)
            refusals.setdefault(unknown, f"unknown key {shown} ({item.origin}): {hint}")
        elif section_of(known[name]):
            is_left_out = item.value is None and (is_optional(known[name]) or is_mapping(known[name]))
            if item.value != {} and not is_left_out:
                refusals[name] = _no_section(name, item)
    given = {name for one in settings for name in itertools.accumulate(one.split("."), "{}.{}".format)}
    missing = [line for name, line in _missing(cls, settings, given) if name not in suggested]
    return [*refusals.values(), *_refused_keys(cls, settings), *missing]


def _refused_keys(cls: type, settings: Settings) -> Iterator[str]:
    """Yield a refusal for each key of a mapping of sections that is none."""
    for member in members_of(cls, settings):
        mapping, _, key = member.rpartition(".")
        (limit,) = extras_of(typing.get_args(options(cls)[mapping])[0])
        if limit.refusal(key, False) is not None:
            origin = next(
                item.origin for name, item in settings.items() if f"{name}.".startswith(f"{member}.")
            )
            yield f"{member} ({origin}): {key!r} can't be a key of {mapping}; allowed: {limit}."


def _no_section(name: str, item: SourceValue) -> str:
    came = "null" if item.value is None else str(item)
    hint = "it is a section with keys of its own"
    if isinstance(item.value, str) and "${" in item.value:
        hint = "a reference stands for one option: give each key of the section its own"
    return f"{name} ({item.origin}): {came} can't stand here; {hint}."


def _meant(cls: type, known: Mapping[str, Any], name: str, aliases: Mapping[str, str]) -> tuple[str, str]:
    """Return the option that an unknown name may mean (empty if unsure), and what to say."""
    parent, _, leaf = name.rpartition(".")
    others = [trainer for trainer, one in CONFIGS.items() if generic(one, name) in options(one)]
    if others:
        return "", f"only a trial with trainer: {' or '.join(others)} has it."
    if name in aliases:
        return "", f"in a file its name is {aliases[name]}; {name} is short for it on the command line."
    if leaf in ANSWERS:
        return "", ANSWERS[leaf].replace("{model}", "actor" if "actor" in known else "model")
    if {"lora", "peft"} & set(leaf.split("_")):
        return "", "LoRA is not supported. Remove this option."
    if leaf in OF_WORKFLOWS and WORKFLOW_ARGS in known:
        return "", f"did you mean {WORKFLOW_ARGS}.{leaf}?"
    if typing.get_origin(known.get(parent)) is dict and not is_mapping(known[parent]):
        return "", f"{parent} has no keys of its own; give all of it at once, as {parent}='{{{leaf}: …}}'."
    if parent in known and section_of(known[parent]) is None:
        return "", f"{parent} is an option, which has no keys of its own."
    below = [n for n in known if parent and n.startswith(f"{parent}.") and n.rpartition(".")[2] == leaf]
    if len(below) == 1:
        return below[0], f"did you mean {below[0]}?"
    siblings = {n.rpartition(".")[2]: n for n in known if n.rpartition(".")[0] == parent}
    elsewhere = _same_leaf(known, name, leaf)
    near = meant(leaf, [*siblings, *([] if parent else [*aliases, *atlas.ALIASES])])
    if near and (not elsewhere or (parent and is_one_slip(leaf, near))):
        return siblings.get(near, ""), f"did you mean {siblings.get(near, near)}?"
    if parent and leaf in atlas.ALIASES and not elsewhere:
        to = atlas.ALIASES[leaf].to.replace("{model}", "actor" if "actor" in known else "model")
        hint = f"did you mean {to}? " if to in known else ""
        return "", f"{hint}{leaf} stands at the top level, without {parent}."
    leaves = [n.rpartition(".")[2] for n, hint in known.items() if section_of(hint) is None]
    if not elsewhere and len(leaf) > LONGEST_WORD:  # a short one is a word of its own: `model` is no `mode`
        elsewhere = _same_leaf(known, name, meant(leaf, leaves))
    if elsewhere:
        return "", f"did you mean {' or '.join(elsewhere[:3])}?"
    if len(siblings) > MOST_SHOWN and parent:
        return "", f"`--help {parent}` shows the {len(siblings)} that are known here."
    if parent and siblings:
        return "", f"known here: {', '.join(sorted(siblings))}."
    own = f" A value for a workflow of your own goes into {WORKFLOW_ARGS}." if WORKFLOW_ARGS in known else ""
    return "", f"there is no option like it; `--help all` shows every one.{'' if parent else own}"


def _same_leaf(known: Collection[str], name: str, leaf: str) -> list[str]:
    """Return the options of this last name whose whole names are most like the one given."""
    same = [n for n in known if n.rpartition(".")[2] == leaf]
    alike = {n: difflib.SequenceMatcher(None, name, n).ratio() for n in same}
    return [n for n, ratio in alike.items() if ratio > max(alike.values()) - 0.1]


def _missing(cls: type, settings: Settings, given: Set[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each required option and section that is not among the given, with the refusal."""
    for field in dataclasses.fields(cls):
        if is_mapping(hints(cls)[field.name]):
            continue
        name, section = prefix + field.name, section_of(hints(cls)[field.name])
        is_set = name in given
        if is_set and section and settings.get(name, SourceValue({}, "")).value == {}:
            yield from _missing(section, settings, given, f"{name}.")
        elif not is_set and default_of(field) is dataclasses.MISSING:
            if section is None:
                yield name, f"{name} is missing and has no default: set it in the file, or with --{name}."
                continue
            inner = dataclasses.fields(section)
            needed = [f"{name}.{one.name}" for one in inner if default_of(one) is dataclasses.MISSING]
            yield name, f"section {name} is missing; it needs at least {', '.join(needed)}."
