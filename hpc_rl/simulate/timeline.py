"""What every simulated second of every device was used for, with the categories of `hpc-rl report`."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.simulate.clock import Clock
from hpc_rl.simulate.fleet import Fleet
from hpc_rl.simulate.setup import Setup
from hpc_rl.status.goodput import OF_SERVERS, AttemptUse, Bucket, Goodput


@dataclass
class Stretch:
    """A stretch of a trainer's time; `step` is the step that it works on, None outside of steps."""

    seconds: float
    bucket: Bucket
    step: int | None


class Timeline:
    """The trainer's activities, attempt by attempt; the servers' follow from them, less their idle time."""

    def __init__(self, setup: Setup, clock: Clock) -> None:
        self._clock, self._setup = clock, setup
        self.queued_s = 0.0
        self.uses: list[AttemptUse] = []
        self._stretches: list[list[Stretch]] = []  # by attempt
        self._busy_s: list[float] = []
        self._now: tuple[float, Bucket, int | None] | None = None
        self._busy_before_s = 0.0

    def begin_attempt(self) -> None:
        now = self._clock.now
        self.uses.append(AttemptUse(f"job.{len(self.uses)}", now, now, 0))
        self._stretches.append([])
        self._now = (now, Bucket.START, None)

    def does(self, bucket: Bucket, step: int | None) -> None:
        """Note the trainer's activity from now on."""
        if self._now is not None:
            since, before, of_step = self._now
            if self._clock.now > since:
                self._stretches[-1].append(Stretch(self._clock.now - since, before, of_step))
            self._now = (self._clock.now, bucket, step)

    def end_attempt(self, fleet: Fleet) -> None:
        self.does(Bucket.STOP, None)
        self._now = None
        self.uses[-1].end = self._clock.now
        fleet.advance()
        self._busy_s.append(fleet.busy_s - self._busy_before_s)
        self._busy_before_s = fleet.busy_s

    def lose_after(self, step: int) -> None:
        """Note that a start continues after `step`: what was done for later steps is lost."""
        for stretches in self._stretches:
            for one in stretches:
                if one.step is not None and one.step > step:
                    one.bucket, one.step = Bucket.LOST, None

    def close(self, fleet: Fleet) -> None:
        """End the attempt that runs, if any, at the end of the simulation."""
        if self._now is not None:
            self.end_attempt(fleet)

    def compute_goodput(self) -> Goodput:
        """Return the use of all devices, as `hpc-rl report` counts it."""
        setup = self._setup
        trainers, servers = setup.count_devices("trainer"), setup.count_devices("server")
        shared = setup.shares_gpus
        for use, stretches, busy_s in zip(self.uses, self._stretches, self._busy_s, strict=True):
            own: dict[Bucket, float] = {}
            for one in stretches:
                _add(use.buckets, one.bucket, one.seconds * trainers)
                _add(own, OF_SERVERS.get(one.bucket, one.bucket), one.seconds * servers)
            use.num_devices = trainers
            if not shared:
                use.num_devices += servers
                others = own.get(Bucket.EVALUATE, 0.0) + own.get(Bucket.PUBLISH, 0.0)
                idle = max(0.0, own.get(Bucket.GENERATE, 0.0) - max(0.0, busy_s * servers - others))
                _add(own, Bucket.GENERATE, -idle)
                _add(own, Bucket.WAIT, idle)
                for bucket, seconds in own.items():
                    _add(use.buckets, bucket, seconds)
            elif waited := use.buckets.pop(Bucket.WAIT, 0.0):  # while the servers have the GPUs
                busy = min(waited, busy_s * trainers)
                use.buckets[Bucket.GENERATE] = busy
                use.buckets[Bucket.WAIT] = waited - busy
            if setup.num_unused:
                use.num_devices += setup.num_unused
                use.buckets[Bucket.UNUSED] = (use.end - use.start) * setup.num_unused
        return Goodput(self.uses, bool(setup.n_gpus_per_node), self.queued_s)


def _add(buckets: dict[Bucket, float], bucket: Bucket, seconds: float) -> None:
    buckets[bucket] = buckets.get(bucket, 0.0) + seconds
