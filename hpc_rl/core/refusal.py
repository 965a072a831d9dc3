"""Refusal: why the value of an option can't be used, as data, and its text."""

import enum
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.core.errors import ExitCode


class Kind(enum.StrEnum):
    """Why something is refused."""

    UNKNOWN = "unknown"  # there is no such option
    VALUE = "value"  # the option can't have this value
    CONFLICT = "conflict"  # another option has a value that contradicts it
    NO_EFFECT = "no_effect"  # the option is set, and nothing would use it
    MISSING = "missing"  # the option must be set
    UNSUPPORTED = "unsupported"  # another system has the option or value; this version does not
    FILE = "file"  # a file or directory is absent, damaged or does not fit
    MACHINE = "machine"  # nodes, devices, memory, software or the scheduler can't do it


UNSET: Any = object()


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why an option can't be used, and what to use instead; or, as a note, what to know about it.

    The text is "OPTION VALUE WHY; USE.", or with an origin "OPTION (ORIGIN): VALUE WHY; USE.". `why` begins
    with a verb, or with a colon: "needs GPUs", ": the file is empty". Without an option it is the beginning.
    """

    option: str  # dotted name; empty if it is about no option
    kind: Kind
    why: str
    value: Any = UNSET
    use: str = ""
    related: tuple[str, ...] = ()  # other options that the refusal depends on
    origin: str = ""  # place of the value: a file with its line, or the command line
    is_note: bool = False
    exit_code: ExitCode = field(default=ExitCode.REFUSED, compare=False)

    @property
    def options(self) -> tuple[str, ...]:
        """Return the option and the related ones."""
        return (self.option, *self.related) if self.option else self.related

    def __str__(self) -> str:
        name = f"{self.option} ({self.origin}):" if self.origin else self.option
        subject = name if self.value is UNSET else f"{name} {self.value}"
        joint = " " if subject and not self.why.startswith((":", ",")) else ""
        end = "" if f"{self.why}{self.use}".endswith((".", "?")) else "."
        return f"{subject}{joint}{self.why}{f'; {self.use}' if self.use else ''}{end}"
