"""Refusal: why the value of an option can't be used, as data, and its text."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


class Kind(enum.StrEnum):
    """Why something is refused."""

    UNKNOWN = "unknown"  # there is no such option
    VALUE = "value"  # the option can't have this value
    CONFLICT = "conflict"  # another option has a value that contradicts it
    NO_EFFECT = "no_effect"  # the option is set, and nothing would use it
    MISSING = "missing"  # the option must be set
    UNSUPPORTED = "unsupported"  # another system has the option or value; this version does not
    FILE = "file"  # a file or directory is absent, damaged or does not fit
    STORAGE = "storage"  # a directory can't be written, or lacks space
    MACHINE = "machine"  # nodes, devices, memory, software or the scheduler can't do it


class _Unset(enum.Enum):
    """The absence of a value: null is a value."""

    UNSET = enum.auto()


UNSET: Any = _Unset.UNSET
MAX_PLACES = 3  # in a text


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why an option can't be used, and what to use instead; or, as a note, what to know about it.

    The text is "OPTION VALUE WHY; USE. (PLACES)", or with an origin "OPTION (ORIGIN): VALUE WHY; USE."; of a
    note without the colon. `why` begins with a verb, or with a colon: "needs GPUs", ": the file is empty".
    Without an option it is the beginning.
    """

    option: str  # dotted name; empty if it is about no option
    kind: Kind
    why: str
    value: Any = UNSET
    use: str = ""
    related: tuple[str, ...] = ()  # other options that the refusal depends on
    origin: str = ""  # place of the value: a file with its line, or the command line
    places: tuple[str, ...] = ()  # of the option and the related ones
    is_note: bool = False
    is_warning: bool = False  # a note on what is probably wrong

    @property
    def options(self) -> tuple[str, ...]:
        """Return the option and the related ones."""
        return (self.option, *self.related) if self.option else self.related

    def locate(self, origins: Mapping[str, str]) -> "Refusal":
        """Return the refusal with the places of its options; `origins` is option -> place."""
        if self.origin or self.places or self.is_note:
            return self
        places = dict.fromkeys(origins[name] for name in self.options if name in origins)
        return replace(self, places=tuple(places)[:MAX_PLACES])

    def to_json(self) -> dict[str, Any]:
        """Return the fields; `from_json` reads them, the value as text."""
        value = {} if self.value is UNSET else {"value": str(self.value)}
        return {name: item for name, item in vars(self).items() if name != "value"} | value

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Refusal":
        lists = {name: tuple(fields[name]) for name in ("related", "places")}
        return cls(**{**fields, **lists, "kind": Kind(fields["kind"])})

    def __str__(self) -> str:
        name = f"unknown key {self.option}" if self.kind is Kind.UNKNOWN else self.option
        if self.origin:
            name += f" ({self.origin})" if self.is_note else f" ({self.origin}):"
        name = f"WARNING: {name}" if self.is_warning else name
        subject = name if self.value is UNSET else f"{name} {self.value}"
        joint = " " if subject and not self.why.startswith((":", ",")) else ""
        # a text of an error, which `why` may quote, is a sentence
        problem = self.why.removesuffix(".") if self.use else self.why
        end = "" if f"{problem}{self.use}".endswith((".", "?")) else "."
        text = f"{subject}{joint}{problem}{f'; {self.use}' if self.use else ''}{end}"
        return f"{text} ({', '.join(self.places)})" if self.places else text


def make_note(
    option: str,
    why: str,
    kind: Kind = Kind.VALUE,
    *,
    value: Any = UNSET,
    origin: str = "",
    related: tuple[str, ...] = (),
    is_warning: bool = False,
) -> Refusal:
    """Return a note about an option, or about none."""
    return Refusal(
        option=option,
        value=value,
        origin=origin,
        kind=kind,
        why=why,
        related=related,
        is_note=True,
        is_warning=is_warning,
    )


def make_idle_note(names: Sequence[str], why: str) -> Refusal:
    """Return a note about options without effect."""
    if len(names) == 1:
        return make_note(names[0], f": no effect: {why}", Kind.NO_EFFECT)
    return make_note("", f"{', '.join(names)}: no effect: {why}", Kind.NO_EFFECT, related=tuple(names))


def order_refusals(items: Iterable[T], get_refusal: Callable[[T], Refusal | None]) -> list[T]:
    """Return the items in reading order: causes before consequences.

    A refusal comes after the refusals of the options that it depends on. Otherwise the sections keep their
    order, and the refusals of a section stand together.
    """
    rows = [(item, get_refusal(item)) for item in items]
    refused = {one.option: one for _, one in rows if one and one.option}
    sections: dict[str, int] = {}
    for _, one in rows:
        sections.setdefault(_find_section(one), len(sections))

    def measure_depth(one: Refusal | None, seen: frozenset[str]) -> int:
        """Return the length of the longest chain of causes."""
        causes = [name for name in one.related if name in refused and name not in seen] if one else []
        return max((1 + measure_depth(refused[name], seen | {name}) for name in causes), default=0)

    def rank(row: tuple[T, Refusal | None]) -> tuple[int, int]:
        one = row[1]
        return measure_depth(one, frozenset({one.option} if one else ())), sections[_find_section(one)]

    return [item for item, _ in sorted(rows, key=rank)]


def _find_section(refusal: Refusal | None) -> str:
    return refusal.option.partition(".")[0] if refusal else ""
