"""Refuse unknown names, with a hint: short names, names of other toolkits, and misspellings.

Also refuse values in place of a section, and missing required options.
"""

import dataclasses
import difflib
import itertools
import typing
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any, NamedTuple

from hpc_rl.config.compat import atlas
from hpc_rl.config.compat.areal_names import OF_WORKFLOWS, WORKFLOW_ARGS
from hpc_rl.config.compat.other_names import ANSWERS, SECTIONS
from hpc_rl.config.load.fields import (
    find_members,
    find_section,
    get_default,
    guess_name,
    is_mapping,
    is_one_slip,
    is_optional,
    list_hints,
    list_limits,
    list_options,
    make_generic,
)
from hpc_rl.config.load.source import Settings, SourceValue
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.core.refusal import Kind, Refusal

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
    """Return whether a name without a dot is an option or section, here or in another toolkit."""
    known: list[Collection[str]] = [ALIASES, atlas.ALIASES, ANSWERS, *map(list_options, CONFIGS.values())]
    return any(name in names for names in known)


class Hint(NamedTuple):
    """What an unknown name may mean."""

    text: str
    options: tuple[str, ...] = ()  # that the text names
    meant: str = ""  # the one of them that is almost certainly meant


def find_refused_names(cls: type, settings: Settings, aliases: Mapping[str, str]) -> list[Refusal]:
    """Return refusals of unknown names, of values in place of sections, and of missing options."""
    known = list_options(cls, members=find_members(cls, settings))
    refusals: dict[str, Refusal] = {}
    suggested: set[str] = set()
    for name, item in settings.items():
        parents = itertools.accumulate(name.split("."), "{}.{}".format)  # a, a.b, a.b.c
        unknown = next((parent for parent in parents if parent not in known), "")
        if unknown in SECTIONS:  # a section of verl; the hint is about its option
            unknown = name
        if unknown:
            hint = _suggest_option(cls, known, unknown, aliases)
            suggested.add(hint.meant)
            shown = unknown if unknown.isprintable() else repr(unknown)
            refusals.setdefault(unknown, refuse_unknown(shown, item.origin, hint))
        elif find_section(known[name]):
            is_left_out = item.value is None and (is_optional(known[name]) or is_mapping(known[name]))
            if item.value != {} and not is_left_out:
                refusals[name] = _refuse_section(name, item)
    given = {name for one in settings for name in itertools.accumulate(one.split("."), "{}.{}".format)}
    missing = [
        refusal for refusal in _find_missing(cls, settings, given) if refusal.options[0] not in suggested
    ]
    return [*refusals.values(), *_check_keys(cls, settings), *missing]


def _check_keys(cls: type, settings: Settings) -> Iterator[Refusal]:
    """Yield a refusal for each invalid key of a mapping of sections."""
    for member in find_members(cls, settings):
        mapping, _, key = member.rpartition(".")
        (limit,) = list_limits(typing.get_args(list_options(cls)[mapping])[0])
        if limit.explain_refusal(key, False) is not None:
            origin = next(
                item.origin for name, item in settings.items() if f"{name}.".startswith(f"{member}.")
            )
            why = f"can't be a name in section {mapping}; allowed: {limit}"
            yield Refusal(
                option=member,
                origin=origin,
                value=repr(key),
                kind=Kind.VALUE,
                why=why,
                related=(mapping,),
            )


def _refuse_section(name: str, item: SourceValue) -> Refusal:
    came = "null" if item.value is None else str(item)
    hint = f"{name} is a section: give its options, such as {name}.OPTION"
    if isinstance(item.value, str) and "${" in item.value:
        hint = "a reference stands for one option: give each option of the section its own"
    return Refusal(
        option=name,
        origin=item.origin,
        value=came,
        kind=Kind.VALUE,
        why="can't be the value of a section",
        use=hint,
    )


def refuse_unknown(option: str, origin: str, hint: Hint) -> Refusal:
    """Return the refusal of a name that is not an option."""
    return Refusal(
        option=option, origin=origin, kind=Kind.UNKNOWN, why=hint.text.rstrip("."), related=hint.options
    )


