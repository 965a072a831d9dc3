"""Wall time: when the scheduler will end the job, and when to stop so that the state is saved before that.

The end comes from the job's environment, else from one question to the scheduler; it is asked again rarely, and once more
before a stop, for an administrator can extend it. Everything is kept on this process's own monotonic clock.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hpc_rl.errors import SchedulerError
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.supervise.exit_policy import drain_time

logger = logging.getLogger(__name__)
ASK_EVERY_S = 600.0  # limits can be changed, and the controller is shared
ASK_AGAIN_S = 60.0  # before a stop: an answer older than this is asked for again
SITE_END = "HPC_RL_END_TIME"  # Unix seconds; what a site knows better than its scheduler, as a power cut in the evening


@dataclass
class WallTime:
    """Args:
    ask: When the scheduler will end the job, Unix seconds, or None.
    """

    ask: Callable[[], float | None]
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    ends_at: float | None = None  # Unix seconds
    drain_at: float = float("inf")  # of `clock`
    _ends: float = float("inf")  # of `clock`
    _started: float = field(init=False)
    _began: float = field(init=False)
    _asked_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._started, self._began = self.clock(), self.wall_clock()

    def look(self, step_s: float, save_s: float) -> bool:
        """Take new measurements, ask where that is due; true where the end is another than before."""
        changed = self._ask() if self.clock() - self._asked_at >= ASK_EVERY_S else False
        self._place(step_s, save_s)
        return changed

    def is_up(self, step_s: float, save_s: float) -> bool:
        """Whether it is time to stop. The scheduler is asked once more before that is said."""
        if self.clock() < self.drain_at:
            return False
        if self.clock() - self._asked_at >= ASK_AGAIN_S:
            self._ask()
            self._place(step_s, save_s)
        return self.clock() >= self.drain_at

    @property
    def left_s(self) -> float:
        """Until the scheduler ends the job."""
        return self._ends - self.clock()

    @property
    def until_drain_s(self) -> float:
        return self.drain_at - self.clock()

    def _ask(self) -> bool:
        self._asked_at = self.clock()
        given = os.environ.get(SITE_END, "")
        site = (
            float(given) if given.isdigit() and float(given) > self._began else None
        )  # a requeued job has it from its first start
        known = [end for end in (self.ask(), site) if end is not None]
        before, self.ends_at = self.ends_at, min(known, default=self.ends_at)
        self._ends = float("inf") if self.ends_at is None else self.clock() + self.ends_at - self.wall_clock()
        return self.ends_at != before

    def _place(self, step_s: float, save_s: float) -> None:
        if self.ends_at is not None:
            self.drain_at = drain_time(self._started, self._ends, step_s, save_s)


class JobEndTime:
    """When Slurm will end this job; None outside of one, or when Slurm can't say now. The first answer is the environment's."""

    def __init__(self) -> None:
        given = os.environ.get("SLURM_JOB_END_TIME", "")
        self._given = float(given) if given.isdigit() else None
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        # Slurm lists a task by these two, and of one task of every array SLURM_JOB_ID is the id of the whole array.
        self._job_id = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
        self._asked = False

    def __call__(self) -> float | None:
        first, self._asked = not self._asked, True
        if self._job_id is None or (first and self._given is not None):
            return self._given
        try:
            return SlurmScheduler().end_time(self._job_id) or self._given
        except SchedulerError as error:
            logger.warning("no end time from the scheduler: %s", error)
            return self._given
