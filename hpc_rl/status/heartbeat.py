"""Whether the supervisor of a running attempt still sends heartbeats: it renews its lease.

A reader that stays judges by its own clock whether the counter of the lease moves. A command that looks once
compares times that one file server gave: of this lease, and of the leases that other processes of the trial
renew. Where those don't tell, it watches the counter for a moment. This machine's clock only saves that
moment, where the lease looks new by it.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import HEARTBEATS_PER_TTL, LEASE_TTL_S, LeaseView, NameResolve

HEARTBEAT_S = LEASE_TTL_S / HEARTBEATS_PER_TTL
SILENT_S = 2.5 * HEARTBEAT_S
WATCH_S = 1.2 * HEARTBEAT_S  # for a lease that is renewed to move
POLL_S = 0.2
SKEW_S = 2.0  # largest difference between the clocks of the file server and this machine


@dataclass(frozen=True)
class SupervisorSilence:
    """A supervisor that does not renew its lease."""

    node: str
    silent_s: float


class Heartbeat:
    """The lease of the supervisor, as a reader of files sees it."""

    def __init__(
        self,
        names: NameResolve,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._names, self._clock, self._sleep = names, clock, sleep

    def silence(self, attempt: str, patience_s: float = 0.0) -> SupervisorSilence | None:
        """Return how long the supervisor of an attempt has been silent; None if it lives, or is not known.

        Args:
            attempt: The newest one, which has not recorded an end.
            patience_s: How long to watch a lease that looks old; a later call may tell instead.
        """
        lease = self._find_lease(attempt)
        if lease is None:
            return None
        silent_s = lease.age_s
        if silent_s < SILENT_S:
            renewed_at, others_at = self._find_times(lease)
            # one that would be silent at the end of the watch is watched now, not by a later command
            looks_new = -SKEW_S <= time.time() - renewed_at < SILENT_S - patience_s
            if others_at - renewed_at >= SILENT_S:
                silent_s = others_at - renewed_at
            elif looks_new or not self._stands_still(lease, patience_s):
                return None
            else:
                silent_s = max(time.time() - renewed_at, patience_s)
        node = lease.value.get("node") or lease.value.get("host") or "its host"
        return SupervisorSilence(str(node), silent_s)

    def _find_lease(self, attempt: str) -> LeaseView | None:
        with suppress(OSError):
            lease = self._names.list_leases(keys.OWNER).get(keys.OWNER)
            if lease is not None and lease.value.get("attempt") == attempt:
                return lease
        return None

    def _stands_still(self, lease: LeaseView, patience_s: float) -> bool:
        if patience_s <= 0:
            return False
        end = self._clock() + patience_s
        while self._clock() < end:
            self._sleep(POLL_S)
            now = self._find_lease(str(lease.value.get("attempt")))
            if now is None or (now.epoch, now.counter) != (lease.epoch, lease.counter):
                return False
        return True

    def _find_times(self, lease: LeaseView) -> tuple[float, float]:
        """Return when this lease and when any other was last renewed, by the clock of the file server."""
        own, others = float("-inf"), float("-inf")
        for path in self._names.root.rglob("*.epoch-*"):
            with suppress(OSError):
                if path == self._names.root / f"{lease.key}.epoch-{lease.epoch}":
                    own = path.stat().st_mtime
                else:
                    others = max(others, path.stat().st_mtime)
        return own, others
