"""Results of the checks of a set-up: one form, which all commands show."""

import enum
from dataclasses import dataclass


class CheckState(enum.StrEnum):
    OK = "ok"
    REFUSED = "refused"
    NOTE = "note"
    SKIPPED = "skipped"
    UNREACHABLE = "unreachable"  # the scheduler can't be asked


WRONG = (CheckState.REFUSED, CheckState.UNREACHABLE)


@dataclass(frozen=True)
class CheckResult:
    """One row of the list of checks; `name` is the name of the check."""

    name: str
    state: CheckState
    detail: str = ""
    nearest: str = ""
    option: str = ""
    kind: str = ""  # of a refusal: a Kind
    related: tuple[str, ...] = ()  # other options that the refusal depends on
    exit_code: int = 0

    def line(self) -> str:
        return f"{self.name:<20} {self.state}" + (f": {self.detail}" if self.detail else "")

    @property
    def text(self) -> str:
        """Return the problem and the values that would fit."""
        return self.detail + (f" Nearest that fits: {self.nearest}." if self.nearest else "")
