"""The environments of a trial, and each one's view of the queue. No I/O; the caller gives the time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_rl.rollout.batch_fill import can_add_up

SMALLEST_WEIGHT = 0.01


@dataclass
class RegisteredEnvironment:
    """An environment, as it registered.

    `env_id` counts over all starts of the rollout role, so an environment that outlives a start keeps its id.
    `seen_s` is the time of its latest poll.
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
    has_left: bool = False  # it disconnected, and a poll does not reconnect it
    rejected: int = 0  # groups
    last_reason: str = ""  # its newest groups
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
        """Tokens that it samples at a time, relative to other environments."""
        return max(1, self.max_token_length) * max(0.0, self.weight)


@dataclass(frozen=True)
class QueueView:
    """The answer to an environment's poll; the sizes count groups of the environment's size."""

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
        silent_s: Seconds without a poll after which an environment loses its share of each batch.
        environments: By env_id, including earlier starts.
    """

    batch_size: int
    num_steps: int
    silent_s: float = 60.0
    environments: dict[int, RegisteredEnvironment] = field(default_factory=dict)

    def register(
        self, environment: RegisteredEnvironment, own_group_size: int = 0, now_s: float = 0.0
    ) -> RegisteredEnvironment:
        """Add an environment with a new id and a unique name.

        Args:
            environment: The new environment.
            own_group_size: Sequences of each of the trial's own groups; 0 if the trial has no prompts.
            now_s: The time.

        Raises:
            ValueError: A number is negative; or its groups and the groups of other live environments never
                add up to a batch, or not with the shares of each batch that environments have.
        """
        # checked only here: an environment that an earlier version accepted still exists after a restart
        for name in ("weight", "max_token_length"):
            if (value := getattr(environment, name)) < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        environment.env_id = max(self.environments, default=-1) + 1
        alive = [*self.list_alive(now_s), environment]
        sizes = sorted({own_group_size, *(other.group_size for other in alive)} - {0})
        rest = self.batch_size - environment.group_size
        if rest < 0 or not can_add_up(sizes, rest):
            raise ValueError(
                f"group_size is {environment.group_size}, but a batch has {self.batch_size} sequences, which "
                f"groups of {' and '.join(map(str, sizes))} never add up to; a group is never split: choose "
                f"a group_size that divides {self.batch_size}, or another batch size"
            )
        shares = self._compute_shares(alive)
        if never := self._find_unbatchable_sizes(alive, shares, own_group_size):
            kept = sum(shares.values())
            raise ValueError(
                f"group_size {environment.group_size} does not fit: min_batch_allocation of environments "
                f"reserves {kept} of the {self.batch_size} sequences of a batch, and no groups of "
                f"{' and '.join(map(str, sizes))} fill the other {self.batch_size - kept} exactly if one of "
                f"them has {never[0]}; choose a group_size that divides {self.batch_size - kept}, or another "
                "min_batch_allocation"
            )
        of_this_name = [
            other for other in self.environments.values() if other.desired_name == environment.desired_name
        ]
        environment.name = f"{environment.desired_name}_{len(of_this_name)}"
        environment.seen_s = now_s
        self.environments[environment.env_id] = environment
        return environment

    def _find_unbatchable_sizes(
        self, alive: Sequence[RegisteredEnvironment], shares: Mapping[int, int], own_group_size: int
    ) -> list[int]:
        """Return the group sizes that fit into no batch along with the shares of environments."""
        left = self.batch_size - sum(shares.values())
        sizes = {own_group_size, *(environment.group_size for environment in alive)} - {0}
        # each batch has groups of a share; the others fill it up
        outside = {
            own_group_size,
            *(environment.group_size for environment in alive if not shares.get(environment.env_id)),
        } - {0}
        if not can_add_up(sizes, left):
            return sorted(sizes)
        return sorted(size for size in outside if left < size or not can_add_up(sizes, left - size))

    def disconnect(self, env_id: int) -> bool:
        """Forget an environment's claims; return whether it was known and connected."""
        environment = self.environments.get(env_id)
        if environment is None or environment.has_left:
            return False
        environment.connected, environment.has_left = False, True
        return True

    def note_seen(self, env_id: int, now_s: float) -> None:
        """Note that an environment lives; a poll reconnects one of an earlier start, unless it left."""
        environment = self.environments.get(env_id)
        if environment is not None and not environment.has_left:
            environment.seen_s, environment.connected = now_s, True

    def list_alive(self, now_s: float) -> list[RegisteredEnvironment]:
        return [
            environment
            for environment in self.environments.values()
            if environment.connected and now_s - environment.seen_s <= self.silent_s
        ]

    def allocate(self, now_s: float) -> dict[int, int]:
        """Return the reserved sequences of each batch by environment, in whole groups.

        Shares that add up to more than 1 are scaled down.
        """
        return self._compute_shares(self.list_alive(now_s))

    def _compute_shares(self, alive: Sequence[RegisteredEnvironment]) -> dict[int, int]:
        scale = 1 / max(1.0, sum(environment.min_batch_allocation or 0.0 for environment in alive))
        shares = {}
        for environment in alive:
            if environment.min_batch_allocation:
                size = int(environment.min_batch_allocation * scale * self.batch_size + 1e-9)
                shares[environment.env_id] = size - size % environment.group_size
        return shares

    def make_view(
        self, env_id: int, waiting: Mapping[int, int], now_s: float, steps: tuple[int, int]
    ) -> QueueView:
        """Return an environment's view of the queue. An unknown environment sees a full queue.

        Sequences reserved for others do not count against it. An environment of atroposlib ends once the
        finished steps and the batches in the queue exceed the trainer's steps. But groups may still be
        rejected as too old, so the queue gets that long only once the last batch has been cut.

        Args:
            env_id: Of the environment.
            waiting: Sequences in the queue, by environment.
            now_s: The time.
            steps: Finished steps of the trainer, and the newest batch that has been cut.
        """
        own = self.environments.get(env_id)
        if own is None:
            return QueueView(self.batch_size * 1000, 0, 0.0, SMALLEST_WEIGHT, 1)
        alive = self.list_alive(now_s)
        allocations = self.allocate(now_s)
        others = sum(
            max(0, size - allocations.get(other, 0)) for other, size in waiting.items() if other != env_id
        )
        loads = sum(environment.load for environment in alive)
        free = 1.0 - sum(allocations.values()) / self.batch_size
        step, newest = steps
        enough = -(-(self.num_steps - step + 1) * self.batch_size // own.group_size)
        queue_size = (waiting.get(env_id, 0) + others) // own.group_size
        return QueueView(
            queue_size=max(queue_size, enough) if newest >= self.num_steps else min(queue_size, enough - 1),
            self_queue_size=waiting.get(env_id, 0) // own.group_size,
            unallocated_fraction=max(0.0, free),
            env_weight=max(SMALLEST_WEIGHT, own.load / loads if loads > 0 else 0.0),
            max_group_size=max((environment.group_size for environment in alive), default=1),
        )
