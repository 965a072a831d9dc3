"""Which environments feed a trial, and what each learns of the queue; no I/O, no clock of its own.

Sizes are sequences unless a name says groups. An environment's queue holds what it has sent and the trainer
has not finished with: ready groups, and those of the batch that is being trained on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_rl.rollout.batch_fill import adds_up

SMALLEST_WEIGHT = 0.01


@dataclass
class RegisteredEnvironment:
    """An environment, as it registered.

    `env_id` counts over all starts of the rollout role, so that an environment that outlives one of them
    keeps its own. `seen_s` is the time of its latest poll.
    """

    env_id: int
    desired_name: str
    group_size: int
    weight: float = 1.0
    max_token_length: int = 0
    min_batch_allocation: float | None = None
    name: str = ""
    connected: bool = True
    seen_s: float = 0.0
    has_left: bool = False  # it disconnected, and a poll does not connect it again
    rejected: int = 0  # groups
    last_reason: str = ""  # of the newest of them
    ignored: list[str] = field(default_factory=list)  # fields of its groups that the trial does not use

    def __post_init__(self) -> None:
        if self.min_batch_allocation is not None and not 0 <= self.min_batch_allocation <= 1:
            raise ValueError(f"min_batch_allocation must be from 0 to 1, got {self.min_batch_allocation}")
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        if not math.isfinite(self.weight):
            raise ValueError(f"weight must be finite, got {self.weight}")

    @property
    def load(self) -> float:
        """Tokens that it samples at a time, relative to others."""
        return max(1, self.max_token_length) * max(0.0, self.weight)


@dataclass(frozen=True)
class QueueView:
    """The answer to an environment's poll; the sizes count groups of its own size."""

    queue_size: int
    self_queue_size: int
    unallocated_fraction: float
    env_weight: float
    max_group_size: int


