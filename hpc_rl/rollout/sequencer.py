"""Sequencer: chooses the next prompts to issue, and the groups of the next batch.

A state machine without I/O or time.

Every prompt index is in exactly one place: running (issued, under a ticket), waiting (to be issued again), or
in the log: ready (a group), or resolved (in a sealed batch, or rejected). A result counts only under the
current ticket of its index: late results of a cancelled worker are ignored. The shell (service.py) does the
I/O in between.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpc_rl.config.options.experiment import GRPOConfig, has_own_prompts
from hpc_rl.core.errors import Stale
from hpc_rl.core.records import BatchWait, BatchWaitRecord
from hpc_rl.rollout.batch_fill import can_add_up, choose_sizes
from hpc_rl.rollout.batch_log.ledger import (
    FIRST_OUTSIDE,
    GroupRecord,
    OutsideRecord,
    RecordPlace,
    RejectReason,
    RejectRecord,
)
from hpc_rl.rollout.batch_log.replay import LogState, ReadyGroup
from hpc_rl.rollout.batch_log.seals import Seal
from hpc_rl.rollout.staleness import compute_staleness, count_room, has_room_after


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The options that the sequencer follows."""

    batch_size: int  # prompts
    max_concurrent: int  # prompts running at once
    eta: int  # max_head_offpolicyness; 0 is synchronous
    bound: Literal["soft", "hard", "drop"] = "soft"
    order: Literal["ready", "in_order"] = "ready"
    prompt_retries: int = 2  # after a failure
    # prompts running and groups ready together; None leaves the limit to staleness
    queue_size: int | None = None
    batch_sequences: int | None = None  # per batch, if environments send groups; else None
    n_samples: int = 1  # sequences per prompt, if environments send groups
    own_prompts: bool = True  # whether prompts are issued at all

    @property
    def bounds_age(self) -> bool:
        """Whether each group's age counts; always true in synchronous training."""
        return self.bound != "soft" or self.eta == 0


def make_rules(config: GRPOConfig) -> Rules:
    """Return the configured rules for order, age and retries."""
    batch_size, rollout = config.train_dataset.batch_size, config.rollout
    n_samples, section = config.gconfig.n_samples, config.environments
    return Rules(
        batch_size=batch_size,
        max_concurrent=rollout.max_concurrent_rollouts or 2 * batch_size,
        eta=rollout.max_head_offpolicyness if config.async_training else 0,
        bound=rollout.staleness_bound,
        order=rollout.batch_order,
        prompt_retries=rollout.prompt_retries,
        queue_size=rollout.queue_size,
        batch_sequences=None if section is None else batch_size * n_samples,
        n_samples=n_samples,
        own_prompts=has_own_prompts(config),
    )


@dataclass(frozen=True, slots=True)
class Issue:
    """A prompt to run: results are reported under its ticket."""

    ticket: int
    index: int
    begun: int  # the trainer's version