def _suggest_option(cls: type, known: Mapping[str, Any], name: str, aliases: Mapping[str, str]) -> Hint:
    """Return the likely meaning of an unknown name."""
    parent, _, leaf = name.rpartition(".")
    model = "actor" if "actor" in known else "model"
    others = [trainer for trainer, one in CONFIGS.items() if make_generic(one, name) in list_options(one)]
    if others:
        return Hint(f"only a trial with trainer: {' or '.join(others)} has it.", ("trainer",))
    if name in aliases:
        text = f"in a file its name is {aliases[name]}; {name} is short for it on the command line."
        return Hint(text, (aliases[name],))
    if leaf in ANSWERS:
        return Hint(ANSWERS[leaf].replace("{model}", model))
    if leaf in OF_WORKFLOWS and WORKFLOW_ARGS in known:
        return Hint(f"did you mean {WORKFLOW_ARGS}.{leaf}?", (f"{WORKFLOW_ARGS}.{leaf}",))
    if typing.get_origin(known.get(parent)) is dict and not is_mapping(known[parent]):
        text = f"{parent} has no keys to set one by one; give it as a whole, as {parent}='{{{leaf}: …}}'."
        return Hint(text, (parent,))
    if parent in known and find_section(known[parent]) is None:
        return Hint(f"{parent} is an option, not a section: it has no keys.", (parent,))
    below = [n for n in known if parent and n.startswith(f"{parent}.") and n.rpartition(".")[2] == leaf]
    if len(below) == 1:
        return Hint(f"did you mean {below[0]}?", (below[0],), below[0])
    siblings = {n.rpartition(".")[2]: n for n in known if n.rpartition(".")[0] == parent}
    elsewhere = _find_same_leaf(known, name, leaf)
    near = guess_name(leaf, [*siblings, *([] if parent else [*aliases, *atlas.ALIASES])])
    if near and (not elsewhere or (parent and is_one_slip(leaf, near))):
        option = siblings.get(near, near)
        return Hint(f"did you mean {option}?", (option,), siblings.get(near, ""))
    if parent and leaf in atlas.ALIASES and not elsewhere:
        to = atlas.ALIASES[leaf].to.replace("{model}", model)
        hint = f"did you mean {to}? " if to in known else ""
        return Hint(f"{hint}{leaf} stands at the top level, without {parent}.", (to, parent))
    leaves = [n.rpartition(".")[2] for n, hint in known.items() if find_section(hint) is None]
    if not elsewhere and len(leaf) > LONGEST_WORD:  # short names are words: `model` is no `mode`
        elsewhere = _find_same_leaf(known, name, guess_name(leaf, leaves))
    if elsewhere:
        return Hint(f"did you mean {' or '.join(elsewhere[:3])}?", tuple(elsewhere[:3]))
    if len(siblings) > MOST_SHOWN and parent:
        return Hint(f"`--help {parent}` shows the {len(siblings)} that are known here.", (parent,))
    if parent and siblings:
        return Hint(f"known here: {', '.join(sorted(siblings))}.", (parent,))
    own = f" A value for your own workflow goes into {WORKFLOW_ARGS}." if WORKFLOW_ARGS in known else ""
    text = f"no option has a similar name; `--help all` lists all options.{'' if parent else own}"
    return Hint(text, () if parent or not own else (WORKFLOW_ARGS,))


def _find_same_leaf(known: Collection[str], name: str, leaf: str) -> list[str]:
    """Return the options that end in `leaf`, if their whole names are the most similar to `name`."""
    same = [n for n in known if n.rpartition(".")[2] == leaf]
    alike = {n: difflib.SequenceMatcher(None, name, n).ratio() for n in same}
    return [n for n, ratio in alike.items() if ratio > max(alike.values()) - 0.1]


def _find_missing(cls: type, settings: Settings, given: Set[str], prefix: str = "") -> Iterator[Refusal]:
    """Yield a refusal for each required option or section that is not given."""
    for field in dataclasses.fields(cls):
        if is_mapping(list_hints(cls)[field.name]):
            continue
        name, section = prefix + field.name, find_section(list_hints(cls)[field.name])
        is_set = name in given
        if is_set and section and settings.get(name, SourceValue({}, "")).value == {}:
            yield from _find_missing(section, settings, given, f"{name}.")
        elif not is_set and get_default(field) is dataclasses.MISSING:
            if section is None:
                why = f"is missing and has no default: set it in the file, or with --{name}"
                yield Refusal(option=name, kind=Kind.MISSING, why=why)
                continue
            inner = dataclasses.fields(section)
            needed = [f"{name}.{one.name}" for one in inner if get_default(one) is dataclasses.MISSING]
            why = f"section {name} is missing; it needs at least {', '.join(needed)}"
            yield Refusal(option="", kind=Kind.MISSING, why=why, related=(name, *needed))
