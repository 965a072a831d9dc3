"""Liveness: who of an attempt does nothing any more although its process is there. Pure; looking is the driver's.

A trainer shows that it lives by what it does (its activity record, its steps), a server or the rollout role by its lease. How
long nothing may move follows from the trial's own step times. A trainer that waits for batches is not to blame: the
rollout role is. While no server serves (those of layout `jobs` may be preempted for an hour) neither is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.base import Seen

Key = tuple[str, int]
PLACED_S = 120.0  # for the scheduler to start a process: a step that ended may keep its place until it can be killed (60 s)
SUSPENDED_S = 30.0  # a round of the watcher that took so long: the job was suspended, so nobody is told to have done nothing
SERVED = ("wait", "evaluate")  # what the trainer does while the rollout role works for it
NEEDS_SERVERS = (*SERVED, "publish")  # and what it does that takes a server


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
    away_s: So long nobody is blamed for waiting while no server serves; 0 for a trial without servers.
    """

    def __init__(self, factor: float, min_s: float, max_s: float, away_s: float = 0.0) -> None:
        self.factor, self.min_s, self.max_s, self.away_s = factor, min_s, max_s, away_s
        self._watched: dict[Key, _Watched] = {}
        self._away_since: float | None = None  # since when no server serves
        self._last_round: float | None = None
        self._rollout_ended = False  # and has not started again

    def round(self, now: float) -> None:
        """The watcher runs: to be called in each of its rounds."""
        if self._last_round is not None and now - self._last_round > SUSPENDED_S:
            self.skip(now)
        self._last_round = now

    def started(self, key: Key, now: float) -> None:
        """Whoever waited for it begins anew. Nobody waits for one server among others, and one may come and go for ever."""
        if key == ("rollout", 0):
            self._rollout_ended = False
        if key[0] != "server":
            self._away_since = None
            self._excuse(SERVED, now)
        self._watched[key] = _Watched(now)

    def ended(self, key: Key) -> None:
        self._watched.pop(key, None)
        self._rollout_ended = self._rollout_ended or key == ("rollout", 0)

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
                if seen.value.get(
                    keys.WAITS_FOR_ROOM
                ):  # on a full disk, as it says itself: whoever waits for it is not served
                    self._excuse(SERVED, now)

    def observe_servers(self, leases: Mapping[str, Seen], now: float) -> None:
        """Of all servers, whichever job they run in: a trainer that needs one waits for the first, up to `away_s`."""
        if any(seen.alive and seen.value.get("state") in keys.ROUTABLE for seen in leases.values()):
            self._away_since = None
            return
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since <= self.away_s:
            self._excuse(NEEDS_SERVERS, now)

    def unseen(self, now: float) -> list[Key]:
        """Who was started long ago and has not shown yet that it runs: the scheduler may have given it no place."""
        return [key for key, one in self._watched.items() if not one.seen and now - one.since > PLACED_S]

    def skip(self, now: float) -> None:
        """The watcher itself did not run (the job was suspended): nobody else did either."""
        self._away_since = None
        for one in self._watched.values():
            one.since = now

    def _excuse(self, doing: tuple[str, ...], now: float) -> None:
        for one in self._watched.values():
            if one.doing in doing:
                one.since = now

    def bound_s(self, step_s: float) -> float:
        """How long nothing may move; step_s is the 95th percentile of a step, 0 while there is none."""
        return min(self.max_s, max(self.min_s, self.factor * step_s)) if step_s else self.max_s

    def hung(self, now: float, step_s: float, running: Iterable[Key]) -> list[tuple[Key, str]]:
        """Whom to blame, and why in words."""
        there = set(running)
        found: dict[Key, str] = {}
        for key, one in self._watched.items():
            role, index = key
            bound_s = self.bound_s(step_s) if role == "trainer" else self.min_s if one.seen else self.max_s
            silent_s = now - one.since
            if key not in there or silent_s <= bound_s:
                continue
            words = f"{role} {index} hangs: nothing moved for {silent_s:.0f} s"
            words += f" while it did '{one.doing}'" if one.doing else "" if one.seen else " after its start"
            if role == "trainer" and one.doing in SERVED and self._rollout_ended:
                continue  # it is about to start again
            if role == "trainer" and one.doing in SERVED and ("rollout", 0) in there:
                key = ("rollout", 0)
                words = f"rollout 0 hangs: the trainer has waited for it for {silent_s:.0f} s ({one.doing})"
            if self._away_since is not None and one.doing in NEEDS_SERVERS:
                words += f"; no server has served for {now - self._away_since:.0f} s"
            found.setdefault(key, f"{words}; allowed are {bound_s:.0f} s")
        return list(found.items())


def serving(leases: Mapping[str, Seen], attempt_id: str) -> list[tuple[Key, int]]:
    """The servers of an attempt that serve, each with its incarnation."""
    return [
        (("server", int(name.rpartition("/")[2])), int(seen.value.get("incarnation", -1)))
        for name, seen in leases.items()
        if seen.alive and seen.value.get("attempt") == attempt_id and seen.value.get("state") in keys.ROUTABLE
    ]
