"""The result of a translation: settings with our names, notes and refusals; and references between names."""

import dataclasses
from collections import defaultdict

from hpc_rl.config.load.source import WHOLE_REFERENCE, Settings, SourceValue
from hpc_rl.core.refusal import Kind, Refusal, make_note

_SHOWN = 3  # names in a note


@dataclasses.dataclass
class RenamedSettings:
    """Settings with our names; the `replaced` ones, for references to them; notes and refusals."""

    settings: Settings
    replaced: Settings = dataclasses.field(default_factory=dict)
    notes: list[Refusal] = dataclasses.field(default_factory=list)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)
    idle: dict[str, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def note_idle(self) -> None:
        """Add a note for each reason in `idle`, with the names that have no effect."""
        self.notes += [
            make_note("", f"{shorten_list(names)}: no effect: {why}", Kind.NO_EFFECT, related=tuple(names))
            for why, names in self.idle.items()
        ]


def explain_name(option: str) -> str:
    """Return the text of a note about a name of another system: it sets our `option`."""
    return f"is read as {option}, its name in hpc-rl"


def follow_references(item: SourceValue, given: Settings) -> SourceValue:
    """Return the value that `${a.b}` stands for; other values as they are."""
    seen: set[str] = set()
    while (
        (match := WHOLE_REFERENCE.fullmatch(str(item.value))) and match[1] in given and match[1] not in seen
    ):
        seen.add(match[1])
        item = given[match[1]]
    return item


def shorten_list(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - _SHOWN
    return f"{', '.join(names[:_SHOWN])} and {more} more" if more > 1 else ", ".join(names)
