"""Wall time: the end of the job, and the time to stop so that the state is saved before the end.

The end comes from the job's environment, else from one query. It is queried again rarely, and once more
before a stop, because an administrator can extend it. All times use this process's monotonic clock, so no
margin is needed for Slurm's `--signal`, which may be a minute early.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hpc_rl.core.errors import WARNING_S, SchedulerError, StopCause
from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Attempt
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.stats.tracker import compute_p95

logger = logging.getLogger(__name__)
QUERY_EVERY_S = 600.0  # limits can change, and the controller is shared
FRESH_S = 60.0  # before a stop, an older answer is refreshed
MARGIN_S = 30.0
# Unix seconds; an end that the scheduler does not know, for example a power cut.
SITE_END = "HPC_RL_END_TIME"
MAX_TIMES = 200  # of each kind: older values are dropped


class StepTimes:
    """Durations of an attempt's steps and saves, read from the trainer's growing metrics."""

    def __init__(self, attempt: Attempt) -> None:
        self._folder = attempt.dir
        self._files: dict[Path, JsonLines] = {}
        self._values = {name: deque[float](maxlen=MAX_TIMES) for name in ("step_s", "save_s")}

    def poll(self) -> None:
        for path in self._folder.glob("metrics.*.jsonl"):
            file = self._files.setdefault(path, JsonLines(path))
            for row in file.poll():
                for name, values in self._values.items():
                    value = row.get(name)
                    if isinstance(value, int | float) and value > 0:
                        values.append(float(value))
            file.rows.clear()

    @property
    def step_s(self) -> float:
        """95th percentile of a step, everything included; 0 before the first."""
        return compute_p95(self._values["step_s"])

    @property
    def save_s(self) -> float:
        """95th percentile of a save; 0 before the first."""
        return compute_p95(self._values["save_s"])


class JobDeadline:
    """The end of a job, and its trainer's deadline."""

    def __init__(
        self,
        query: Callable[[], float | None],  # returns the end of the job, Unix seconds, or None
        times: StepTimes,
        margin_s: float = MARGIN_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.times = times
        self.ends_at: float | None = None  # Unix seconds
        self._query, self._margin_s = query, margin_s
        self._clock, self._wall_clock = clock, wall_clock
        self._drain_at = self._end = float("inf")  # of the monotonic clock
        self._started, self._started_at = clock(), wall_clock()
        self._queried = float("-inf")

    def update(self) -> bool:
        """Read new step times, and query the end if due; return whether the end has changed."""
        self.times.poll()
        changed = self._query_end() if self._clock() - self._queried >= QUERY_EVERY_S else False
        self._place()
        return changed

    def is_reached(self) -> bool:
        """Return whether it is time to stop, after one more query."""
        if self._clock() < self._drain_at:
            return False
        if self._clock() - self._queried >= FRESH_S:
            self._query_end()
            self._place()
        return self._clock() >= self._drain_at

    @property
    def left_s(self) -> float:
        """Seconds until the scheduler ends the job."""
        return self._end - self._clock()

    @property
    def until_drain_s(self) -> float:
        return self._drain_at - self._clock()

    @property
    def lead_s(self) -> float:
        """Seconds before the end of the job at which the trainer is asked to finish its step and save."""
        return self.times.step_s + 1.5 * self.times.save_s + self._margin_s

    def is_early_warning(self, cause: StopCause) -> bool:
        """Return whether a request is Slurm's `--signal`, minutes before this clock stops."""
        return cause is StopCause.USER_SIGNAL and self.left_s < WARNING_S and self.until_drain_s > 0

    def compute_grace_s(self, least_s: float) -> float:
        """Return how long the trainer may take to stop now: two of its steps and saves."""
        grace_s = max(least_s, 2 * (self.times.step_s + self.times.save_s))
        return max(1.0, min(grace_s, self.left_s)) if self.left_s > 0 else grace_s

    def _query_end(self) -> bool:
        self._queried = self._clock()
        given = os.environ.get(SITE_END, "")
        # A requeued job inherits it from its first start: it may be over already.
        site = float(given) if given.isdigit() and float(given) > self._started_at else None
        known = [end for end in (self._query(), site) if end is not None]
        before, self.ends_at = self.ends_at, min(known, default=self.ends_at)
        if self.ends_at is not None:
            self._end = self._clock() + self.ends_at - self._wall_clock()
        return self.ends_at != before

    def _place(self) -> None:
        # Never in the first half of the job's time: a short limit must not make it start and stop for ever.
        if self.ends_at is not None:
            self._drain_at = max(self._end - self.lead_s, (self._started + self._end) / 2)


class JobEndTime:
    """The end of this Slurm job; None outside a job, or if Slurm does not answer."""

    def __init__(self) -> None:
        given = os.environ.get("SLURM_JOB_END_TIME", "")
        self._given = float(given) if given.isdigit() else None
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        # Slurm lists a task by these two; in one task of an array, SLURM_JOB_ID is the id of the whole array.
        self._job_id = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
        self._was_called = False

    def __call__(self) -> float | None:
        """Return the end in Unix seconds; the first answer comes from the environment."""
        is_first, self._was_called = not self._was_called, True
        if self._job_id is None or (is_first and self._given is not None):
            return self._given
        try:
            return SlurmScheduler().end_time(self._job_id) or self._given
        except SchedulerError as error:
            form = "Slurm did not report when job %s ends; the last known end time (if any) stays in use: %s"
            logger.warning(form, self._job_id, error)
            return self._given