class Sequencer:
    """See the module. Nothing is issued before the first observe; `restore` sets the log."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.log = LogState()
        self.version: int | None = None  # the trainer's; None before its first request
        self.running: dict[int, Issue] = {}  # by ticket
        self.next_index = 0
        self.rejected_in_a_row = 0
        self._tickets = itertools.count(1)
        self._waiting: list[int] = []  # heap of indexes to issue again
        self._failures: Counter[int] = Counter()

    def restore(self, log: LogState) -> None:
        """Take over the state on disk; running prompts continue unless they are resolved there."""
        log.lineage = max(log.lineage, self.log.lineage)
        self.log = log
        self.running = {
            ticket: issue
            for ticket, issue in self.running.items()
            if issue.index not in log.resolved and issue.index not in log.ready
        }
        held = {issue.index for issue in self.running.values()}
        self.next_index = max(log.next_index, max(held, default=-1) + 1)
        unknown = range(log.resolved.floor, self.next_index)
        self._waiting = [i for i in unknown if i not in log.resolved and i not in log.ready and i not in held]

    @property
    def accepted(self) -> int:
        """Prompts that became groups: consumed and ready. Groups from outside count by their sequences."""
        if self.rules.batch_sequences is None:
            return self.log.consumed + len(self.log.ready)
        ready = sum(self._count_sequences(record) for record, _ in self.log.ready.values())
        return self.log.top * self.rules.batch_size + ready // self.rules.n_samples

    @property
    def untouched(self) -> bool:
        """Whether the log is empty."""
        return self.log.top == 0 and self.next_index == 0

    def observe(self, lineage: int, version: int) -> list[int]:
        """Note the trainer's version and lineage; return the tickets to cancel. Raises Stale.

        A trainer that went back has weights older than those at the start of the running prompts. If age is
        bounded, these prompts are issued again. In synchronous training, so are the prompts during which a
        new lineage published its weights, because results must be reproducible to the bit.
        """
        if lineage < self.log.lineage:
            raise Stale(
                f"the trainer has been started again (lineage {self.log.lineage}), so its earlier process "
                f"(lineage {lineage}) gets no more batches"
            )
        took_over = lineage > self.log.lineage
        if took_over or self.version is None:
            self.log.lineage, self.version = lineage, version
        self.version = max(self.version, version)
        if not self.rules.bounds_age:
            return []
        newest = -1 if took_over and self.rules.eta == 0 else self.version
        given_up = [ticket for ticket, issue in self.running.items() if issue.begun > newest]
        self.reissue(given_up)
        return given_up

    def drop_overtaken(self, ticket: int, newest_lineage: int) -> bool:
        """Drop a finished group if it has tokens of a trainer that went back and has not asked yet.

        Then nothing is issued until that trainer asks, because it would be discarded too.
        """
        if not self.rules.bounds_age or newest_lineage <= self.log.lineage:
            return False
        self.reissue([ticket])
        self.version = None
        return True

    def skip_to(self, step: int) -> None:
        """Begin at batch `step` without records of the earlier batches: their prompts count as used."""
        assert self.untouched and not self.running
        self.log.trimmed = step - 1
        self.log.consumed = self.next_index = (step - 1) * self.rules.batch_size
        self.log.begin_at(self.next_index)

    def issue(self) -> list[Issue]:
        """Return the prompts to start now: prompts to issue again, then new ones."""
        rules = self.rules
        if self.version is None or not rules.own_prompts:
            return []
        room = count_room(
            rules.max_concurrent, rules.batch_size, rules.eta, self.version, self.accepted, len(self.running)
        )
        if rules.queue_size is not None:
            room = min(room, rules.queue_size - len(self.running) - len(self.log.ready))
        issues = []
        for _ in range(room):
            if self._waiting:
                index = heapq.heappop(self._waiting)
            else:
                index, self.next_index = self.next_index, self.next_index + 1
            issue = Issue(next(self._tickets), index, self.version)
            self.running[issue.ticket] = issue
            issues.append(issue)
        return issues

    def finish(self, ticket: int, record: GroupRecord, place: RecordPlace) -> None:
        """Record that the group of a running ticket is in the ledger."""
        del self.running[ticket]
        self._failures.pop(record.index, None)
        self.rejected_in_a_row = 0
        self.log.add_group(record, place)

    def fail(self, ticket: int) -> bool:
        """Record that a ticket ended with an exception; return whether its prompt is issued again."""
        index = self.running[ticket].index
        self._failures[index] += 1
        if self._failures[index] > self.rules.prompt_retries:
            return False
        self.reissue([ticket])
        return True

    def reissue(self, tickets: list[int]) -> None:
        """Issue the prompts of these tickets again; the prompts did not cause the loss."""
        for ticket in tickets:
            if ticket in self.running:
                heapq.heappush(self._waiting, self.running.pop(ticket).index)

    def reject(self, record: RejectRecord) -> None:
        """Record the rejection of a running or ready prompt."""
        for ticket in [ticket for ticket, issue in self.running.items() if issue.index == record.index]:
            del self.running[ticket]
        self._failures.pop(record.index, None)
        self.rejected_in_a_row += record.reason != RejectReason.STALE
        self.log.reject(record)

    def find_too_old(self, step: int) -> list[int]:
        """Return ready groups that are too old for batch `step`: the service rejects them before it cuts.

        Nothing limits groups from outside before they arrive, so their age is always bounded.
        """
        return [
            index
            for index, (record, _) in self.log.ready.items()
            if (self.rules.bound != "soft" or index >= FIRST_OUTSIDE)
            and compute_staleness(step, record.oldest_step) > self.rules.eta
        ]

    def cut(self, step: int, allocations: Mapping[int, int] | None = None) -> dict[int, ReadyGroup] | None:
        """Return the groups of batch `step`, ordered by index, or None while it can't be cut.

        `allocations` are the sequences of the batch reserved for environments, by env_id. Changes nothing;
        see add_seal.
        """
        rules, ready = self.rules, self.log.ready
        if step != self.log.top + 1:
            return None
        if rules.batch_sequences is None and len(ready) < rules.batch_size:
            return None  # soon: this is called for each group
        if rules.batch_sequences is not None:
            chosen = self._choose_groups(rules.batch_sequences, allocations or {})
        else:
            chosen = (
                self._choose_in_order()
                if rules.order == "in_order"
                else self._sort_by_age()[: rules.batch_size]
            )
            chosen = chosen if len(chosen) == rules.batch_size else []
        if not chosen:
            return None
        # if nothing runs, waiting would not help; groups that get too old are rejected
        if rules.bound == "hard" and self.running:
            left = [record.begun for index, (record, _) in ready.items() if index not in chosen]
            left += [issue.begun for issue in self.running.values()]
            if not has_room_after(step, rules.batch_size, rules.eta, left):
                return None
        return {index: ready[index] for index in sorted(chosen)}

    def _count_sequences(self, record: GroupRecord) -> int:
        """Return the number of sequences that a group counts as."""
        return record.num_trajectories if isinstance(record, OutsideRecord) else self.rules.n_samples

    def _choose_groups(self, total: int, allocations: Mapping[int, int]) -> list[int]:
        """Return groups with `total` sequences together, including the shares of environments."""
        ready = self.log.ready
        order = sorted(ready) if self.rules.order == "in_order" else self._sort_by_age()
        chosen: list[int] = []
        of_environments = (
            (share, [i for i in order if getattr(ready[i][0], "env_id", None) == env_id])
            for env_id, share in allocations.items()
        )
        for share, candidates in of_environments:
            picked = choose_sizes([self._count_sequences(ready[i][0]) for i in candidates], share)
            if picked is None:
                return []
            chosen += [candidates[k] for k in picked]
        taken = set(chosen)
        rest = [i for i in order if i not in taken]
        picked = choose_sizes(
            [self._count_sequences(ready[i][0]) for i in rest], total - sum(allocations.values())
        )
        return [] if picked is None else chosen + [rest[k] for k in picked]

    def explain_wait(self, allocations: Mapping[int, int]) -> BatchWaitRecord | None:
        """Return why the waiting groups make no batch; None if they do, or if no group waits."""
        total, log = self.rules.batch_sequences, self.log
        if total is None or not (log.ready or log.parts) or self._choose_groups(total, allocations):
            return None
        parts = sum(record.num_trajectories for record, _ in log.parts.values())
        records = [record for record, _ in log.ready.values()]
        sizes = [self._count_sequences(record) for record in records]
        for env_id, share in allocations.items():
            own = [one.num_trajectories for one in records if getattr(one, "env_id", None) == env_id]
            if choose_sizes(own, share) is None:
                name = str(log.environments.get(env_id, {}).get("name", env_id))
                return BatchWaitRecord(
                    kind=BatchWait.SHARE, ready=sum(own), needed=share, sizes=sorted(set(own)),
                    parts=parts, environment=name,
                )  # fmt: skip
        kind = BatchWait.COMBINATION
        if sum(sizes) < total:
            kind = BatchWait.SEQUENCES
        if sizes and not can_add_up(set(sizes), total - sum(allocations.values())):
            kind = BatchWait.SIZES
        return BatchWaitRecord(
            kind=kind, ready=sum(sizes), needed=total, sizes=sorted(set(sizes)), parts=parts
        )

    def _sort_by_age(self) -> list[int]:
        """Return the ready indexes, the oldest first; at equal age outside groups first, then by arrival."""
        ready = self.log.ready  # by arrival

        def age(index: int) -> tuple[int, bool]:
            record, is_own = ready[index][0], index < FIRST_OUTSIDE
            # a group from outside is as old as its tokens: the start of its episode is unknown
            return (record.begun if is_own else min(record.begun, record.oldest_step)), is_own

        return sorted(ready, key=age)

    def _choose_in_order(self) -> list[int]:
        chosen: list[int] = []
        for index in itertools.count(self.log.resolved.floor):
            if index in self.log.ready:
                chosen.append(index)
            elif index not in self.log.resolved:
                break
            if len(chosen) == self.rules.batch_size:
                break
        return chosen

    def add_seal(self, seal: Seal) -> None:
        """Record that this service has cut batch top+1 from ready groups."""
        assert seal.step == self.log.top + 1
        self.log.add_seal(seal)

    def find_needed_segments(self) -> set[int]:
        """Return the segments with groups of past or future batches, or notes of open prompts."""
        places = [place for seal in self.log.seals.values() for place in seal.places.values()]
        notes = (note for notes in self.log.notes.values() for note in notes.values())
        waiting = (*self.log.ready.values(), *self.log.parts.values(), *notes)
        return {place.segment for place in (*places, *(place for _, place in waiting))}