@dataclass
class Registry:
    """All environments of a trial.

    Args:
        batch_size: Sequences of a batch.
        num_steps: Steps of the trainer.
        silent_s: Time without a poll after which an environment has no claim to a share of each batch.
        environments: By env_id; those of earlier starts included.
    """

    batch_size: int
    num_steps: int
    silent_s: float = 60.0
    environments: dict[int, RegisteredEnvironment] = field(default_factory=dict)

    def register(
        self, environment: RegisteredEnvironment, own_group_size: int = 0, now_s: float = 0.0
    ) -> RegisteredEnvironment:
        """Add an environment; it gets an id and a name that no other has.

        Args:
            environment: What registers.
            own_group_size: Sequences of each of the trial's own groups, 0 where it has none.
            now_s: The time.

        Raises:
            ValueError: A number is negative; or its groups and those of the others that live never add up to
                a batch, or not with the shares of each batch that are kept for environments.
        """
        # only here: one that an earlier version let in is still there after a restart
        for name in ("weight", "max_token_length"):
            if (value := getattr(environment, name)) < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        environment.env_id = max(self.environments, default=-1) + 1
        alive = [*self.alive(now_s), environment]
        sizes = sorted({own_group_size, *(one.group_size for one in alive)} - {0})
        rest = self.batch_size - environment.group_size
        if rest < 0 or not adds_up(sizes, rest):
            raise ValueError(
                f"group_size is {environment.group_size}, but a batch has {self.batch_size} sequences, which "
                f"groups of {' and '.join(map(str, sizes))} never add up to; a group is never split: choose "
                f"a group_size that divides {self.batch_size}, or another batch size"
            )
        shares = self._shares(alive)
        if never := self._never_batched(alive, shares, own_group_size):
            kept = sum(shares.values())
            raise ValueError(
                f"group_size is {environment.group_size}: min_batch_allocation of environments keeps {kept} "
                f"of the {self.batch_size} sequences of a batch, and groups of "
                f"{' and '.join(map(str, sizes))} never fill the other {self.batch_size - kept} with a group "
                f"of {never[0]} among them; choose a group_size that divides {self.batch_size - kept}, or "
                "another min_batch_allocation"
            )
        of_this_name = [
            one for one in self.environments.values() if one.desired_name == environment.desired_name
        ]
        environment.name = f"{environment.desired_name}_{len(of_this_name)}"
        environment.seen_s = now_s
        self.environments[environment.env_id] = environment
        return environment

    def _never_batched(
        self, alive: Sequence[RegisteredEnvironment], shares: Mapping[int, int], own_group_size: int
    ) -> list[int]:
        """Return the sizes of groups that no batch can have beside the shares of environments."""
        left = self.batch_size - sum(shares.values())
        sizes = {own_group_size, *(one.group_size for one in alive)} - {0}
        # groups of a share are in each batch that the others fill up
        outside = {own_group_size, *(one.group_size for one in alive if not shares.get(one.env_id))} - {0}
        if not adds_up(sizes, left):
            return sorted(sizes)
        return sorted(size for size in outside if left < size or not adds_up(sizes, left - size))

    def disconnect(self, env_id: int) -> bool:
        """Forget an environment's claims; return whether it was known and had not left."""
        found = self.environments.get(env_id)
        if found is None or found.has_left:
            return False
        found.connected, found.has_left = False, True
        return True

    def heard_of(self, env_id: int, now_s: float) -> None:
        """Note that an environment lives; a poll connects one of an earlier start again, unless it left."""
        found = self.environments.get(env_id)
        if found is not None and not found.has_left:
            found.seen_s, found.connected = now_s, True

    def alive(self, now_s: float) -> list[RegisteredEnvironment]:
        return [
            one for one in self.environments.values() if one.connected and now_s - one.seen_s <= self.silent_s
        ]

    def allocations(self, now_s: float) -> dict[int, int]:
        """Return the sequences of each batch that are for one environment, in whole groups.

        Shares that add up to more than 1 are scaled down.
        """
        return self._shares(self.alive(now_s))

    def _shares(self, alive: Sequence[RegisteredEnvironment]) -> dict[int, int]:
        scale = 1 / max(1.0, sum(one.min_batch_allocation or 0.0 for one in alive))
        shares = {}
        for one in alive:
            if one.min_batch_allocation:
                size = int(one.min_batch_allocation * scale * self.batch_size + 1e-9)
                shares[one.env_id] = size - size % one.group_size
        return shares

    def view(
        self, env_id: int, waiting: Mapping[int, int], now_s: float, steps: tuple[int, int]
    ) -> QueueView:
        """Return what an environment is to know. An unknown one sees a queue that is full.

        What is set aside for others does not count against it. An environment of atroposlib ends once the
        steps that are done and the batches in the queue are more than the trainer's steps. Groups may still
        be rejected as too old: so the queue is that long only once the last batch has been cut.

        Args:
            env_id: Of the environment.
            waiting: Sequences in the queue, by environment.
            now_s: The time.
            steps: That the trainer has done, and the newest batch that has been cut.
        """
        own = self.environments.get(env_id)
        if own is None:
            return QueueView(self.batch_size * 1000, 0, 0.0, SMALLEST_WEIGHT, 1)
        alive = self.alive(now_s)
        allocations = self.allocations(now_s)
        others = sum(
            max(0, size - allocations.get(other, 0)) for other, size in waiting.items() if other != env_id
        )
        loads = sum(one.load for one in alive)
        free = 1.0 - sum(allocations.values()) / self.batch_size
        step, newest = steps
        enough = -(-(self.num_steps - step + 1) * self.batch_size // own.group_size)
        queue_size = (waiting.get(env_id, 0) + others) // own.group_size
        return QueueView(
            queue_size=max(queue_size, enough) if newest >= self.num_steps else min(queue_size, enough - 1),
            self_queue_size=waiting.get(env_id, 0) // own.group_size,
            unallocated_fraction=max(0.0, free),
            env_weight=max(SMALLEST_WEIGHT, own.load / loads if loads > 0 else 0.0),
            max_group_size=max((one.group_size for one in alive), default=1),
        )
