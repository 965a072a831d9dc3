"""From settings with their origins to the dataclasses: strict; a refusal names the key, where it came from and what is allowed.

The types that a configuration field may have are those handled in `_convert`; another one is an error of ours.
jsonargparse is not used here: it reports neither the line of a YAML file, nor the nearest name, nor a null section.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from hpc_rl.config.sections.limits import Grammar, Limits, Place

LONGEST_SHOWN = 200  # characters of a value in a message
LARGEST_INT = 2**53 - 1  # what JSON readers agree on


@dataclass(frozen=True)
class Given:
    """A value that somebody wrote. A mapping holds Given values; `text` is the exact source text of a scalar.

    What an argument of the command line says is text first: `--launcher.slurm.time 90` needs no quotes.
    """

    value: Any
    origin: str
    text: str | None = None
    is_argument: bool = False

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def given(data: Any, origin: str) -> Given:
    """Plain data as Given, all of one origin."""
    if isinstance(data, dict):
        return Given({str(key): given(item, origin) for key, item in data.items()}, origin)
    if isinstance(data, list):
        return Given([given(item, origin) for item in data], origin)
    return Given(
        data, origin, str(data) if isinstance(data, int | float) and not isinstance(data, bool) else None
    )


@cache
def hints(cls: type) -> dict[str, Any]:
    """Field name -> type, with its limits."""
    known = typing.get_type_hints(cls, include_extras=True)
    return {field.name: known[field.name] for field in dataclasses.fields(cls)}


def alternatives(hint: Any) -> tuple[Any, ...]:
    return (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )


def section_of(hint: Any) -> type | None:
    """The dataclass of a section, optional or not; None for a plain option."""
    return next(
        (kind for kind in alternatives(hint) if isinstance(kind, type) and dataclasses.is_dataclass(kind)),
        None,
    )


def is_optional(hint: Any) -> bool:
    return types.NoneType in alternatives(hint)


def default_of(field: dataclasses.Field) -> Any:
    """The default of an option; dataclasses.MISSING where it has none."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


