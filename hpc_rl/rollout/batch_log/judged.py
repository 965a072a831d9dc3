"""Digests of everything that decides which prompts are rejected: the user's code and some options.

Prompts that user code rejected stay rejected while these digests stay the same. If they have changed, the
rollout role issues the prompts again when the trainer's next lineage begins, and only then writes the new
digests. So if a start is killed in between, the next start finds the same change.
"""

from pathlib import Path

from hpc_rl.core.trial import load_object, write_json
from hpc_rl.rollout.batch_log.ledger import FIRST_OUTSIDE, OF_USER_CODE
from hpc_rl.rollout.batch_log.replay import LogState

NAME = "judged_by.json"


class Judged:
    """Digests by name, `before` and `now`; {} if unknown. `folder` is the `rollout/` of a trial."""

    def __init__(self, folder: Path, now: dict[str, str] | None = None) -> None:
        self._path, self.now = folder / NAME, now or {}
        self.before = {name: str(digest) for name, digest in load_object(self._path).items()}

    @property
    def changed(self) -> list[str]:
        """Names with different digests; code found on one side only does not count."""
        return sorted(
            name for name in self.before.keys() & self.now.keys() if self.before[name] != self.now[name]
        )

    def count_again(self, log: LogState) -> int:
        """Return how many prompts to issue again because the code that rejected them has changed."""
        return count_rejected_by_user_code(log) if self.changed else 0

    def write(self) -> None:
        """Store the current digests for the next start to compare with. Raises OSError."""
        if self.now and self.before != self.now:
            write_json(self._path, self.now)
            self.before = self.now


def count_rejected_by_user_code(log: LogState, until: int | None = None) -> int:
    """Return how many prompts stay rejected by user code; with `until`, only rejections before that step."""
    records = [
        record
        for record in log.rejected.values()
        if record.reason in OF_USER_CODE and record.index < FIRST_OUTSIDE
    ]
    return sum(until is None or record.version < until for record in records)
