"""What decided which prompts of a batch log are rejected: the user's code and some options, with digests.

Prompts that user code rejected stay so as long as that is the same. The rollout role that finds it changed
issues them again when the trainer's next lineage begins, and only then writes what it is now: a start that is
killed in between is followed by one that finds the same.
"""

from pathlib import Path

from hpc_rl.core.trial import read_object, write_json
from hpc_rl.rollout.batch_log.ledger import FIRST_OUTSIDE, OF_USER_CODE
from hpc_rl.rollout.batch_log.replay import LogState

NAME = "judged_by.json"


class Judged:
    """Digests by name, `before` and `now`; {} where not known. `folder` is the `rollout/` of a trial."""

    def __init__(self, folder: Path, now: dict[str, str] | None = None) -> None:
        self._path, self.now = folder / NAME, now or {}
        self.before = {name: str(digest) for name, digest in read_object(self._path).items()}

    @property
    def changed(self) -> list[str]:
        """The names whose digests differ; code that was found on one side only does not count."""
        return sorted(
            one for one in self.before.keys() & self.now.keys() if self.before[one] != self.now[one]
        )

    def again(self, log: LogState) -> int:
        """Return how many prompts are to be issued again because what rejected them has changed."""
        return rejected_by_user_code(log) if self.changed else 0

    def write(self) -> None:
        """Let what is now be what the next start compares with. Raises OSError."""
        if self.now and self.before != self.now:
            write_json(self._path, self.now)
            self.before = self.now


def rejected_by_user_code(log: LogState, until: int | None = None) -> int:
    """Return how many prompts user code rejected that are not issued again; with `until` before that step."""
    found = [one for one in log.rejected.values() if one.reason in OF_USER_CODE and one.index < FIRST_OUTSIDE]
    return sum(until is None or one.version < until for one in found)
