"""Which environments feed a trial, and what each learns of the queue; no I/O, no clock of its own.

Sizes are sequences unless a name says groups. An environment's queue holds what it has sent and the trainer
has not finished with: ready groups, and those of the batch that is being trained on.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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

    def register(self, environment: RegisteredEnvironment, own_group_size: int = 0) -> RegisteredEnvironment:
        """Add an environment; it gets an id and a name that no other has.

        Args:
            environment: What registers.
            own_group_size: Sequences of each of the trial's own groups, 0 where it has none.

        Raises:
            ValueError: Its groups and those of the connected others never add up to a batch.
        """
        connected = {one.group_size for one in self.environments.values() if one.connected}
        sizes = sorted({environment.group_size, own_group_size, *connected} - {0})
        rest = self.batch_size - environment.group_size
        if rest < 0 or not adds_up(sizes, rest):
            raise ValueError(
                f"group_size is {environment.group_size}, but a batch has {self.batch_size} sequences, which "
                f"groups of {' and '.join(map(str, sizes))} never add up to; a group is never split: choose "
                f"a group_size that divides {self.batch_size}, or another batch size"
            )
        of_this_name = [
            one for one in self.environments.values() if one.desired_name == environment.desired_name
        ]
        environment.env_id = max(self.environments, default=-1) + 1
        environment.name = f"{environment.desired_name}_{len(of_this_name)}"
        self.environments[environment.env_id] = environment
        return environment

    def disconnect(self, env_id: int) -> bool:
        """Forget an environment's claims; return whether it was connected."""
        found = self.environments.get(env_id)
        if found is None or not found.connected:
            return False
        found.connected = False
        return True

    def heard_of(self, env_id: int, now_s: float) -> None:
        """Note that an environment lives; a poll connects one of an earlier start again."""
        if env_id in self.environments:
            self.environments[env_id].seen_s = now_s
            self.environments[env_id].connected = True

    def alive(self, now_s: float) -> list[RegisteredEnvironment]:
        return [
            one for one in self.environments.values() if one.connected and now_s - one.seen_s <= self.silent_s
        ]

    def allocations(self, now_s: float) -> dict[int, int]:
        """Return the sequences of each batch that are for one environment, in whole groups.

        Shares that add up to more than 1 are scaled down.
        """
        claims = {one.env_id: one.min_batch_allocation or 0.0 for one in self.alive(now_s)}
        scale = 1 / max(1.0, sum(claims.values()))
        sizes = {
            env_id: int(share * scale * self.batch_size + 1e-9)
            for env_id, share in claims.items()
            if share > 0
        }
        return {env_id: size - size % self.environments[env_id].group_size for env_id, size in sizes.items()}

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


def adds_up(sizes: Iterable[int], total: int) -> bool:
    """Return whether sizes, each taken any number of times, add up to `total`."""
    reached = [True] + [False] * total
    for size in sizes:
        for at in range(size, total + 1):
            reached[at] |= reached[at - size]
    return reached[total]
