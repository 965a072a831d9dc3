"""What a check of a set-up reports: typed, and rendered in one place, so that all commands say the same."""

import enum
from dataclasses import dataclass
from typing import Any

from hpc_rl.core.errors import ExitCode


class CheckState(enum.StrEnum):
    OK = "ok"
    REFUSED = "refused"
    NOTE = "note"
    SKIPPED = "skipped"
    UNREACHABLE = "unreachable"  # the scheduler can't be asked


WRONG = (CheckState.REFUSED, CheckState.UNREACHABLE)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why the value of an option can't be used, and what to use; or, as a note, what to know about it."""

    option: str
    value: Any
    why: str
    use: str = ""
    is_note: bool = False
    exit_code: ExitCode = ExitCode.REFUSED

    def __str__(self) -> str:
        return f"{self.option} {self.value}: {self.why}{f'; {self.use}' if self.use else ''}."


@dataclass(frozen=True)
class CheckResult:
    """One row of the list of checks; `name` is the name of the check."""

    name: str
    state: CheckState
    detail: str = ""
    nearest: str = ""
    option: str = ""
    exit_code: int = 0

    def line(self) -> str:
        return f"{self.name:<20} {self.state}" + (f": {self.detail}" if self.detail else "")

    @property
    def text(self) -> str:
        """Return the problem and the values that would fit."""
        return self.detail + (f" Nearest that fits: {self.nearest}." if self.nearest else "")
