"""The rollout API of Atropos on the rollout service: environments register, poll, and push scored groups.

A well-formed group is always answered with 200: environments drop a group after any 4xx, and end after a few
refused connections. If a group can't be trained on, the answer gives the reason, and the group is counted. A
group is durable before it is acknowledged. A group sent again, because its acknowledgement was lost, is taken
once.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from hpc_rl.atropos.intake import (
    UNSUPPORTED,
    GroupRejected,
    Lookup,
    MalformedRequest,
    SequenceLimits,
    check_shape,
    list_unused_fields,
    make_group,
)
from hpc_rl.atropos.registry import RegisteredEnvironment, Registry
from hpc_rl.rollout.batch_fill import choose_sizes
from hpc_rl.rollout.outside import OutsideGroups

logger = logging.getLogger(__name__)

HOLD_POLL_S = 0.1
HOLD_S = 20.0  # longest time that an acknowledgement waits for room in the queue
HARD_BOUND = 16  # times max_queued_batches: groups beyond this are refused
UNREGISTERED = -1
MAX_TOLD = 32  # unused fields listed for an environment
LARGE_TOKENS = 50_000  # groups of this size or more are parsed in a thread


@dataclass(frozen=True)
class TrialFacts:
    """Facts about the trial that environments get when they register.

    Args:
        limits: Limits of a sequence.
        wandb_group: Group of runs at Weights & Biases.
        wandb_project: Project there; environments wait while it is None.
        checkpoint_dir: Directory for files of environments.
        checkpoint_interval: Steps between two of these files.
        num_steps: Training steps of the trial.
        temperature: Sampling temperature; 0 is greedy.
    """

    limits: SequenceLimits
    wandb_group: str
    wandb_project: str | None
    checkpoint_dir: str
    checkpoint_interval: int
    num_steps: int
    temperature: float = 1.0


class QueueFull(Exception):
    """The queue stayed full while the acknowledgement waited; the caller should retry."""


class AtroposApi:
    """The operations behind the routes.

    Args:
        outside: The groups from outside in the rollout service.
        lookup: Finds the gateway's records of tokens.
        trial: Facts for environments.
        max_queued_batches: Batches of one environment that may wait before its acknowledgements are delayed.
    """

    def __init__(
        self, outside: OutsideGroups, lookup: Lookup, trial: TrialFacts, max_queued_batches: int = 3
    ) -> None:
        self.outside = outside
        self.registry = Registry(outside.batch_size, trial.num_steps)
        self.repeated: Counter[int] = Counter()  # repeated groups by env_id
        self._told_of_others: list[str] = []  # unused fields of senders that have not registered
        self.latest: dict[str, Any] = {}
        self._lookup = lookup
        self._trial = trial
        self._max_queued = max_queued_batches * outside.batch_size
        for facts in outside.environments:
            known = RegisteredEnvironment(**facts)
            known.connected = False  # waits for its next poll
            self.registry.environments[known.env_id] = known
        outside.claims = lambda: self.registry.allocate(time.monotonic())
        outside.register_describer(self.describe)

    # the trainer's side; the trial has its own trainer, and no other can replace it

    def register_trainer(self, batch_size: int) -> dict[str, Any]:
        """Answer a trainer that registers; nothing changes. Raises ValueError for another batch size."""
        if batch_size != self.outside.batch_size:
            raise ValueError(
                f"batch_size is {batch_size}, but this trial trains on {self.outside.batch_size} sequences "
                "a step: set train_dataset.batch_size or gconfig.n_samples of the trial"
            )
        return {"uuid": secrets.randbits(128)}

    def answer_batch_request(self) -> dict[str, Any]:
        """Answer a trainer of Atropos on `GET /batch`: the batches are for the trial's own trainer."""
        if self.outside.has_trainer:
            return {"batch": None}
        return {"status": "error", "message": "the trainer has not started", "batch": []}

    def get_trainer_info(self) -> dict[str, Any]:
        return {"batch_size": self.outside.batch_size, "max_token_len": self._trial.limits.max_tokens}

    def get_sampling(self) -> dict[str, float]:
        """Return the sampling settings of the trial's own prompts; an extension of the protocol."""
        return {"temperature": self._trial.temperature}

    def get_wandb_info(self) -> dict[str, Any]:
        project = self._trial.wandb_project
        return {"group": self._trial.wandb_group if project else None, "project": project}

    # the environments' side

    async def register(self, asked: RegisteredEnvironment) -> dict[str, Any]:
        """Register an environment. Raises ValueError for sizes that no batch can hold."""
        if not self.outside.has_trainer:
            return {"status": "wait for trainer to start"}
        environment = self.registry.register(asked, self.outside.own_group_size, time.monotonic())
        await self._keep(environment)
        logger.info(
            "environment %d has registered as %s and sends groups of %d sequences",
            environment.env_id,
            environment.name,
            environment.group_size,
        )
        return {
            "status": "success",
            "env_id": environment.env_id,
            "wandb_name": environment.name,
            "checkpoint_dir": self._trial.checkpoint_dir,
            "starting_step": self.outside.step,
            "checkpoint_interval": self._trial.checkpoint_interval,
            "num_steps": self._trial.num_steps,
        }

    async def _keep(self, environment: RegisteredEnvironment) -> None:
        self.outside.keep_environment({**asdict(environment), "seen_s": 0.0})
        await self.outside.commit()

    async def disconnect(self, env_id: int) -> dict[str, Any]:
        if self.registry.disconnect(env_id):
            await self._keep(self.registry.environments[env_id])
            logger.info("environment %d has disconnected", env_id)
            return {"status": "success"}
        return {"status": "failure", "error": f"no connected environment has env_id {env_id}"}

    def get_queue_view(self, env_id: int) -> dict[str, Any]:
        """Return the answer to an environment's poll."""
        now_s = time.monotonic()
        self.registry.note_seen(env_id, now_s)
        steps = (self.outside.step, self.outside.newest_batch)
        view = self.registry.make_view(env_id, self.outside.count_waiting(), now_s, steps)
        return {"current_step": self.outside.step, **asdict(view)}

    def describe(self) -> list[dict[str, Any]]:
        """Return the environments for `hpc-rl status`: the connected ones, and the latest of each name."""
        now_s, waiting = time.monotonic(), self.outside.count_waiting()
        newest = {
            environment.desired_name: environment.env_id
            for environment in self.registry.environments.values()
        }
        return [
            {
                "name": environment.name,
                "group_size": environment.group_size,
                "queued": waiting.get(environment.env_id, 0) // environment.group_size,
                "accepted": self.outside.taken[environment.env_id],
                "rejected": environment.rejected,
                "too_old": self.outside.too_old[environment.env_id],
                "last_reason": environment.last_reason,
                "ignored": environment.ignored,
                "silent_s": round(now_s - environment.seen_s) if environment.connected else None,
            }
            for environment in self.registry.environments.values()
            if environment.connected or newest[environment.desired_name] == environment.env_id
        ]

    async def take(
        self, bodies: list[Any], key: str, content: bytes, connected: Callable[[], bool] = lambda: True
    ) -> list[dict[str, Any]]:
        """Take scored groups; return an answer for each once all of them are durable.

        Args:
            bodies: The groups.
            key: Idempotency key from the client; empty if it sent none.
            content: Body of the request; a repeated request has the same content.
            connected: Returns whether the client still waits for the answer.

        Raises:
            MalformedRequest, QueueFull, Refused: Nothing was taken.
        """
        checked = [_check_bodies(body, is_only_one=len(bodies) == 1) for body in bodies]
        for env_id in {body.get("env_id", UNREGISTERED) for body in checked if isinstance(body, dict)}:
            await self._wait_for_room(env_id)
        of_content = not key
        key = key or xxhash.xxh3_128_hexdigest(content)
        keys = [f"{key}/{number}" for number in range(len(checked))]
        answers = [
            await self._take_one(body, key, of_content) for body, key in zip(checked, keys, strict=True)
        ]
        await self.outside.commit()
        if of_content and not connected():
            self.outside.mark_unsure(keys)
        return answers

    async def _take_one(
        self, body: dict[str, Any] | MalformedRequest, key: str, of_content: bool
    ) -> dict[str, Any]:
        if isinstance(body, MalformedRequest):
            return self._reject(UNREGISTERED, body)
        env_id = body.get("env_id", UNREGISTERED)
        known = self.registry.environments.get(env_id)
        size = len(body["tokens"])
        try:
            if known is None and env_id != UNREGISTERED:
                raise GroupRejected(f"env_id {env_id} is not registered in this trial")
            if known is not None and size > known.group_size:
                raise GroupRejected(
                    f"the group has {size} sequences, and its environment registered group_size "
                    f"{known.group_size}"
                )
            if size > self.outside.batch_size:
                raise GroupRejected(
                    f"the group has {size} sequences, more than a batch ({self.outside.batch_size})"
                )
            trial = self._trial
            given = (body, self._lookup, self.outside.moment, trial.limits, trial.temperature)
            is_large = sum(map(len, body["tokens"])) > LARGE_TOKENS
            # environments poll meanwhile
            group = await asyncio.to_thread(make_group, *given) if is_large else make_group(*given)
        except GroupRejected as error:
            return self._reject(UNREGISTERED if known is None else env_id, error)
        self.latest = body
        ignored = self._note_unused(known, body)
        is_part = known is not None and size < known.group_size
        is_new = self.outside.admit(group, env_id, key, of_content=of_content, is_part=is_part)
        if not is_part:
            self.repeated[env_id] += not is_new
            return {"status": "received", **ignored}
        assert known is not None
        size = await self._join_parts(env_id, known.group_size)
        return {"status": "buffered", "buffer_size": size, **ignored}

    def _note_unused(self, known: RegisteredEnvironment | None, body: dict[str, Any]) -> dict[str, list[str]]:
        """Log once the fields that the trial does not use; return the note about them for the answer."""
        unused = list_unused_fields(body)
        told = self._told_of_others if known is None else known.ignored
        if new := [name for name in unused if name not in told][: MAX_TOLD - len(told)]:
            who = "a sender that has not registered" if known is None else f"environment {known.name}"
            logger.warning(
                "%s sends fields that this trial ignores (logged only once): %s", who, ", ".join(new)
            )
            told += new
            if known is not None:
                self.outside.keep_environment({**asdict(known), "seen_s": 0.0})
        # the answer is silent about keys outside of the protocol, like atroposlib's
        named = [name for name in unused if name in UNSUPPORTED]
        return {"ignored": named} if named else {}

    def _reject(self, env_id: int, error: Exception) -> dict[str, Any]:
        if known := self.registry.environments.get(env_id):
            known.rejected, known.last_reason = known.rejected + 1, str(error)
            self.outside.keep_environment({**asdict(known), "seen_s": 0.0})
        logger.warning("a group from environment %d is rejected and not trained on: %s", env_id, error)
        return {"status": "rejected", "reason": str(error)}

    async def _join_parts(self, env_id: int, size: int) -> int:
        """Join parts that add up to a whole group. Return the sequences that still wait."""
        parts = self.outside.list_parts(env_id)
        chosen = choose_sizes([num for _, num in parts], size)
        if chosen:
            await self.outside.join([parts[i][0] for i in chosen], env_id)
        return sum(num for _, num in self.outside.list_parts(env_id))

    async def _wait_for_room(self, env_id: int) -> None:
        """Wait while an environment has its maximum of batches in the queue. Raises QueueFull."""
        until_s = time.monotonic() + HOLD_S
        while (waiting := self.outside.count_waiting().get(env_id, 0)) >= self._max_queued:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                if waiting >= HARD_BOUND * self._max_queued:
                    raise QueueFull
                return
            await asyncio.sleep(min(HOLD_POLL_S, left_s))


def _check_bodies(body: Any, *, is_only_one: bool) -> dict[str, Any] | MalformedRequest:
    """Return a group without its absent fields; if one of several is malformed, the others still count."""
    try:
        return check_shape(body)
    except MalformedRequest as error:
        if is_only_one:
            raise
        return error
