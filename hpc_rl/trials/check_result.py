"""Results of the checks of a set-up: one form, which all commands show."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.core.errors import ExitCode
from hpc_rl.core.refusal import Kind, Refusal


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
    refusal: Refusal | None = None  # or note; `detail` is its text
    exit_code: int = 0

    @classmethod
    def make(cls, name: str, refusal: Refusal, origins: Mapping[str, str] | None = None) -> "CheckResult":
        """Return the row of a refusal or note, with the places of its options."""
        refusal = refusal.locate(origins or {})
        if refusal.is_note:
            return cls(name, CheckState.NOTE, str(refusal), refusal)
        code = ExitCode.CANNOT_WRITE if refusal.kind is Kind.STORAGE else ExitCode.REFUSED
        return cls(name, CheckState.REFUSED, str(refusal), refusal, code)

    @property
    def options(self) -> tuple[str, ...]:
        return self.refusal.options if self.refusal else ()

    def line(self) -> str:
        return f"{self.name:<20} {self.state}" + (f": {self.detail}" if self.detail else "")

    def to_json(self) -> dict[str, Any]:
        about = self.refusal
        return {
            "name": self.name,
            "state": self.state,
            "detail": self.detail,
            "option": about.option if about else "",
            "kind": about.kind if about else "",
            "related": about.related if about else (),
            "exit_code": self.exit_code,
        }
