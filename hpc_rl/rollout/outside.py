"""Groups from outside: an environment's groups go into the same ledger and batches as the trial's own.

They have a separate index space, in the order of acknowledgement. A group is durable before it is
acknowledged. A sender that lost the acknowledgement sends the group again, with the same key or, if it uses
no keys, with the same content. Equal content counts as the same group only if an acknowledgement may have
been lost, because a model may repeat itself.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import Any

import xxhash

from hpc_rl.core.types import TrajectoryGroup, decode, encode
from hpc_rl.rollout.batch_log.ledger import FIRST_OUTSIDE, GroupRecord, OutsideRecord
from hpc_rl.rollout.batch_log.replay import LogState
from hpc_rl.rollout.service import RolloutService

UNSURE_S = 60.0  # after this time a client without an answer has sent its group again
UNSURE_GROUPS = 256  # groups of an earlier incarnation whose acknowledgement may be lost
ALLOCATION_WAIT_S = 120.0  # longest time that a batch waits for an environment's share
COUNT_AGAIN_S = 0.05


class OutsideGroups:
    """The groups from outside of a rollout service.

    Args:
        service: Gives the ledger and the sequencer; its rules have `batch_sequences`.
    """

    def __init__(self, service: RolloutService) -> None:
        assert service.sequencer.rules.batch_sequences is not None
        self.batch_size = service.sequencer.rules.batch_sequences
        self._service = service
        self._next_index = max(FIRST_OUTSIDE, service.sequencer.log.next_outside)
        self._appended = self._committed = 0
        self._committing = asyncio.Lock()
        self._waiting: tuple[float, Counter[int]] = (-1.0, Counter())
        latest = list(service.sequencer.log.outside.values())[-UNSURE_GROUPS:]
        self._unsure = Counter(record.key for record in latest if record.key_of_content)
        self._unsure_until_s = time.monotonic() + UNSURE_S
        self._starved: tuple[int, float] = (0, 0.0)  # step, start of the wait
        self.claims: Callable[[], dict[int, int]] = dict  # the shares of environments, in sequences
        service.allocations = self._find_allocations
        service.claims = lambda: self.claims()

    def register_describer(self, describe: Callable[[], list[dict[str, Any]]]) -> None:
        """Use this function for the environments in `hpc-rl status`."""
        self._service.environments = describe

    @property
    def environments(self) -> list[dict[str, Any]]:
        """All environments that ever registered, in their last stored state."""
        return list(self._log.environments.values())

    @property
    def has_trainer(self) -> bool:
        return self._service.sequencer.version is not None

    @property
    def own_group_size(self) -> int:
        """Sequences of each group of the trial's own prompts; 0 if it has no prompts."""
        rules = self._service.sequencer.rules
        return rules.n_samples if rules.own_prompts else 0

    @property
    def step(self) -> int:
        """Batches that the trainer has finished."""
        return self._service.sequencer.version or 0

    @property
    def too_old(self) -> Counter[int]:
        """Groups that waited too long, by environment."""
        return self._log.too_old

    @property
    def taken(self) -> Counter[int]:
        """Acknowledged whole groups, by environment."""
        return self._log.taken

    @property
    def newest_batch(self) -> int:
        return self._log.top

    @property
    def moment(self) -> tuple[int, int]:
        """Lineage and step of the trainer."""
        return self._log.lineage, self.step

    @property
    def _log(self) -> LogState:
        return self._service.sequencer.log

    def count_waiting(self) -> Counter[int]:
        """Return the sequences that the trainer has not finished with, by environment; our own under -1."""
        now_s = time.monotonic()
        if now_s - self._waiting[0] > COUNT_AGAIN_S:
            waiting = (*self._log.ready.values(), *self._log.parts.values())
            records = [*(record for record, _ in waiting), *self._list_sealed_records()]
            sizes: Counter[int] = Counter()
            for record in records:
                sizes[getattr(record, "env_id", -1)] += record.num_trajectories
            self._waiting = (now_s, sizes)
        return self._waiting[1]

    def _list_sealed_records(self) -> list[OutsideRecord]:
        """Return the groups from outside in the batch in training."""
        seal = self._log.seals.get(self.step + 1)
        return [self._log.outside[i] for i in seal.places if i in self._log.outside] if seal else []

    def keep_environment(self, facts: dict[str, Any]) -> None:
        """Store the facts about an environment, replacing earlier ones; durable after the next commit."""
        self._service.ledger.append_environment(facts)
        self._log.environments[facts["env_id"]] = facts
        self._appended += 1

    def admit(
        self, group: TrajectoryGroup, env_id: int, key: str, *, of_content: bool, is_part: bool = False
    ) -> bool:
        """Append a group, or a part of one; return whether it is new. Durable after the next commit."""
        hashed = _hash_key(key)
        if self._is_repeated(hashed, of_content):
            return False
        self._append(group, env_id, hashed, of_content=of_content, is_part=is_part)
        return True

    def list_parts(self, env_id: int) -> list[tuple[int, int]]:
        """Return index and size of the waiting parts, oldest first."""
        waiting = sorted(self._log.parts.items())
        own = ((index, record) for index, (record, _) in waiting if self._log.outside[index].env_id == env_id)
        return [(index, record.num_trajectories) for index, record in own]

    async def join(self, parts: list[int], env_id: int) -> None:
        """Make one group from these parts, in their order."""
        await self.commit()  # the parts are read from the file
        places = [self._log.parts[index][1] for index in parts]
        encoded = [self._service.ledger.fetch_group(place) for place in places]
        trajectories = [trajectory for part in encoded for trajectory in decode(part).trajectories]
        key = _hash_key("join " + " ".join(map(str, parts)))
        self._append(TrajectoryGroup(-1, trajectories), env_id, key, joins=tuple(parts))

    async def commit(self) -> None:
        """Make all appended groups durable; one write serves all waiting callers. Raises Refused."""
        appended = self._appended
        async with self._committing:
            if self._committed < appended:
                upto = self._appended
                await self._service.commit()
                self._committed = upto

    def mark_unsure(self, keys: Iterable[str]) -> None:
        """Note that the sender of groups with these keys may have missed the acknowledgement."""
        self._unsure.update(map(_hash_key, keys))
        self._unsure_until_s = time.monotonic() + UNSURE_S

    def _append(
        self,
        group: TrajectoryGroup,
        env_id: int,
        key: bytes,
        *,
        of_content: bool = False,
        is_part: bool = False,
        joins: tuple[int, ...] = (),
    ) -> None:
        group.index, self._next_index = self._next_index, self._next_index + 1
        basis = GroupRecord.from_group(group, self.step)
        more = (env_id, key, of_content, is_part, joins)
        record = OutsideRecord(*astuple(basis), *more)  # type: ignore[call-arg]
        place = self._service.ledger.append_outside(record, encode(group))
        if not joins:  # parts are already counted
            self.count_waiting()[env_id] += record.num_trajectories
        self._log.add_group(record, place)
        self._appended += 1

    def _is_repeated(self, key: bytes, of_content: bool) -> bool:
        if not of_content:
            return key in self._log.keys
        if not self._unsure[key] or time.monotonic() > self._unsure_until_s:
            return False
        self._unsure[key] -= 1
        return True

    def _find_allocations(self) -> dict[int, int]:
        """Return the shares of the next batch; empty once it has waited for them too long."""
        step, now_s = self._log.top + 1, time.monotonic()
        if self._starved[0] != step:
            self._starved = (step, now_s)
        return {} if now_s - self._starved[1] > ALLOCATION_WAIT_S else self.claims()


def _hash_key(key: str) -> bytes:
    return xxhash.xxh3_128_digest(key.encode())
