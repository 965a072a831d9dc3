"""The server jobs of layout `jobs` on a virtual clock: each waits, serves, ends, and comes back by itself.

A server job outlives the starts of the trainer's job. Failures of nodes, preemption and time limits end it;
Slurm then starts it again. Its nodes count against the spare nodes of the partition by themselves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from hpc_rl.simulate.clock import Clock, Steps
from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.setup import Faults, Setup


class ServerJobs:
    """The array of the server jobs; `on_change` is called when servers have come or gone."""

    def __init__(
        self,
        clock: Clock,
        setup: Setup,
        costs: Costs,
        faults: Faults,
        drawn: random.Random,
        on_change: Callable[[], None],
    ) -> None:
        self.num_serving = 0
        self.num_failures = 0  # of nodes
        self.num_preempted = 0
        self._clock, self._setup, self._costs, self._faults = clock, setup, costs, faults
        self._drawn, self._on_change = drawn, on_change
        self._repaired_at: list[float] = []  # of the nodes that are down
        for nodes in setup.list_server_tasks():
            on_them = [unit for unit in setup.units if unit.role == "server" and unit.nodes[0] in nodes]
            clock.begin(self._live(len(on_them), len(nodes)))

    def _live(self, num_servers: int, num_nodes: int) -> Steps:
        wait_s = self._faults.queue_s and self._drawn.expovariate(1 / self._faults.queue_s)
        while True:
            yield wait_s
            while spare_s := self._find_spare_in_s():
                yield spare_s
            left_s = self._setup.server_time_limit_s or math.inf
            start_s = self._costs.start_job_s + self._costs.start_server_s
            yield min(start_s, left_s)
            mtbf_s = self._faults.mtbf_s / num_nodes
            ends_in = {
                "limit": max(0.0, left_s - start_s),
                "failure": math.inf if math.isinf(mtbf_s) else self._drawn.expovariate(1 / mtbf_s),
                "preemption": self._draw_preemption(),
            }
            why = min(ends_in, key=lambda name: ends_in[name])
            self._change(num_servers)
            if math.isinf(ends_in[why]):
                return
            yield ends_in[why]
            self._change(-num_servers)
            wait_s = self._faults.requeue_s
            self.num_preempted += why == "preemption"
            if why == "failure":
                self.num_failures += 1
                self._repaired_at.append(self._clock.now + self._faults.repair_s)
                wait_s += self._faults.notice_s

    def _draw_preemption(self) -> float:
        mean_s = self._faults.preempt_every_s
        return math.inf if math.isinf(mean_s) else self._drawn.expovariate(1 / mean_s)

    def _find_spare_in_s(self) -> float:
        """Return the seconds until the partition has a node for one more job, 0 if it has one."""
        self._repaired_at = sorted(when for when in self._repaired_at if when > self._clock.now)
        spare = self._faults.spare_nodes
        if spare is None or len(self._repaired_at) <= spare:
            return 0.0
        return self._repaired_at[0] - self._clock.now

    def _change(self, num_servers: int) -> None:
        self.num_serving += num_servers
        self._on_change()
