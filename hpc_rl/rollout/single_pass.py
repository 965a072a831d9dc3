"""One pass over the prompts of data sets, without a trainer: each prompt gets one result.

The ledger has the results: a group, or the reason of a rejection. So a new incarnation issues only the
prompts without a result.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.core.types import ONLY_VERSION, TrajectoryGroup, decode
from hpc_rl.datasets.encode import Prompt, Prompts
from hpc_rl.datasets.rows import combine_fingerprints
from hpc_rl.rollout.batch_log.ledger import GroupRecord, Ledger, RecordPlace, RejectReason, RejectRecord
from hpc_rl.rollout.batch_log.replay import check_data, load_state
from hpc_rl.rollout.executor import Executor, make_run_frame
from hpc_rl.rollout.pipes import Outcome
from hpc_rl.rollout.user_errors import Faults

logger = logging.getLogger(__name__)

COMMIT_S = 1.0  # longest time of finished work that a kill can lose
MIN_IN_A_ROW = 64  # rejections that end the pass


class SinglePass:
    """The prompts of `parts`, which count from 0 in file order, and their results.

    `limit` prompts run at once; a failed one is repeated up to `retries` times, then rejected. `sets` names
    the held-out set of each part, "" for valid_dataset; it is empty for training data.
    """

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Prompts],
        limit: int,
        retries: int,
        executor: Executor,
        sets: Sequence[str] = (),
    ) -> None:
        self._parts, self._limit, self._retries, self._executor = parts, limit, retries, executor
        self._sets = sets
        executor.on_outcome, executor.on_lost = self._take_outcome, self._lose
        executor.on_note = lambda note: None  # an evaluation makes no notes
        state = load_state(folder)
        rows = combine_fingerprints([one.rows.fingerprint for one in parts])
        check_data(folder, state, parts[0].path, rows)
        self.groups: dict[int, RecordPlace] = {index: place for index, (_, place) in state.ready.items()}
        self.rejected: dict[int, str] = {one.index: one.reason for one in state.rejected.values()}
        self.ledger = Ledger(folder)
        self.faults = Faults(max(MIN_IN_A_ROW, limit), len(self))
        self._in_a_row = 0
        # answer to the ticket of a prompt; None if its worker died
        self._outcomes: dict[int, asyncio.Future[Outcome | None]] = {}
        form = "%d of %d prompts have a result, %d of them a rejection"
        logger.info(form, self.num_done, len(self), len(self.rejected))

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def num_done(self) -> int:
        return len(self.groups) + len(self.rejected)

    @property
    def rejections(self) -> Counter[str]:
        """The number of rejections by reason."""
        return Counter(self.rejected.values())

    def describe_progress(self) -> dict[str, Any]:
        """Return the report for `hpc-rl status`."""
        return {
            "progress": self.num_done,
            "total": len(self),
            "running": len(self._outcomes),
            "accepted": len(self.groups),
            "rejected": dict(self.rejections),
            "rejected_in_a_row": self._in_a_row,
            "last_reason": self.faults.last_reason,
            "last_error": self.faults.last_error,
            "endpoints": self._executor.endpoints,
            "blocked": self._executor.blocked,
        }

    async def run(self) -> None:
        """Finish all prompts; afterwards each result is on disk. Raises RoleFailed, OSError."""
        waiting = iter([index for index in range(len(self)) if not self._is_done(index)])
        committing = asyncio.ensure_future(self._commit_in_groups())
        answering = asyncio.gather(*(self._answer(waiting) for _ in range(self._limit)))
        try:
            either: set[asyncio.Future[Any]] = {committing, answering}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if committing.done():
                committing.result()
            await answering
        finally:
            committing.cancel()
            answering.cancel()
        await asyncio.to_thread(self.ledger.commit)
        if not self.groups:
            raise self.faults.make_unscored_error(len(self.rejected))

    def find_prompt(self, index: int) -> Prompt:
        """Return the prompt with this index. Raises ConfigError for a row that can't be encoded."""
        number, position = self._locate(index)
        return self._parts[number].in_file_order(position)

    def find_set(self, index: int) -> str:
        """Return the name of a prompt's held-out set; "" for valid_dataset, and for training data."""
        number, _ = self._locate(index)
        return self._sets[number] if self._sets else ""

    def list_groups(self) -> Iterator[tuple[int, TrajectoryGroup]]:
        """Yield the index of each prompt with a group, ascending, and its group."""
        for index, place in sorted(self.groups.items()):
            yield index, decode(self.ledger.fetch_group(place))

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of a prompt's part, and the prompt's position in it."""
        for number, part in enumerate(self._parts):
            if index < len(part):
                return number, index
            index -= len(part)
        raise IndexError(index)

    async def close(self) -> None:
        """Make all finished work durable."""
        await asyncio.to_thread(self.ledger.close)

    def _is_done(self, index: int) -> bool:
        return index in self.groups or index in self.rejected

    async def _commit_in_groups(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_S)
            if self.ledger.uncommitted:
                await asyncio.to_thread(self.ledger.commit)

    async def _answer(self, waiting: Iterator[int]) -> None:
        """Finish prompts, one after the other, until none waits. Raises RoleFailed."""
        for index in waiting:
            failures, outcome = 0, await self._ask(index)
            while outcome is None or (outcome["op"] == "failed" and failures < self._retries):
                failures += outcome is not None
                outcome = await self._ask(index)
            self._record(index, outcome)

    async def _ask(self, index: int) -> Outcome | None:
        """Return the outcome of a prompt; None if its worker died."""
        outcome = self._outcomes[index] = asyncio.get_running_loop().create_future()
        # The seed follows from the position in a held-out set, as in an evaluation of a trial.
        position = self._locate(index)[1] if self._sets else index
        prompt, name = self.find_prompt(index), self.find_set(index)
        self._executor.run(
            make_run_frame(index, position, prompt, ONLY_VERSION, evaluate=True, held_out_set=name)
        )
        try:
            return await outcome
        finally:
            del self._outcomes[index]

    def _record(self, index: int, outcome: Outcome) -> None:
        """Append the result of a prompt to the ledger. Raises RoleFailed after too many rejections."""
        if outcome["op"] == "scored":
            rewards = outcome["rewards"]
            record = GroupRecord(index, 0, 0, 0, len(rewards), outcome["num_tokens"], sum(rewards))
            self.groups[index] = self.ledger.append_group(record, outcome["group"])
            self._in_a_row = 0
            return
        assert outcome["op"] != "group", "an evaluation has scores"
        reason = RejectReason.EXCEPTION if outcome["op"] == "failed" else outcome["reason"]
        self.ledger.append_reject(RejectRecord(index, 0, reason))
        self.rejected[index] = reason
        self._in_a_row += 1
        if ends := self.faults.count_rejection(reason, self._in_a_row, self.rejections):
            raise ends

    def _take_outcome(self, frame: Outcome) -> None:
        self.faults.note(frame)
        self._resolve(frame["ticket"], frame)

    def _lose(self, tickets: list[int]) -> None:
        for ticket in tickets:
            self._resolve(ticket, None)

    def _resolve(self, ticket: int, outcome: Outcome | None) -> None:
        future = self._outcomes.get(ticket)
        if future is not None and not future.done():
            future.set_result(outcome)
