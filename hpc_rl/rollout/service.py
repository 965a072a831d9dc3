"""RolloutService: the sequencer's shell.

Carries results into the ledger, issues prompts to workers, seals batches, answers callers.

One event loop; only fsync and seals run in a thread. All data is durable before the service answers with it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from hpc_rl.core.errors import ConfigError, HpcRlError, Stale, UserCodeFailed
from hpc_rl.core.records import LineageRecord
from hpc_rl.core.types import EvalResult, WeightVersion
from hpc_rl.datasets.curriculum import Curriculum
from hpc_rl.datasets.encode import Prompt, Prompts
from hpc_rl.rollout.batch_log.judged import Judged
from hpc_rl.rollout.batch_log.ledger import (
    DrawRecord,
    GroupRecord,
    Ledger,
    NoteRecord,
    RejectReason,
    RejectRecord,
    list_segments,
)
from hpc_rl.rollout.batch_log.replay import LogState, NewBatches, check_data, load_state, make_base
from hpc_rl.rollout.batch_log.seals import Batches
from hpc_rl.rollout.evaluation import Evaluations, Key
from hpc_rl.rollout.executor import Executor, make_run_frame
from hpc_rl.rollout.issue_clock import IssueClock
from hpc_rl.rollout.pipes import NoteKept, NoteMade, Outcome
from hpc_rl.rollout.sequencer import Sequencer
from hpc_rl.rollout.user_errors import Faults

logger = logging.getLogger(__name__)

COMMIT_S = 1.0  # longest time of finished work that a kill can lose
BODIES_KEPT = 2
EVALUATIONS = "evaluations"  # folder of their logs
MIN_HOPELESS = 64


class Refused(HpcRlError):
    """A request that the service can't serve; `status` is the answer's status, and gives the reason."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class RolloutService:
    """The sequencer with its disk, its workers and its callers.

    Requests of the trainer may begin a lineage, cut a batch and start an evaluation; a reader gets existing
    results. Both raise Refused.

    `folder` is the trial's `rollout/`, from which the fresh sequencer is restored. `lineages` returns the
    highest lineage in the trial directory, and the records of lineages. `left_s` returns the seconds until
    the trainer is stopped, None if unknown: prompts that would take longer are not issued.
    """

    def __init__(
        self,
        folder: Path,
        sequencer: Sequencer,
        prompts: Curriculum,
        held_out: Mapping[str, Prompts],
        lineages: Callable[[], tuple[int, list[LineageRecord]]],
        executor: Executor,
        left_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.sequencer = sequencer
        self.clock = IssueClock(left_s)
        self.prompts = prompts
        self.executor = executor
        executor.on_outcome, executor.on_note, executor.on_lost = self.on_outcome, self.on_note, self.on_lost
        rules = sequencer.rules
        limit = max(rules.max_concurrent, MIN_HOPELESS)
        self.faults = Faults(max(MIN_HOPELESS, 4 * rules.batch_size), len(prompts))
        self.evaluations = Evaluations(
            folder / EVALUATIONS, held_out, limit, rules.prompt_retries, executor, self.faults
        )
        self.ledger = Ledger(folder)
        self.batches = Batches(folder, self.ledger)
        self._folder = folder
        self._lineages = lineages
        state = self._load_state()
        check_data(folder, state, prompts.path, prompts.fingerprint)
        self.batches.drop_trimmed(state.trimmed)
        # the last lineage that began new batches
        self._new_batches_of = state.new_batches.lineage if state.new_batches else -1
        self.batches.move_aside(state.set_aside.values(), self._new_batches_of)
        self._notes_since = self._new_batches_of  # notes of prompts issued in older lineages do not count
        self.judged = Judged(folder)
        self.issued_again = 0  # prompts that the user's earlier code rejected
        state.lineage = max(0, lineages()[0])
        sequencer.restore(state)
        self._begun: int | None = None  # the lineage of the trainer's latest request
        self._trainer_since_s: float | None = None
        self._bodies: dict[int, bytes] = {}
        # reserved sequences of the next batch, by environment
        self.allocations: Callable[[], dict[int, int]] = dict
        # the same, even if the batch has stopped waiting for them
        self.claims: Callable[[], dict[int, int]] = dict
        self.environments: Callable[[], list[dict[str, Any]]] = list  # environments for `hpc-rl status`
        self._changed = asyncio.Event()
        self._noted = asyncio.Event()  # a note waits to be written
        self._kept: list[NoteKept] = []  # answers to send after it is written
        self._cutting = asyncio.Lock()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        form = (
            "the batch log has %d batches, %d groups of trajectories not yet in a batch, %d rejected prompts"
        )
        logger.info(form, state.top, len(state.ready), state.rejections.total())

    def _load_state(self) -> LogState:
        """Return the state on disk; a lineage unknown to the trial directory does not count."""
        state = load_state(self._folder)
        state.lineage = min(state.lineage, max(0, self._lineages()[0]))
        return state

    async def run(self) -> None:
        """Commit in groups until something fails; never returns. Raises the failure."""
        while True:
            noted = asyncio.ensure_future(self._noted.wait())
            either: set[asyncio.Future[Any]] = {self._failed, noted}
            await asyncio.wait(either, timeout=COMMIT_S, return_when=asyncio.FIRST_COMPLETED)
            noted.cancel()
            self._noted.clear()
            if self._failed.done():
                self._failed.result()
            kept, self._kept = self._kept, []
            # a seal may be writing these notes: the commit waits for it
            if kept or self.ledger.uncommitted:
                await asyncio.to_thread(self.ledger.commit)
            for frame in kept:
                self.executor.confirm_note(frame)
            if self.clock.can_resume():
                self._issue()

    async def commit(self) -> None:
        """Make all appended records durable, and check again whether a batch can be cut. Raises Refused."""
        async with self._end_on_error():
            await asyncio.to_thread(self.ledger.commit)
        self._changed.set()

    async def close(self) -> None:
        """Make all finished work durable."""
        await asyncio.to_thread(self.ledger.close)

    # reports of the executor

    def on_outcome(self, frame: Outcome) -> None:
        """Take the answer of a worker; answers to cancelled tickets are ignored."""
        ticket = frame["ticket"]
        self.faults.note(frame)
        if ticket < 0:
            self.evaluations.answer(ticket, frame)
            return
        issue = self.sequencer.running.get(ticket)
        if issue is None:
            return
        if frame["op"] == "group" and self.sequencer.drop_overtaken(ticket, frame["newest_lineage"]):
            return
        self.clock.finish(ticket)
        if frame["op"] == "group":
            record = GroupRecord(*frame["record"])
            self.sequencer.finish(ticket, record, self.ledger.append_group(record, frame["group"]))
        elif frame["op"] == "rejected":
            self._reject(issue.index, frame["reason"])
        elif not self.sequencer.fail(ticket):
            self._reject(issue.index, RejectReason.EXCEPTION)
        self._issue()
        self._changed.set()

    def on_note(self, frame: NoteMade) -> None:
        """Store a value that a workflow made once for its prompt; the workflow continues when it is on disk.

        So a kill loses only values that no workflow has used. Notes that arrive during one write share the
        next.
        """
        index, key, log = frame["index"], frame["key"], self.sequencer.log
        lineage = WeightVersion.parse(frame["version"]).lineage
        if lineage < self._notes_since or not log.is_open(index):
            return
        if key not in log.notes.get(index, {}):
            record = NoteRecord(index, key, frame["value"])
            log.add_note(record, self.ledger.append_note(record))
        value, _ = log.notes[index][key]
        self._kept.append(NoteKept(op="kept", ticket=frame["ticket"], key=key, value=value))
        self._noted.set()

    def on_lost(self, tickets: list[int]) -> None:
        """Issue the tickets of a dead worker again."""
        self.clock.forget(tickets)
        self.sequencer.reissue([ticket for ticket in tickets if ticket > 0])
        for ticket in tickets:
            self.evaluations.answer(ticket, None)
        self._issue()

    def _reject(self, index: int, reason: str) -> None:
        record = RejectRecord(index, self.sequencer.version or 0, reason)
        self.ledger.append_reject(record)
        self.sequencer.reject(record)
        sequencer = self.sequencer
        ends = self.faults.count_rejection(reason, sequencer.rejected_in_a_row, sequencer.log.rejections)
        if ends is not None and not self._failed.done():
            self._failed.set_exception(ends)

    def _issue(self) -> None:
        if self._failed.done() or self.clock.check_hold():
            return
        for issue in self.sequencer.issue():
            self.clock.begin(issue.ticket)
            try:
                prompt = self._draw_prompt(issue.index)
            except ConfigError as error:  # the chat template refuses it, now and later
                return self._failed.set_exception(error)
            version = WeightVersion(self.sequencer.log.lineage, issue.begun)
            stored = self.sequencer.log.notes.get(issue.index, {})
            notes = {key: value for key, (value, _) in stored.items()}
            self.executor.run(make_run_frame(issue.ticket, issue.index, prompt, version, notes=notes))

    def _draw_prompt(self, index: int) -> Prompt:
        """Return the prompt of an index. A new draw needs no commit: records of its prompt follow it."""
        log = self.sequencer.log
        if index not in log.draws:
            draw = self.prompts.draw(index, log.next_visits, log.rates)
            self.ledger.append_draw(DrawRecord(index, draw))
            log.add_draw(index, draw)
        return self.prompts.get(log.draws[index])

    # requests to the service

    async def begin(self, lineage: int) -> None:
        """Begin the trainer's lineage, and drop the batches that its record names.

        Raises Stale, Refused.
        """
        if lineage == self._begun == self.sequencer.log.lineage:
            return
        async with self._cutting:
            self._refuse_older(lineage)
            newest, records = await asyncio.to_thread(self._lineages)
            if lineage > max(0, newest):
                message = (
                    f"the trial directory does not show this start of the trainer (lineage {lineage}) yet: "
                    f"its newest is lineage {newest}; ask again later"
                )
                raise Refused(HTTPStatus.TOO_EARLY, message)
            again = self.judged.count_again(self.sequencer.log)
            for record in sorted(records, key=lambda record: record.lineage):
                if record.new_batches and self._new_batches_of < record.lineage <= lineage:
                    await self._begin_new_batches(record.lineage, record.from_step)
            if self.judged.count_again(self.sequencer.log):
                await self._begin_new_batches(lineage, self.sequencer.log.top)
            await asyncio.to_thread(self.judged.write)
            if again:
                logger.info(
                    "%d prompts begin again, because an earlier reward or workflow had rejected them", again
                )
                self.issued_again = again
            self._begun = lineage

    def _refuse_older(self, lineage: int) -> None:
        if lineage < self.sequencer.log.lineage:
            newer = self.sequencer.log.lineage
            raise Stale(
                f"the trainer has been started again (lineage {newer}), so its earlier process (lineage "
                f"{lineage}) gets no more batches"
            )

    async def _begin_new_batches(self, lineage: int, from_step: int) -> None:
        """Set aside the batches after `from_step` and all unbatched groups: their prompts are issued again.

        The new base is durable before anything is moved, and names the seals to set aside: after a kill the
        next incarnation moves the rest.
        """
        self._notes_since = lineage  # also for notes that arrive during this call
        given_up = list(self.sequencer.running)
        self.sequencer.reissue(given_up)
        self.sequencer.version = None  # nothing is issued meanwhile
        self._cancel(given_up)
        async with self._end_on_error():
            await asyncio.to_thread(self.ledger.begin_segment)
            state = self._load_state()
            new = NewBatches(lineage, from_step, self.ledger.segment)
            self.ledger.append_base(make_base(state, new, bool(self.judged.changed)))
            await asyncio.to_thread(self.ledger.commit)
            state = self._load_state()
            await asyncio.to_thread(self.batches.move_aside, state.set_aside.values(), lineage)
        self._bodies.clear()
        self.sequencer.restore(state)
        self._new_batches_of = lineage
        logger.info(
            "the trainer (lineage %d) continues after batch %d: %d later batches are set aside, and their "
            "prompts begin again",
            lineage, from_step, len(state.set_aside),
        )  # fmt: skip

    def _cancel(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self.clock.forget([ticket])
            self.executor.cancel(ticket)

    @property
    def trainer_s(self) -> float | None:
        """Seconds since the trainer's first request here, an hour at most; None before that."""
        if self._trainer_since_s is None:
            return None
        return round(min(3600.0, time.monotonic() - self._trainer_since_s))

    def observe(self, lineage: int, version: int) -> None:
        """Note the trainer's version; its lineage has begun. Raises Stale."""
        self._trainer_since_s = self._trainer_since_s or time.monotonic()
        if (lineage, version) == (self.sequencer.log.lineage, self.sequencer.version):
            return
        self._cancel(self.sequencer.observe(lineage, version))
        self.evaluations.cancel_before(self.sequencer.log.lineage)
        self._issue()

    async def batch(self, step: int, lineage: int, wait_s: float, version: int | None = None) -> bytes | None:
        """Return the bytes of batch `step`, cut now if necessary; None if it can't be cut within wait_s.

        For the trainer, which is at `version` of this lineage: step-1, or step-2 if it asks early. Raises
        Stale, Refused, OSError.
        """
        version = step - 1 if version is None else version
        await self.begin(lineage)
        if self.sequencer.untouched and not self.sequencer.running and step > 1:
            await self._skip_to(step)
        if step > self.sequencer.log.top + 1:
            async with self._cutting, self._end_on_error():
                self._adopt()  # another incarnation may have cut batches unknown to this one
        self._refuse_skipping(step)
        self.observe(lineage, version)
        deadline = time.monotonic() + wait_s
        while True:
            self._refuse_older(lineage)
            body = self._bodies.get(step) or await self._load_sealed(step)
            # on a full disk the caller would hang until there is room
            if body is None and not self.ledger.room.waiting:
                body = await self._cut(step)
            if body is not None:
                return body
            if self.clock.holding and not self.sequencer.running:
                logger.info("batch %d can't be completed before the job ends", step)
                raise Refused(HTTPStatus.RESET_CONTENT, "")
            if not await self._wait_for_change(deadline):
                return None

    async def get_sealed_batch(self, step: int, lineage: int, wait_s: float) -> bytes | None:
        """Return the bytes of batch `step` for a reader, or None if it is not cut within wait_s.

        Changes nothing. Raises Stale, Refused, OSError.
        """
        deadline = time.monotonic() + wait_s
        while True:
            self._refuse_older(lineage)
            if lineage > self.sequencer.log.lineage:
                raise Refused(
                    HTTPStatus.FORBIDDEN,
                    f"this start of the trainer (lineage {lineage}) has requested no batch yet; try again",
                )
            self._refuse_skipping(step)
            body = self._bodies.get(step) or await self._load_sealed(step)
            if body is not None or not await self._wait_for_change(deadline):
                return body

    def _refuse_skipping(self, step: int) -> None:
        top = self.sequencer.log.top
        if step > top + 1:
            problem = f"the batch log has {top} batches, so the next one can't be batch {step}: "
            problem += "is a part of the log missing?"
            raise Refused(HTTPStatus.PRECONDITION_FAILED, problem)

    async def _wait_for_change(self, deadline: float) -> bool:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), left_s)
        return True

    async def _load_sealed(self, step: int) -> bytes | None:
        trimmed = self.sequencer.log.trimmed
        if step <= trimmed:
            message = f"batch {step} is deleted already; the oldest that is kept is {trimmed + 1}"
            raise Refused(HTTPStatus.GONE, message)
        seal = self.sequencer.log.seals.get(step)
        return (
            None if seal is None else self._keep(step, await asyncio.to_thread(self.batches.load_body, seal))
        )

    async def _cut(self, step: int) -> bytes | None:
        async with self._cutting:
            if step in self.sequencer.log.seals:  # another request was faster
                return self._bodies.get(step)
            for index in self.sequencer.find_too_old(step):
                self._reject(index, RejectReason.STALE)
            groups = self.sequencer.cut(step, self.allocations())
            if groups is None:
                self._issue()
                return None
            async with self._end_on_error():
                lineage = self.sequencer.log.lineage
                seal, body, ours = await asyncio.to_thread(
                    self.batches.seal, step, lineage, groups, self.sequencer.log.draws
                )
                if ours:
                    self.sequencer.add_seal(seal)
                else:
                    logger.warning(
                        "batch %d exists already, from an earlier start of the rollout role, and is used",
                        step,
                    )
                    self._adopt()
            self._issue()
            self._changed.set()
            return self._keep(step, body)

    def _adopt(self) -> None:
        """Restart from the state on disk, in one go, so that no results arrive in between."""
        self.ledger.commit()
        before = set(self.sequencer.running)
        self.sequencer.restore(self._load_state())
        self._cancel(before - set(self.sequencer.running))

    def _keep(self, step: int, body: bytes) -> bytes:
        self._bodies[step] = body
        for old in {*sorted(self._bodies)[:-BODIES_KEPT]} - {step}:
            del self._bodies[old]
        return body

    async def _skip_to(self, step: int) -> None:
        logger.warning(
            "the batch log is empty, but the trainer asks for batch %d: the log begins there", step
        )
        async with self._end_on_error():
            self.sequencer.skip_to(step)
            self.ledger.append_base(self.sequencer.log.summarize(step - 1))
            await asyncio.to_thread(self.ledger.commit)

    async def retain(self, step: int) -> None:
        """Delete the seals of batches up to `step`, and segments and evaluations that nothing else needs."""
        await asyncio.to_thread(self.evaluations.retain, step)
        step = min(step, self.sequencer.log.top)
        if step <= self.sequencer.log.trimmed:
            return
        async with self._cutting, self._end_on_error():
            self.ledger.append_base(self.sequencer.log.summarize(step))
            self.sequencer.log.trim(step)
            needed = self.sequencer.find_needed_segments() | {self.ledger.segment}
            self._bodies = {number: body for number, body in self._bodies.items() if number > step}
            await asyncio.to_thread(self._delete, needed)

    def _delete(self, needed: set[int]) -> None:
        self.ledger.commit()
        self.batches.drop_trimmed(self.sequencer.log.trimmed)
        for number in list_segments(self._folder):
            # this or another incarnation has begun later ones meanwhile
            if number not in needed and number < max(needed):
                self.ledger.drop_segment(number)

    @contextlib.asynccontextmanager
    async def _end_on_error(self, *kinds: type[Exception]) -> AsyncIterator[None]:
        """Exit after a failed write: the ledger is in an unknown state, and the restarted role rereads it.

        Raises Refused, so that the caller asks the next role.
        """
        kinds = kinds or (Exception,)
        try:
            yield
        except kinds as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"the rollout role ends: {error}") from error

    async def evaluate(
        self, key: Key, wait_s: float | None, trainer: WeightVersion | None, together: Iterable[str] = ()
    ) -> EvalResult | None:
        """Return the evaluation of a version with a held-out set; None while it takes longer.

        The request of a trainer, which names its own version, begins it if necessary, and the sets in
        `together`; None for a reader.
        Raises Stale, Refused, RoleFailed.
        """
        if trainer is not None:
            await self.begin(trainer.lineage)
            if self.evaluations.options.blocking:
                self.observe(trainer.lineage, trainer.step)
            for name in (key[1], *together):
                self.evaluations.begin((key[0], name), trainer.lineage)
        elif key not in self.evaluations:
            raise Refused(
                HTTPStatus.FORBIDDEN,
                f"weights {key[0]} are not being evaluated; only the trainer can begin an evaluation",
            )
        async with self._end_on_error(UserCodeFailed, ConfigError):  # from a held-out row
            return await self.evaluations.wait_for_result(key, wait_s)
