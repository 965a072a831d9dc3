"""The nodes of a cluster on a virtual clock: which are down, and how long a job waits for its nodes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from hpc_rl.simulate.clock import Clock
from hpc_rl.simulate.setup import Faults
from hpc_rl.supervise.job_policy import choose_excluded

MANY_NODES = 100  # to spare, if their number is not known


class Cluster:
    """A partition with the nodes of one job and spare ones."""

    def __init__(self, clock: Clock, num_needed: int, faults: Faults, drawn: random.Random) -> None:
        spare = max(num_needed, MANY_NODES) if faults.spare_nodes is None else faults.spare_nodes
        self.names = [f"n{number}" for number in range(num_needed + spare)]
        self.up_at = dict.fromkeys(self.names, 0.0)  # time from which a node works
        self.num_calls = 0  # requests to the scheduler
        self._clock, self._num_needed, self._faults, self._drawn = clock, num_needed, faults, drawn
        self._bad: dict[str, float] = {}  # excluded until then, the newest last

    def fail(self, node: str) -> None:
        self.up_at[node] = self._clock.now + self._faults.repair_s

    def avoid(self, nodes: Iterable[str], seconds: float) -> None:
        for node in nodes:
            self._bad.pop(node, None)
            self._bad[node] = self._clock.now + seconds

    def draw_wait(self, is_requeued: bool) -> float:
        """Return the seconds in the queue, without waiting for repairs."""
        mean_s = self._faults.requeue_s if is_requeued else self._faults.queue_s
        if is_requeued or not mean_s:
            return mean_s  # BeginTime is fixed
        return self._drawn.expovariate(1 / mean_s)

    def allocate(self) -> list[str] | float:
        """Return nodes for the job, or the time at which enough may be up."""
        self.num_calls += 1
        now = self._clock.now
        bad = [node for node, until in reversed(self._bad.items()) if until > now]
        excluded = set(choose_excluded(bad, self.names, (), self._num_needed))
        found = [node for node in self.names if self.up_at[node] <= now and node not in excluded]
        if len(found) >= self._num_needed:
            return found[: self._num_needed]
        # Slurm waits for any nodes that are not excluded
        times = sorted(when for node, when in self.up_at.items() if when > now and node not in excluded)
        missing = self._num_needed - len(found)
        ends = sorted(until for until in self._bad.values() if until > now)
        after = [times[missing - 1]] if missing <= len(times) else []
        return min([*after, *ends], default=math.inf)
