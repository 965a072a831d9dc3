"""Sources laid over each other: sections merge by key, all else is replaced; unknown keys are refused."""

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from hpc_rl.config.loading.fields import default_of, field_of, is_optional, options, section_of
from hpc_rl.config.loading.source import SourceValue

CLOSE = 0.8  # similarity from which a name is suggested


def nearest(name: str, names: Collection[str], cutoff: float = CLOSE) -> str:
    """Return the most similar name; empty where none is similar enough."""
    found = difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)
    return found[0] if found else ""


class MergedSettings:
    """The settings of one configuration, by dotted name, and the refusals of what can't be merged."""

    def __init__(
        self,
        root: type,
        others: Mapping[str, type] | None = None,
        aliases: Mapping[str, str] | None = None,
        top_level: Collection[str] = (),
        not_built: Mapping[str, str] | None = None,
    ) -> None:
        """Take further names, for better refusals.

        `others` are configurations of other trainers, `aliases` short names of arguments, `top_level`
        translated names of the top level, `not_built` names of other toolkits with what to do instead.
        """
        self.root = root
        self.others = others or {}
        self.aliases = aliases or {}
        self.top_level = top_level
        self.not_built = not_built or {}
        self.known = options(root)
        self.settings: dict[str, SourceValue] = {}
        self.refusals: list[str] = []
        self.refused: set[str] = set()  # sections whose value is not a section
        self.suggested: set[str] = set()  # nearest names of unknown keys: not reported as missing again

    def overlay(self, tree: SourceValue) -> None:
        """Lay one source over the settings."""
        self._overlay(tree, "", {})

    def _overlay(self, tree: SourceValue, prefix: str, seen: dict[str, SourceValue]) -> None:
        for key, item in tree.value.items():
            name = prefix + key
            section = section_of(self.known.get(name))
            twice = seen.get(name) if section is None else None
            seen[name] = item
            if name not in self.known:
                self.refusals.append(self._unknown(name, item))
            elif twice:
                self.refusals.append(f"{name} ({item.origin}) stands twice in one file: also {twice.origin}.")
            elif section is None:
                self._reveal(name)
                self.settings[name] = item
            elif isinstance(item.value, dict):
                self._reveal(name)
                self.settings.setdefault(name, SourceValue({}, item.origin))
                self._overlay(item, f"{name}.", seen)
            elif item.value is None and is_optional(self.known[name]):
                self._forget(name)
                self.settings[name] = item
            else:
                self._refuse_section(name, item)

    def _refuse_section(self, name: str, item: SourceValue) -> None:
        came = "null" if item.value is None else str(item)
        hint = "it is a section with keys of its own"
        if isinstance(item.value, str) and "${" in item.value:
            hint = "a reference stands for one option: give each key of the section its own"
        self.refused.add(name)
        self.refusals.append(f"{name} ({item.origin}): {came} can't stand here; {hint}.")

    def _reveal(self, name: str) -> None:
        """Bring back the sections above a key that an earlier source set to null."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            section = ".".join(parts[:end])
            above = self.settings.get(section)
            if section_of(self.known[section]) and above is not None and above.value is None:
                del self.settings[section]

    def _forget(self, section: str) -> None:
        for name in [n for n in self.settings if n.startswith(section + ".")]:
            del self.settings[name]

    def _unknown(self, name: str, item: SourceValue) -> str:
        return f"unknown key {name if name.isprintable() else repr(name)} ({item.origin}): {self._hint(name)}"

    def _hint(self, name: str) -> str:
        parent, _, leaf = name.rpartition(".")
        elsewhere = [trainer for trainer, cls in self.others.items() if name in options(cls)]
        if name in self.aliases:
            return f"in a file its name is {self.aliases[name]}; {name} is short for it on the command line."
        if leaf in self.not_built:
            return self.not_built[leaf]
        if elsewhere:
            return f"only a trial with trainer: {' or '.join(elsewhere)} has it."
        if parent and leaf in self.top_level:
            return f"{leaf} stands at the top level, without {parent}."
        siblings = {n.rpartition(".")[2]: n for n in self.known if n.rpartition(".")[0] == parent}
        short = [] if parent else [*self.aliases, *self.top_level]
        near = nearest(leaf, [*siblings, *short])
        if near in siblings:
            self.suggested.add(siblings[near])
            return f"did you mean {siblings[near]}?"
        if near:
            return f"did you mean {near}?"
        elsewhere = self._same_leaf(name, leaf) or self._same_leaf(name, nearest(leaf, self._leaves()))
        if elsewhere:
            return f"did you mean {' or '.join(elsewhere[:3])}?"
        if parent in self.known or not parent:
            known = [key for key in siblings if parent or section_of(self.known[key])]
            return f"known here: {', '.join(sorted(known)) or 'nothing'}."
        return f"there is no section {parent}."

    def _leaves(self) -> list[str]:
        return [name.rpartition(".")[2] for name, hint in self.known.items() if section_of(hint) is None]

    def _same_leaf(self, name: str, leaf: str) -> list[str]:
        """Return the options of this last name whose whole names are most like the one given."""
        alike = {
            n: difflib.SequenceMatcher(None, name, n).ratio()
            for n in self.known
            if n.rpartition(".")[2] == leaf
        }
        return [n for n, ratio in alike.items() if ratio > max(alike.values()) - 0.1]

    def follows_a_default(self, name: str, written: SourceValue) -> bool:
        """Return whether an option refers to an unset one and equals its own default: it may still adapt."""
        reference = re.fullmatch(r"\$\{([\w.]+)\}", written.value) if isinstance(written.value, str) else None
        if reference is None or reference[1] in self.settings:
            return False
        return self.settings[name].value == self._default(name) and self._has_default(reference[1])

    def _has_default(self, name: str) -> bool:
        return section_of(self.known.get(name)) is None and self._default(name) is not dataclasses.MISSING

    def _default(self, name: str) -> Any:
        field = field_of(self.root, name)
        return dataclasses.MISSING if field is None else default_of(field)

    def missing(self) -> list[str]:
        """Return a refusal for each required option and section that is not set."""
        return list(self._missing(self.root, ""))

    def _missing(self, cls: type, prefix: str) -> list[str]:
        found = []
        for field in dataclasses.fields(cls):
            name = prefix + field.name
            section = section_of(self.known[name])
            if not self.has(name):
                if default_of(field) is dataclasses.MISSING and name not in self.suggested | self.refused:
                    found.append(_missing_line(name, section))
            elif section and not self.is_null(name):
                found += self._missing(section, f"{name}.")
        return found

    def has(self, name: str) -> bool:
        """Return whether an option, or anything in a section, is set."""
        return name in self.settings or any(n.startswith(name + ".") for n in self.settings)

    def is_null(self, section: str) -> bool:
        """Return whether a section is set to null."""
        return section in self.settings and self.settings[section].value is None


def _missing_line(name: str, section: type | None) -> str:
    if section is None:
        return f"{name} is missing and has no default: set it in the file, or with --{name}."
    required = [
        f"{name}.{field.name}"
        for field in dataclasses.fields(section)
        if default_of(field) is dataclasses.MISSING
    ]
    return f"section {name} is missing; it needs at least {', '.join(required)}."
