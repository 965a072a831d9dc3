"""Driver: the sequencer's shell. Carries results into the ledger, issues to the executor, seals to disk; answers the service.

One event loop; only fsync and seals leave it for a thread. Whatever it answers is durable before it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

from hpc_rl.datasets.encode import Prompts
from hpc_rl.errors import DataUnusable, HpcRlError, RoleFailed, Stale
from hpc_rl.rollout.batch_log.ledger import GroupRecord, Ledger, RejectReason, RejectRecord, segments
from hpc_rl.rollout.batch_log.replay import check_data, read_state
from hpc_rl.rollout.batch_log.seals import Batches, Seal
from hpc_rl.rollout.evaluation import Evaluation
from hpc_rl.rollout.last_call import LastCall
from hpc_rl.rollout.sequencer import Sequencer
from hpc_rl.types import EvalResult, WeightVersion

logger = logging.getLogger(__name__)

MEASURED = ("oldest_step", "oldest_lineage", "num_trajectories", "num_tokens", "reward_sum")
COMMIT_S = 1.0  # at most so much finished work is lost by a kill
BODIES_KEPT = 2
EVALUATIONS_KEPT = 4
MIN_HOPELESS = 64
LAST_WORDS = 500  # characters kept of an exception


class Trimmed(HpcRlError):
    """The batch was trimmed: nobody should need it."""


class OutOfTime(HpcRlError):
    """The attempt ends before another prompt would be finished: no batch will come."""


class OutOfStep(HpcRlError):
    """The batch after the next, or one that the batch log can't know."""


class RoleEnds(RoleFailed):
    """The role ends because the disk failed it; the next one knows more."""


class Runner(Protocol):
    """executor.Executor, or a fake."""

    restarts: int

    def run(self, frame: dict[str, Any]) -> None: ...

    def cancel(self, ticket: int) -> None: ...