@cache
def options(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every option and section."""
    found: dict[str, Any] = {}
    for name, hint in hints(cls).items():
        found[prefix + name] = hint
        section = section_of(hint)
        if section:
            found |= options(section, f"{prefix}{name}.")
    return found


class Builder:
    """Collects settings and the refusals they meet; one instance for one configuration."""

    def __init__(
        self,
        root: type,
        others: Mapping[str, type] | None = None,
        aliases: Mapping[str, str] | None = None,
        further: Collection[str] = (),
    ) -> None:
        """What makes better refusals: `others` (configurations of other trainers, by name), `aliases` (short names of arguments)
        and `further` (names that stand at the top level and were translated before)."""
        self.root = root
        self.others = others or {}
        self.aliases = aliases or {}
        self.further = further
        self.known = options(root)
        self.settings: dict[str, Given] = {}
        self.refusals: list[str] = []
        self.refused: set[str] = set()  # sections that are there, but not as a section
        self.suggested: set[str] = (
            set()
        )  # what an unknown key was probably meant to be; not reported as missing again

    def overlay(self, tree: Given) -> None:
        """Lay one source over what is there: sections merge by key, everything else is replaced."""
        self._overlay(tree, "", {})

    def _overlay(self, tree: Given, prefix: str, seen: dict[str, Given]) -> None:
        for key, item in tree.value.items():
            name = prefix + key
            twice = seen.get(name) if section_of(self.known.get(name)) is None else None
            seen[name] = item
            if name not in self.known:
                self.refusals.append(self._unknown(name, item))
            elif twice:
                self.refusals.append(f"{name} ({item.origin}) stands twice in one file: also {twice.origin}.")
            elif section_of(self.known[name]) is None:
                self._reveal(name)
                self.settings[name] = item
            elif isinstance(item.value, dict):
                self._reveal(name)
                self.settings.setdefault(name, Given({}, item.origin))
                self._overlay(item, f"{name}.", seen)
            elif item.value is None and is_optional(self.known[name]):
                self._forget(name)
                self.settings[name] = item
            else:
                came = "null" if item.value is None else _say(item)
                hint = "it is a section with keys of its own"
                if isinstance(item.value, str) and "${" in item.value:
                    hint = "a reference stands for one option: give each key of the section its own"
                self.refused.add(name)
                self.refusals.append(f"{name} ({item.origin}): {came} can't stand here; {hint}.")

    def _reveal(self, name: str) -> None:
        """A key inside a section that an earlier source set to null brings the section back."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            section = ".".join(parts[:end])
            if (
                section_of(self.known[section])
                and section in self.settings
                and self.settings[section].value is None
            ):
                del self.settings[section]

    def _forget(self, section: str) -> None:
        for name in [n for n in self.settings if n.startswith(section + ".")]:
            del self.settings[name]

    def _unknown(self, name: str, item: Given) -> str:
        parent, _, leaf = name.rpartition(".")
        siblings = {n.rpartition(".")[2]: n for n in self.known if n.rpartition(".")[0] == parent}
        near = difflib.get_close_matches(leaf.lower(), siblings, n=1, cutoff=0.6)
        short = [] if parent else [*self.aliases, *self.further]
        alias = difflib.get_close_matches(leaf.lower(), [*siblings, *short], n=1, cutoff=0.6)
        alike = {
            n: difflib.SequenceMatcher(None, name, n).ratio()
            for n in self.known
            if n.rpartition(".")[2] == leaf
        }
        same = [n for n, ratio in alike.items() if ratio > max(alike.values()) - 0.1]
        elsewhere = [trainer for trainer, cls in self.others.items() if name in options(cls)]
        if name in self.aliases:
            hint = f"in a file its name is {self.aliases[name]}; {name} is short for it on the command line."
        elif elsewhere:
            hint = f"only a trial with trainer: {' or '.join(elsewhere)} has it."
        elif alias and alias[0] in short:
            hint = f"did you mean {alias[0]}?"
        elif leaf in self.further:
            hint = f"{leaf} stands at the top level, without {parent}."
        elif same and difflib.SequenceMatcher(None, leaf, near[0] if near else "").ratio() < 0.8:
            hint = f"did you mean {' or '.join(same[:3])}?"
        elif near:
            self.suggested.add(siblings[near[0]])
            hint = f"did you mean {siblings[near[0]]}?"
        else:
            far = difflib.get_close_matches(name, self.known, n=1, cutoff=0.6)
            hint = (
                f"did you mean {far[0]}?"
                if far
                else f"known here: {', '.join(sorted(siblings)) or 'nothing'}."
            )
        return f"unknown key {name if name.isprintable() else repr(name)} ({item.origin}): {hint}"

    def typed(self, name: str, item: Given) -> Any:
        """A setting as its option has it: text stays as it was written. What does not fit, or refers, as it came."""
        plain = item.plain()
        if section_of(self.known[name]) is None and "${" not in repr(plain):
            for kind in alternatives(self.known[name]):
                with contextlib.suppress(ValueError):
                    return _convert(kind, item)
        return plain

    def follows_a_default(self, name: str, written: Given) -> bool:
        """Whether one reference was written to an option at its default, and says what this option's own default says.

        Then nothing was said: the default may still adapt.
        """
        reference = re.fullmatch(r"\$\{([\w.]+)\}", written.value) if isinstance(written.value, str) else None
        if (
            reference is None
            or reference[1] in self.settings
            or self.settings[name].value != self._default(name)
        ):
            return False
        return self._default(reference[1]) is not dataclasses.MISSING

    def _default(self, name: str) -> Any:
        """The default of an option; dataclasses.MISSING where it has none, or is no option."""
        cls: Any = self.root
        *sections, leaf = name.split(".")
        for section in sections:
            cls = section_of(hints(cls).get(section))
            if cls is None:
                return dataclasses.MISSING
        field = next((field for field in dataclasses.fields(cls) if field.name == leaf), None)
        return dataclasses.MISSING if field is None or section_of(hints(cls)[leaf]) else default_of(field)

    def build(self) -> Any | None:
        """The configuration; None if there are refusals."""
        config = self._section(self.root, "")
        return None if self.refusals else config

    def _section(self, cls: type, prefix: str) -> Any | None:
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name, hint = prefix + field.name, hints(cls)[field.name]
            section = section_of(hint)
            present = name in self.settings or any(n.startswith(name + ".") for n in self.settings)
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if not present:
                if required and name not in self.suggested and name not in self.refused:
                    self.refusals.append(self._missing(name, section))
                continue
            item = self.settings.get(name)
            if section is None and item is not None:
                values[field.name] = self._value(name, hint, item)
            elif item is not None and item.value is None:
                values[field.name] = None
            elif section is not None:
                values[field.name] = self._section(section, f"{name}.")
        return None if self.refusals else cls(**values)

    @staticmethod
    def _missing(name: str, section: type | None) -> str:
        if section is None:
            return f"{name} is missing and has no default: set it in the file, or with --{name}."
        needed = [
            f.name
            for f in dataclasses.fields(section)
            if f.default is f.default_factory is dataclasses.MISSING
        ]
        return f"section {name} is missing; it needs at least {', '.join(f'{name}.{key}' for key in needed)}."

    def _value(self, name: str, hint: Any, item: Given) -> Any:
        refusal = ""
        if self.refusals and isinstance(item.value, str) and "${" in item.value:
            return None  # nothing was interpolated, for something else is wrong
        if item.value == "???":
            self.refusals.append(f"{name} ({item.origin}): ??? stands for a value that is missing; set it.")
            return None
        empty = [Given("", item.origin, "", is_argument=True)] if item.is_argument and not item.text else []
        for came in [item, *empty]:  # `tokenizer_path=` is null where null can stand, else empty text
            for kind in alternatives(hint):
                try:
                    return _convert(kind, came)
                except ValueError as error:
                    refusal = str(error) or refusal
        allowed = " or ".join(describe(kind) for kind in alternatives(hint))
        self.refusals.append(
            f"{name} ({item.origin}): {_say(item)} can't be used; allowed: {allowed}. {refusal}".strip()
        )
        return None


def _say(item: Given) -> str:
    value = item.plain()
    kinds = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    if value is None:
        return "nothing" if item.is_argument and not item.text else "null"
    shown = item.text if item.text is not None else repr(value)
    if not shown.isprintable():
        shown = repr(shown)
    if len(shown) > LONGEST_SHOWN:
        shown = f"{shown[: LONGEST_SHOWN // 2]}… ({len(shown)} characters)"
    return f"{shown} ({kinds.get(type(value), type(value).__name__)})"


def describe(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Annotated:
        base, *extras = typing.get_args(kind)
        words = [str(extra) for extra in extras if isinstance(extra, Limits | Grammar)]
        return ", ".join([describe(base), *words])
    if typing.get_origin(kind) is Literal:
        return ", ".join(str(arg) or "empty" for arg in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"a list ({describe(typing.get_args(kind)[0])})"
    if typing.get_origin(kind) is dict:
        return f"a mapping ({describe(typing.get_args(kind)[1])})"
    return {bool: "true, false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}[
        kind
    ]


def _convert(kind: Any, item: Given) -> Any:
    """The value as `kind`. Raises ValueError, whose text is a further hint, or empty."""
    origin, value = typing.get_origin(kind), item.value
    if origin is typing.Annotated:
        base, *extras = typing.get_args(kind)
        converted = _convert(base, item)
        for extra in extras:
            if isinstance(extra, Limits) and not extra.allows(converted):
                raise ValueError
            if isinstance(extra, Grammar) and not _fits(extra, converted, item):
                raise ValueError
            if isinstance(extra, Place) and extra.refusal(converted):
                raise ValueError(extra.refusal(converted))
        return converted
    if origin is Literal:
        return _choice(typing.get_args(kind), item)
    if origin is list and isinstance(value, list):
        return [_convert(typing.get_args(kind)[0], part) for part in value]
    if origin is dict and isinstance(value, dict):
        return {key: _member(key, typing.get_args(kind)[1], part) for key, part in value.items()}
    if kind is types.NoneType and value is None:
        return None
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return _number(kind, value)
    if kind is str and item.text is not None and not isinstance(value, bool) and value is not None:
        return _text(item.text)  # `account: 1234`: the digits as they were written
    if kind is str and isinstance(value, str):
        return _text(value)
    if kind is str and isinstance(value, bool) and item.is_argument and item.text is not None:
        return _text(item.text)  # `notes=true`
    raise ValueError


def _member(key: str, kind: Any, part: Given) -> Any:
    try:
        return _convert(kind, part)
    except ValueError as error:
        raise ValueError(str(error) or f"{key} is {_say(part)}.") from None


def _text(value: str) -> str:
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("It must be text without NUL, in UTF-8.")
    return value


def _fits(grammar: Grammar, text: str, item: Given) -> bool:
    bare_number = not isinstance(item.value, str) and not item.is_argument
    return re.fullmatch(grammar.pattern, text) is not None and not (grammar.quoted and bare_number)


def _choice(allowed: tuple[Any, ...], item: Given) -> Any:
    if item.value in allowed and not isinstance(item.value, bool):
        return item.value
    near = difflib.get_close_matches(str(item.value), [str(a) for a in allowed], n=1)
    raise ValueError(f"Did you mean {near[0]}?" if near else "")


def _number(kind: type, value: float) -> float:
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError(f"Numbers end at {LARGEST_INT}.")
    if not math.isfinite(value):
        raise ValueError("It must be finite.")
    if kind is int and value != int(value):
        raise ValueError
    return kind(value)
