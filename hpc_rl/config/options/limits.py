"""Limits of values, declared with their types: `n_nodes: PositiveInt`.

Only the loader uses them; for all other code the types are plain `int`, `float` and `str`.
"""

import re
from dataclasses import dataclass
from typing import Annotated

from hpc_rl.core import slurm_time


@dataclass(frozen=True)
class Limits:
    """Bounds of a number; `above` and `below` exclude the bound."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def explain_refusal(self, value: float, is_bare_number: bool) -> str | None:
        """Return None for an allowed value, else the reason of the refusal, which may be empty."""
        is_inside = (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        return None if is_inside else ""

    def __str__(self) -> str:
        words = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)


_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")  # a shell variable in a path


@dataclass(frozen=True)
class Place:
    """A path: `~` is expanded, a relative path is made absolute, an empty one stays empty.

    Shell variables are refused, because no shell expands them in a file.
    """

    bare_names: bool = False  # a name without a slash is looked up on the PATH
    or_script: bool = False  # a text of several lines, or one that begins with #!, is a script

    def is_path(self, text: str) -> bool:
        """Return whether the text is the path of a file."""
        if self.or_script and ("\n" in text or text.startswith("#!")):
            return False
        return not (self.bare_names and "/" not in text)

    def explain_refusal(self, text: str, is_bare_number: bool) -> str | None:
        """Return why a text can't be a path; None if it can."""
        if self.or_script and not self.is_path(text):
            return None
        if any(ord(char) < 32 or ord(char) == 127 for char in text):
            return "A path can't contain line breaks or control characters."
        if variable := _VARIABLE.search(text):
            name = variable[1] or variable[2]
            return f"Shell variables are not expanded here: write ${{oc.env:{name}}} for {variable[0]}."
        too_long = len(text.encode()) > 3000 or any(len(part.encode()) > 255 for part in text.split("/"))
        return "It is too long for a path." if too_long else None


@dataclass(frozen=True)
class AsWritten:
    """Any value, stored as text; values of other types are stored as JSON."""

    def explain_refusal(self, text: str, is_bare_number: bool) -> str | None:
        """Return None: every text is allowed."""
        return None


PositiveInt = Annotated[int, Limits(at_least=1)]
NodeCount = Annotated[int, Limits(at_least=1, at_most=10_000)]
UnitCount = Annotated[int, Limits(at_least=0, at_most=1000)]
Port = Annotated[int, Limits(at_least=0, at_most=65_535)]
NonNegativeInt = Annotated[int, Limits(at_least=0)]
ChunkTokens = Annotated[int, Limits(at_least=-1)]
PositiveFloat = Annotated[float, Limits(above=0)]
NonNegativeFloat = Annotated[float, Limits(at_least=0)]
Share = Annotated[float, Limits(at_least=0, at_most=1)]
Penalty = Annotated[float, Limits(at_least=-2, at_most=2)]
PositiveShare = Annotated[float, Limits(above=0, at_most=1)]
ShareInside = Annotated[float, Limits(above=0, below=1)]
ShareBelowHalf = Annotated[float, Limits(at_least=0, below=0.5)]
ShareBelowOne = Annotated[float, Limits(at_least=0, below=1)]
AboveOne = Annotated[float, Limits(above=1)]
PathText = Annotated[str, Place()]
Executable = Annotated[str, Place(bare_names=True)]
AnyText = Annotated[str, AsWritten()]
ScriptOrPath = Annotated[str, Place(or_script=True)]


@dataclass(frozen=True)
class Grammar:
    """The format of a text. If `quoted`, a bare YAML number is refused, because its unit is ambiguous."""

    pattern: str
    words: str
    quoted: bool = False

    def explain_refusal(self, text: str, is_bare_number: bool) -> str | None:
        """Return None for a text of this format, else an empty reason."""
        fits = re.fullmatch(self.pattern, text) and not (self.quoted and is_bare_number)
        return None if fits else ""

    def __str__(self) -> str:
        return self.words


SlurmTime = Annotated[
    str,
    Grammar(
        slurm_time.PATTERN, "24:00:00 (hours), 2-12 (days-hours), or '90' in quotes (minutes)", quoted=True
    ),
]
_MEMORY_WORDS = "a number with an optional unit K, M, G or T, such as 200G"
SlurmMemory = Annotated[str, Grammar(r"[0-9]+[KMGT]?", _MEMORY_WORDS)]
SlurmMemoryOrDerived = Annotated[
    str, Grammar(r"derived|[0-9]+[KMGT]?", f"derived, or {_MEMORY_WORDS}, or 0 for the whole node")
]
SlurmCountOrDerived = Annotated[str, Grammar(r"derived|[1-9][0-9]{0,5}", "derived, or a number")]
ModuleName = Annotated[str, Grammar(r"[A-Za-z0-9_][A-Za-z0-9_./+:@=-]*", "a name, such as cuda/12.4")]
Umask = Annotated[str, Grammar(r"0?0[0-7]{2}", "077 (only you), 027 (the group reads) or the like")]
NodePath = Annotated[
    str,
    Grammar(
        r"([/$][^\x00-\x1f\x7f]*)?", "an absolute path, which may begin with a variable of the node: $TMPDIR"
    ),
]
GpuType = Annotated[str, Grammar(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", "a name, such as a100")]
