"""Liveness: who of an attempt does nothing any more although its process is there. Pure; looking is the driver's.

A trainer shows that it lives by what it does (its activity record, its steps), a server or the rollout role by its lease. How
long nothing may move follows from the trial's own step times. A trainer that waits for batches is not to blame: the
rollout role is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.name_resolve.base import Seen

Key = tuple[str, int]
SUSPENDED_S = 30.0  # a round of the watcher that took so long: the job was suspended, so nobody is told to have done nothing
SERVED = ("wait", "evaluate")  # what the trainer does while others work for it


@dataclass
class _Watched:
    since: float
    mark: Any = None
    doing: str = ""
    seen: bool = False  # it has shown that it lives at all


class Liveness:
    """Args:
    factor: So many times the 95th percentile of a step nothing may move,
    min_s: but at least so long,
    max_s: and at most so long; also how long a start may take.
    """

    def __init__(self, factor: float, min_s: float, max_s: float) -> None:
        self.factor, self.min_s, self.max_s = factor, min_s, max_s
        self._watched: dict[Key, _Watched] = {}
        self._last_round: float | None = None

    def round(self, now: float) -> None:
        """The watcher runs: to be called in each of its rounds."""
        if self._last_round is not None and now - self._last_round > SUSPENDED_S:
            self.skip(now)
        self._last_round = now

    def started(self, key: Key, now: float) -> None:
        """Also everybody else begins anew: they may have waited for this one."""
        for one in self._watched.values():
            one.since = now
        self._watched[key] = _Watched(now)

    def ended(self, key: Key) -> None:
        self._watched.pop(key, None)

    def observe(self, key: Key, mark: Any, now: float, doing: str = "") -> None:
        """What was seen of a unit; it moved where the mark is another than before."""
        one = self._watched.get(key)
        if one is not None and mark is not None and (not one.seen or mark != one.mark):
            self._watched[key] = _Watched(now, mark, doing, seen=True)

    def observe_leases(self, leases: Mapping[str, Seen], attempt_id: str, now: float) -> None:
        """Of those that this attempt holds, by their keys, `<role>/<index>`, each that is alive moved."""
        for name, seen in leases.items():
            if seen.alive and seen.value.get("attempt") == attempt_id:
                role, _, index = name.rpartition("/")
                self.observe((role, int(index)), now, now)

    def skip(self, now: float) -> None:
        """The watcher itself did not run (the job was suspended): nobody else did either."""
        for one in self._watched.values():
            one.since = now

    def bound_s(self, step_s: float) -> float:
        """How long nothing may move; step_s is the 95th percentile of a step, 0 while there is none."""
        return min(self.max_s, max(self.min_s, self.factor * step_s)) if step_s else self.max_s

    def hung(self, now: float, step_s: float, running: Iterable[Key]) -> list[tuple[Key, str]]:
        """Whom to blame, and why in words."""
        keys = set(running)
        found: dict[Key, str] = {}
        for key, one in self._watched.items():
            role, index = key
            bound_s = self.bound_s(step_s) if role == "trainer" else self.min_s if one.seen else self.max_s
            silent_s = now - one.since
            if key not in keys or silent_s <= bound_s:
                continue
            words = f"{role} {index} hangs: nothing moved for {silent_s:.0f} s"
            words += f" while it did '{one.doing}'" if one.doing else "" if one.seen else " after its start"
            if role == "trainer" and one.doing in SERVED and ("rollout", 0) in keys:
                key = ("rollout", 0)
                words = f"rollout 0 hangs: the trainer has waited for it for {silent_s:.0f} s ({one.doing})"
            found.setdefault(key, f"{words}; allowed are {bound_s:.0f} s")
        return list(found.items())
