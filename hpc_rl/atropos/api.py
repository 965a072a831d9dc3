"""The rollout API of Atropos on the rollout service: environments register, poll, and push scored groups.

A group that is well formed is always answered with 200: environments give a group up after any 4xx, and end
after a few refused connections. What can't be trained on is answered with its reason and counted. A group is
durable before it is acknowledged; one that comes again, because its acknowledgement was lost, is taken once.
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
    to_group,
    unused_fields,
)
from hpc_rl.atropos.registry import RegisteredEnvironment, Registry
from hpc_rl.rollout.batch_fill import fill
from hpc_rl.rollout.outside import OutsideGroups

logger = logging.getLogger(__name__)

HOLD_POLL_S = 0.1
HOLD_S = 20.0  # an acknowledgement waits so long for room in the queue
HARD_BOUND = 16  # times max_queued_batches: beyond it nothing is taken
UNREGISTERED = -1
MAX_TOLD = 32  # unused fields of an environment that are told
LARGE_TOKENS = 50_000  # of a group, from which on it is looked at in a thread


@dataclass(frozen=True)
class TrialFacts:
    """What environments learn of the trial when they register.

    Args:
        limits: What a sequence may have.
        wandb_group: Group of runs at Weights & Biases.
        wandb_project: Project there; None means that environments wait for it.
        checkpoint_dir: Directory for files of environments.
        checkpoint_interval: Steps between two of them.
        num_steps: Training steps of the trial.
        temperature: At which it samples; 0 is greedy.
    """

    limits: SequenceLimits
    wandb_group: str
    wandb_project: str | None
    checkpoint_dir: str
    checkpoint_interval: int
    num_steps: int
    temperature: float = 1.0


class QueueFull(Exception):
    """No room came free while the acknowledgement was held; the caller is to try again."""


class AtroposApi:
    """What the routes do.

    Args:
        outside: The groups from outside in the rollout service.
        lookup: What the gateway knows of tokens.
        trial: What environments learn of it.
        max_queued_batches: Batches of one environment that may wait before its acknowledgements are held.
    """

    def __init__(
        self, outside: OutsideGroups, lookup: Lookup, trial: TrialFacts, max_queued_batches: int = 3
    ) -> None:
        self.outside = outside
        self.registry = Registry(outside.batch_size, trial.num_steps)
        self.repeated: Counter[int] = Counter()  # groups that came again, by env_id
        self._told_of_others: list[str] = []  # unused fields of senders that have not registered
        self.latest: dict[str, Any] = {}
        self._lookup = lookup
        self._trial = trial
        self._max_queued = max_queued_batches * outside.batch_size
        for facts in outside.environments:
            known = RegisteredEnvironment(**facts)
            known.connected = False  # until it polls again
            self.registry.environments[known.env_id] = known
        outside.claims = lambda: self.registry.allocations(time.monotonic())
        outside.describe_by(self.describe)

    # the trainer's side; the trial has a trainer of its own, which no other replaces

    def register_trainer(self, batch_size: int) -> dict[str, Any]:
        """Answer a trainer that registers; nothing changes. Raises ValueError for another batch size."""
        if batch_size != self.outside.batch_size:
            raise ValueError(
                f"batch_size is {batch_size}, but this trial trains on {self.outside.batch_size} sequences "
                "a step: set train_dataset.batch_size or gconfig.n_samples of the trial"
            )
        return {"uuid": secrets.randbits(128)}

    def batch_without_step(self) -> dict[str, Any]:
        """Answer `GET /batch` of a trainer of Atropos: the batches are for the trial's own trainer."""
        if self.outside.has_trainer:
            return {"batch": None}
        return {"status": "error", "message": "the trainer has not started", "batch": []}

    def trainer_info(self) -> dict[str, Any]:
        return {"batch_size": self.outside.batch_size, "max_token_len": self._trial.limits.max_tokens}

    def sampling(self) -> dict[str, float]:
        """Return what the trial's own prompts are sampled with; the protocol of Atropos does not have it."""
        return {"temperature": self._trial.temperature}

    def wandb_info(self) -> dict[str, Any]:
        project = self._trial.wandb_project
        return {"group": self._trial.wandb_group if project else None, "project": project}

    # the environments' side

    async def register(self, asked: RegisteredEnvironment) -> dict[str, Any]:
        """Register an environment. Raises ValueError for sizes that no batch can hold."""
        if not self.outside.has_trainer:
            return {"status": "wait for trainer to start"}
        made = self.registry.register(asked, self.outside.own_group_size, time.monotonic())
        await self._keep(made)
        logger.info("environment %d registered as %s: groups of %d", made.env_id, made.name, made.group_size)
        return {
            "status": "success",
            "env_id": made.env_id,
            "wandb_name": made.name,
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

    def status_of(self, env_id: int) -> dict[str, Any]:
        """Return what an environment's poll asks for."""
        now_s = time.monotonic()
        self.registry.heard_of(env_id, now_s)
        steps = (self.outside.step, self.outside.newest_batch)
        view = self.registry.view(env_id, self.outside.waiting(), now_s, steps)
        return {"current_step": self.outside.step, **asdict(view)}

    def describe(self) -> list[dict[str, Any]]:
        """Return what `hpc-rl status` shows of environments: those connected, and the latest of each name."""
        now_s, waiting = time.monotonic(), self.outside.waiting()
        newest = {one.desired_name: one.env_id for one in self.registry.environments.values()}
        return [
            {
                "name": one.name,
                "group_size": one.group_size,
                "queued": waiting.get(one.env_id, 0) // one.group_size,
                "accepted": self.outside.taken[one.env_id],
                "rejected": one.rejected,
                "too_old": self.outside.too_old[one.env_id],
                "last_reason": one.last_reason,
                "ignored": one.ignored,
                "silent_s": round(now_s - one.seen_s) if one.connected else None,
            }
            for one in self.registry.environments.values()
            if one.connected or newest[one.desired_name] == one.env_id
        ]

    async def take(
        self, bodies: list[Any], key: str, content: bytes, connected: Callable[[], bool] = lambda: True
    ) -> list[dict[str, Any]]:
        """Take scored groups; return an answer for each once all of them are durable.

        Args:
            bodies: The groups.
            key: Given by a client that may send them again; empty where it gave none.
            content: The request's, which is the same when such a client sends it again.
            connected: Whether the client is still there to read the answer.

        Raises:
            MalformedRequest, QueueFull, Refused: Nothing was taken.
        """
        checked = [_checked(body, is_only_one=len(bodies) == 1) for body in bodies]
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
            self.outside.unsure_of(keys)
        return answers

    async def _take_one(
        self, body: dict[str, Any] | MalformedRequest, key: str, of_content: bool
    ) -> dict[str, Any]:
        if isinstance(body, MalformedRequest):
            return self._rejected(UNREGISTERED, body)
        env_id = body.get("env_id", UNREGISTERED)
        known = self.registry.environments.get(env_id)
        size = len(body["tokens"])
        try:
            if known is None and env_id != UNREGISTERED:
                raise GroupRejected(f"env_id {env_id} is not registered here")
            if known is not None and size > known.group_size:
                raise GroupRejected(f"it has {size} sequences; its environment registered {known.group_size}")
            if size > self.outside.batch_size:
                raise GroupRejected(f"it has {size} sequences; a batch has {self.outside.batch_size}")
            trial = self._trial
            given = (body, self._lookup, self.outside.moment, trial.limits, trial.temperature)
            is_large = sum(map(len, body["tokens"])) > LARGE_TOKENS
            # environments poll meanwhile
            group = await asyncio.to_thread(to_group, *given) if is_large else to_group(*given)
        except GroupRejected as error:
            return self._rejected(UNREGISTERED if known is None else env_id, error)
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
        """Log once what the trial does not use; return what the answer says of it."""
        unused = unused_fields(body)
        told = self._told_of_others if known is None else known.ignored
        if new := [name for name in unused if name not in told][: MAX_TOLD - len(told)]:
            who = "a sender that has not registered" if known is None else f"environment {known.name}"
            logger.warning(
                "%s sends fields that this trial does not use (said once): %s", who, ", ".join(new)
            )
            told += new
            if known is not None:
                self.outside.keep_environment({**asdict(known), "seen_s": 0.0})
        # of a key outside of the protocol the answer says nothing, as atroposlib's
        named = [name for name in unused if name in UNSUPPORTED]
        return {"ignored": named} if named else {}

    def _rejected(self, env_id: int, error: Exception) -> dict[str, Any]:
        if known := self.registry.environments.get(env_id):
            known.rejected, known.last_reason = known.rejected + 1, str(error)
            self.outside.keep_environment({**asdict(known), "seen_s": 0.0})
        logger.warning("a group of environment %d is rejected: %s", env_id, error)
        return {"status": "rejected", "reason": str(error)}

    async def _join_parts(self, env_id: int, size: int) -> int:
        """Join parts that add up to a whole group. Returns the sequences that still wait."""
        parts = self.outside.parts(env_id)
        chosen = fill([num for _, num in parts], size)
        if chosen:
            await self.outside.join([parts[i][0] for i in chosen], env_id)
        return sum(num for _, num in self.outside.parts(env_id))

    async def _wait_for_room(self, env_id: int) -> None:
        """Hold while an environment has its bound of batches in the queue. Raises QueueFull."""
        until_s = time.monotonic() + HOLD_S
        while (waiting := self.outside.waiting().get(env_id, 0)) >= self._max_queued:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                if waiting >= HARD_BOUND * self._max_queued:
                    raise QueueFull
                return
            await asyncio.sleep(min(HOLD_POLL_S, left_s))


def _checked(body: Any, *, is_only_one: bool) -> dict[str, Any] | MalformedRequest:
    """Return a group without its absent fields; one of several that is malformed does not cost the others."""
    try:
        return check_shape(body)
    except MalformedRequest as error:
        if is_only_one:
            raise
        return error
