"""Detect units without progress although their processes exist. Pure: the loop observes.

A trainer shows progress by its activity record, a server or the rollout role by its lease. The time limit
without progress follows from the trial's own step times. If a trainer waits for batches, the rollout role
is to blame; while a pool has no serving server (servers of layout `jobs` may be preempted), neither is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import LeaseView

Key = tuple[str, int]
# Time for the scheduler to start a process: an ended step may keep its place until it is killed (60 s).
PLACED_S = 120.0
# After a longer round of the loop the job was suspended, and no unit is to blame.
SUSPENDED_S = 30.0
WAITS_FOR_ROLLOUT = ("wait", "evaluate")  # activities of a trainer that waits for the rollout role
NEEDS_SERVERS = (*WAITS_FOR_ROLLOUT, "publish")  # activities that need a server


@dataclass
class _Watched:
    """Time of a unit's last progress, and its mark at that time."""

    since: float
    mark: Any = None
    doing: str = ""
    seen: bool = False  # whether it has sent a heartbeat
    ttl_s: float = 0.0  # of its lease, which does not move between two heartbeats


@lru_cache(maxsize=1 << 17)
def _parse_key(name: str) -> Key:
    """Return the unit of a lease `<role>/…/<index>`; each is asked for in every listing."""
    role, *_, index = name.split("/")
    return role, int(index)


class HangDetector:
    """The units of an attempt, and the time of each one's last progress.

    A trainer hangs after `factor` times the 95th percentile of a step, but at least `min_s` and at most
    `max_s`; a start may take `max_s`. For `away_s` no unit is blamed while no server of a pool serves; 0 for
    a trial without servers.
    """

    def __init__(self, factor: float, min_s: float, max_s: float, away_s: float = 0.0) -> None:
        self.factor, self.min_s, self.max_s, self.away_s = factor, min_s, max_s, away_s
        self._watched: dict[Key, _Watched] = {}
        self._away: list[str] = []  # pools without a serving server
        self._away_since: float | None = None  # since there is such a pool
        self._last_round: float | None = None
        self._rollout_exited = False  # and has not started again

    def note_round(self, now: float) -> None:
        """Note that the loop runs; called in each of its rounds."""
        if self._last_round is not None and now - self._last_round > SUSPENDED_S:
            self.skip(now)
        self._last_round = now

    def watch(self, key: Key, now: float) -> None:
        """Watch a unit from now on; restart the time limit of units that waited for it."""
        # No unit waits for a particular server, and a server may come and go for ever.
        if key == ("rollout", 0):
            self._rollout_exited = False
        if key[0] != "server":
            self._away_since = None
            self._excuse(WAITS_FOR_ROLLOUT, now)
        # an environment is a program without heartbeats
        if key[0] != "environment":
            self._watched[key] = _Watched(now)

    def forget(self, key: Key) -> None:
        self._watched.pop(key, None)
        self._rollout_exited = self._rollout_exited or key == ("rollout", 0)

    def observe(self, key: Key, mark: Any, now: float, doing: str = "", ttl_s: float = 0.0) -> None:
        """Note the state of a unit; a changed `mark` is progress."""
        one = self._watched.get(key)
        if one is not None and mark is not None and (not one.seen or mark != one.mark):
            self._watched[key] = _Watched(now, mark, doing, seen=True, ttl_s=ttl_s)

    def observe_leases(
        self, leases: Mapping[str, LeaseView], attempt_id: str, now: float
    ) -> list[tuple[Key, int]]:
        """Note the units of this attempt with a live lease; their keys are `<role>/…/<index>`.

        Return the serving servers, each with its incarnation.
        """
        serving = []
        for name, seen in leases.items():
            value = seen.value
            if not seen.alive or value.get("attempt") != attempt_id:
                continue
            key = _parse_key(name)
            self.observe(key, (seen.epoch, seen.counter), now, ttl_s=seen.ttl_s)
            # while the disk is full or external groups are missing, it can't serve a waiting unit
            if value.get(keys.WAITS_FOR_ROOM) or value.get(keys.WAITS_FOR_GROUPS):
                self._excuse(WAITS_FOR_ROLLOUT, now)
            if value.get("state") in keys.ROUTABLE:
                serving.append((key, int(value.get("incarnation", -1))))
        return serving

    def observe_pools(self, pools: Mapping[str, Mapping[str, LeaseView]], now: float) -> None:
        """Note whether each pool, by its name, has a serving server, in any job.

        A trainer waits up to `away_s` for the first server of each pool.
        """
        self._away = [
            pool
            for pool, leases in pools.items()
            if not any(seen.alive and seen.value.get("state") in keys.ROUTABLE for seen in leases.values())
        ]
        if not self._away:
            self._away_since = None
            return
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since <= self.away_s:
            self._excuse(NEEDS_SERVERS, now)

    def find_unseen(self, now: float) -> list[Key]:
        """Return the units without a heartbeat long after their start."""
        return [key for key, one in self._watched.items() if not one.seen and now - one.since > PLACED_S]

    def skip(self, now: float) -> None:
        """Restart all time limits, because the job was suspended."""
        self._away_since = None
        for one in self._watched.values():
            one.since = now

    def _excuse(self, doing: tuple[str, ...], now: float) -> None:
        for one in self._watched.values():
            if one.doing in doing:
                one.since = now

    def compute_bound_s(self, step_s: float) -> float:
        """Return how long a trainer may be silent; `step_s`: 95th percentile of a step, 0 if unknown."""
        return min(self.max_s, max(self.min_s, self.factor * step_s)) if step_s else self.max_s

    def find_hung(self, now: float, step_s: float, running: Iterable[Key]) -> list[tuple[Key, str]]:
        """Return the units to kill, each with a reason."""
        present = set(running)
        found: dict[Key, str] = {}
        for key, one in self._watched.items():
            is_trainer = key[0] == "trainer"
            silence_s = max(self.min_s, one.ttl_s) if one.seen else self.max_s
            limit_s = self.compute_bound_s(step_s) if is_trainer else silence_s
            if key not in present or now - one.since <= limit_s:
                continue
            waits_for_rollout = is_trainer and one.doing in WAITS_FOR_ROLLOUT
            if waits_for_rollout and self._rollout_exited:
                continue  # it is about to restart
            to_blame = ("rollout", 0) if waits_for_rollout and ("rollout", 0) in present else key
            found.setdefault(to_blame, self._explain(to_blame, key, one, now, limit_s))
        return list(found.items())

    def _explain(self, to_blame: Key, key: Key, one: _Watched, now: float, limit_s: float) -> str:
        silent_s = now - one.since
        if to_blame != key:
            text = f"rollout 0 hangs: the trainer has waited for it for {silent_s:.0f} s ({one.doing})"
        else:
            text = f"{key[0]} {key[1]} hangs: nothing moved for {silent_s:.0f} s"
            text += f" in '{one.doing}'" if one.doing else "" if one.seen else " after its start"
        if self._away_since is not None and one.doing in NEEDS_SERVERS:
            text += (
                f"; no server of pool {', '.join(self._away)} has served for {now - self._away_since:.0f} s"
            )
        return f"{text}; the limit is {limit_s:.0f} s"