class Driver:
    """Args:
    folder: The trial's `rollout/`.
    sequencer: Fresh; restored from the folder here.
    prompts: Training prompts.
    held_out: Held-out prompts, or None.
    left_s: Seconds until the trainer is stopped, None while nobody has said: what can't be finished by then is not issued.
    """

    def __init__(
        self,
        folder: Path,
        sequencer: Sequencer,
        prompts: Prompts,
        held_out: Prompts | None,
        left_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.core = sequencer
        self.last_call = LastCall(left_s)
        self.prompts = prompts
        self.held_out = held_out
        self.executor: Runner | None = None
        self.ledger = Ledger(folder)
        self.batches = Batches(folder, self.ledger)
        state = read_state(folder)
        check_data(folder, state, prompts.path, prompts.rows.fingerprint)
        self.batches.drop_trimmed(state.trimmed)
        sequencer.restore(state)
        self._folder = folder
        self._bodies: dict[int, bytes] = {}
        self._changed = asyncio.Event()
        self._cutting = asyncio.Lock()
        self._evaluations: dict[str, Evaluation] = {}
        self._eval_tickets = itertools.count(-1, -1)
        self._faults = 0  # rejections in a row that came of exceptions
        self._last_reason, self._last_error = "", ""
        self._issued: dict[int, float] = {}  # ticket -> when, on our clock
        self._last_result: float | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        logger.info(
            "ledger: %d batches cut, %d groups ready, %d prompts rejected; this is segment %d",
            state.top, len(state.ready), state.rejections.total(), self.ledger.segment,
        )  # fmt: skip

    async def run(self) -> None:
        """Group commits until something fails; returns never. Raises what failed."""
        while True:
            done, _ = await asyncio.wait({self._failed}, timeout=COMMIT_S)
            if done:
                self._failed.result()
            if self.ledger.uncommitted:
                await asyncio.to_thread(self.ledger.commit)
            if self.last_call.taken_back():
                self._pump()

    async def close(self) -> None:
        """Make everything that is finished durable."""
        await asyncio.to_thread(self.ledger.close)

    # what the executor reports

    def on_frame(self, frame: dict[str, Any]) -> None:
        """An answer of a worker. One whose ticket was given up is nobody's."""
        ticket = frame["ticket"]
        if ticket < 0:
            for evaluation in self._evaluations.values():
                if evaluation.owns(ticket):
                    evaluation.frame(frame)
            return
        issue = self.core.running.get(ticket)
        if issue is None:
            return
        self._last_result = time.monotonic()
        self._last_error = str(frame.get("error") or self._last_error)[:LAST_WORDS]
        if frame["op"] == "group" and self.core.overtaken(ticket, frame["newest_lineage"]):
            return
        self.last_call.finished(ticket)
        if frame["op"] == "group":
            numbers = {name: frame[name] for name in MEASURED}
            record = GroupRecord(index=issue.index, begun=issue.begun, **numbers)
            self.core.finished(ticket, record, self.ledger.append_group(record, frame["group"]))
        elif frame["op"] == "rejected":
            self._reject(issue.index, frame["reason"])
        elif not self.core.failed(ticket):
            self._reject(issue.index, RejectReason.EXCEPTION)
        self._pump()
        self._changed.set()

    def on_lost(self, tickets: list[int]) -> None:
        """A worker died."""
        self.last_call.forget(tickets)
        self.core.lost([ticket for ticket in tickets if ticket > 0])
        for evaluation in self._evaluations.values():
            evaluation.lost(tickets)
        self._pump()

    def _reject(self, index: int, reason: str) -> None:
        self.ledger.append_reject(RejectRecord(index, self.core.version or 0, reason))
        self.core.rejected(index, reason)
        self._last_reason = reason
        in_a_row = self.core.rejected_in_a_row
        self._faults = 0 if in_a_row <= 1 else self._faults
        self._faults += reason not in (RejectReason.STALE, RejectReason.WORKFLOW_NONE)
        hopeless = max(MIN_HOPELESS, 4 * self.core.rules.batch_size)
        if (
            self._faults >= hopeless or in_a_row >= max(hopeless, len(self.prompts))
        ) and not self._failed.done():
            so_far = ", ".join(f"{name} {count}" for name, count in self.core.rejections.most_common())
            story = f"the last {in_a_row} prompts were rejected: {reason} (all rejections so far: {so_far})"
            story += f"; the last exception: {self._last_error}" if self._last_error else ""
            self._failed.set_exception(DataUnusable(story))

    def _pump(self) -> None:
        assert self.executor is not None
        if self._failed.done() or self.last_call.holds():
            return
        for issue in self.core.issue():
            self.last_call.begun(issue.ticket)
            prompt = self.prompts.at(issue.index)
            label = str(WeightVersion(self.core.lineage, issue.begun))
            frame = {
                "op": "run",
                "ticket": issue.ticket,
                "index": issue.index,
                "epoch": prompt.epoch,
                "row": prompt.row,
            }
            content = {
                "columns": prompt.columns,
                "input_ids": prompt.input_ids,
                "version": label,
                "evaluate": False,
            }
            self._issued[issue.ticket] = time.monotonic()
            self.executor.run({**frame, **content})

    # what the service is asked

    def observe(self, lineage: int, version: int) -> None:
        """A trainer shows where it is. Raises Stale."""
        assert self.executor is not None
        if (lineage, version) != (self.core.lineage, self.core.version):
            given_up = self.core.observe(lineage, version)
            self.last_call.forget(given_up)
            for ticket in given_up:
                self.executor.cancel(ticket)
            for label, evaluation in self._evaluations.items():
                if WeightVersion.parse(label).lineage < self.core.lineage and not evaluation.result.done():
                    evaluation.result.set_exception(
                        Stale(f"lineage {self.core.lineage} has begun: {label} is not evaluated")
                    )
            self._pump()

    async def batch(self, step: int, lineage: int, wait_s: float) -> bytes | None:
        """The bytes of batch `step`, or None if it can't be cut within wait_s.

        Raises Stale, Trimmed, OutOfStep, OutOfTime, OSError.
        """
        if lineage < self.core.lineage:
            raise Stale(f"lineage {lineage} asks, but lineage {self.core.lineage} has begun")
        if self.core.untouched and not self.core.running and step > 1:
            await self._skip_to(step)
        if step > self.core.top + 1:
            async with self._cutting, self._or_end():
                self._adopt()  # another incarnation may have cut batches that we did not see
        if step > self.core.top + 1:
            raise OutOfStep(
                f"batch {step} was asked for, but the newest is {self.core.top}: is a part of the ledger gone?"
            )
        self.observe(lineage, step - 1)
        deadline = time.monotonic() + wait_s
        while True:
            body = self._bodies.get(step) or await self._sealed(step)
            if (
                body is None and not self.ledger.room.waiting
            ):  # else whoever asks would hang as long as there is no room
                body = await self._cut(step)
            if body is not None:
                return body
            if self.last_call.holding and not self.core.running:
                raise OutOfTime(f"batch {step} can't be cut any more before the trainer is stopped")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)

    async def _sealed(self, step: int) -> bytes | None:
        if step <= self.core.trimmed:
            raise Trimmed(f"batch {step} was trimmed; the oldest that is kept is {self.core.trimmed + 1}")
        seal = self.core.seals.get(step)
        return None if seal is None else self._keep(step, await asyncio.to_thread(self.batches.body, seal))

    async def _cut(self, step: int) -> bytes | None:
        async with self._cutting:
            if step in self.core.seals:  # another request was faster
                return self._bodies.get(step)
            for index in self.core.too_old(step):
                self._reject(index, RejectReason.STALE)
            indexes = self.core.cut(step)
            if indexes is None:
                self._pump()
                return None
            places = {index: self.core.ready[index].place for index in indexes}
            ages = self.core.ages(step, indexes)
            counters = {"older_lineage": float(self.core.num_of_older_lineage(indexes))}
            async with self._or_end():
                seal, body, ours = await asyncio.to_thread(
                    self.batches.seal, step, self.core.lineage, places, ages, counters
                )
                if ours:
                    self.core.sealed(seal)
                else:
                    logger.warning("batch %d had been cut by another incarnation: its batch counts", step)
                    self._adopt()
            self._pump()
            self._changed.set()
            return self._keep(step, body)

    def _adopt(self) -> None:
        """Start over from what is on disk, without giving results a moment to arrive in between."""
        self.ledger.commit()
        before = set(self.core.running)
        self.core.restore(read_state(self._folder))
        for ticket in before - set(self.core.running):
            assert self.executor is not None
            self.executor.cancel(ticket)

    def _keep(self, step: int, body: bytes) -> bytes:
        self._bodies[step] = body
        for old in sorted(self._bodies)[:-BODIES_KEPT]:
            if old != step:
                del self._bodies[old]
        return body

    async def _skip_to(self, step: int) -> None:
        logger.warning("the ledger is empty, but batch %d is asked for: beginning there", step)
        async with self._or_end():
            self.core.skip_to(step)
            self.ledger.append_base(self.core.base(step - 1))
            await asyncio.to_thread(self.ledger.commit)

    async def retain(self, step: int) -> None:
        """Batches up to `step` are not needed any more: delete their seals, and segments that nothing else needs."""
        step = min(step, self.core.top)
        if step <= self.core.trimmed:
            return
        async with self._cutting, self._or_end():
            self.ledger.append_base(self.core.base(step))
            gone, needed = self.core.trim(step)
            needed |= {self.ledger.segment}
            for number in gone:
                self._bodies.pop(number, None)
            await asyncio.to_thread(self._delete, gone, needed)

    def _delete(self, steps: list[int], needed: set[int]) -> None:
        self.ledger.commit()
        self.batches.note_trimmed(self.core.trimmed)
        for step in steps:
            self.batches.delete(step)
        for number in segments(self._folder):
            if number not in needed and number < max(
                needed
            ):  # later ones were begun meanwhile, by us or by another incarnation
                self.ledger.drop_segment(number)

    @contextlib.asynccontextmanager
    async def _or_end(self) -> AsyncIterator[None]:
        """After a write that failed nobody knows what the ledger has: the role ends, and the next one reads it from disk.

        Raises RoleEnds.
        """
        try:
            yield
        except Exception as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise RoleEnds(f"the rollout role ends: {error}") from error

    async def evaluate(self, label: str, wait_s: float | None) -> EvalResult | None:
        """The evaluation of these weights, begun now if it was not; None while it takes longer. Raises Stale, RoleFailed."""
        assert self.held_out is not None and self.executor is not None
        version = WeightVersion.parse(label)
        self.observe(version.lineage, version.step)
        if label not in self._evaluations or self._evaluations[label].result.cancelled():
            rules = self.core.rules
            limit = max(rules.max_concurrent, 64)
            self._evaluations[label] = Evaluation(
                label, self.held_out, self.executor.run, limit, rules.prompt_retries, self._eval_tickets
            )
            for old in list(self._evaluations)[:-EVALUATIONS_KEPT]:
                for ticket in self._evaluations.pop(old).tickets:
                    self.executor.cancel(ticket)
        done, _ = await asyncio.wait({self._evaluations[label].result}, timeout=wait_s)
        return done.pop().result() if done else None

    def report(self) -> dict[str, Any]:
        """What `hpc-rl status` shows of it."""
        now = time.monotonic()
        self._issued = {ticket: when for ticket, when in self._issued.items() if ticket in self.core.running}
        names = ("running", "ready", "sealed", "accepted", "rejected", "evaluating")
        return {
            **{name: value for name, value in self.status().items() if name in names},
            "rejected_in_a_row": self.core.rejected_in_a_row,
            "last_reason": self._last_reason,
            "last_error": self._last_error,
            "oldest_running_s": round(now - min(self._issued.values())) if self._issued else None,
            "quiet_s": None if self._last_result is None else round(now - self._last_result),
        }

    def status(self) -> dict[str, Any]:
        """Counters, for people and tests."""
        core = self.core
        seals: list[Seal] = list(core.seals.values())
        return {
            "version": None if core.version is None else str(WeightVersion(core.lineage, core.version)),
            "running": len(core.running),
            "ready": len(core.ready),
            "issued": core.next_index,
            "sealed": core.top,
            "trimmed": core.trimmed,
            "accepted": core.accepted,
            "consumed": core.consumed,
            "rejected": dict(core.rejections),
            "staleness": {str(age): count for age, count in sorted(core.staleness.items())},
            "older_lineage": sum(seal.counters.get("older_lineage", 0) for seal in seals),
            "bytes_per_step": sum(seal.num_bytes for seal in seals) / len(seals) if seals else 0.0,
            "ledger_bytes": self.ledger.size_bytes(),
            "segment": self.ledger.segment,
            "last_call": self.last_call.holding,
            "evaluating": [
                label for label, evaluation in self._evaluations.items() if not evaluation.result.done()
            ],
            "worker_restarts": self.executor.restarts if self.executor else 0,
        }
