"""The rollout role on a virtual clock: the sequencer issues prompts to the fleet, and cuts the batches."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hpc_rl.core.types import WeightVersion
from hpc_rl.rollout.batch_log.ledger import GroupRecord, RecordPlace, RejectReason, RejectRecord
from hpc_rl.rollout.batch_log.seals import Seal
from hpc_rl.rollout.issue_clock import IssueClock
from hpc_rl.rollout.sequencer import Sequencer
from hpc_rl.rollout.staleness import compute_staleness
from hpc_rl.simulate.clock import Clock, Event
from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.fleet import Fleet, Group
from hpc_rl.simulate.setup import Setup

NOWHERE = RecordPlace(0, 0)


class Batches:
    """What the rollout role does with its sequencer, without files and requests (rollout/service.py)."""

    def __init__(self, clock: Clock, setup: Setup, costs: Costs, drawn: random.Random) -> None:
        weight = setup.choose_weight()
        rules = setup.rules
        self.weight = weight
        self.rules = replace(
            rules,
            batch_size=max(1, round(rules.batch_size / weight)),
            max_concurrent=max(1, round(rules.max_concurrent / weight)),
            queue_size=None if rules.queue_size is None else max(1, round(rules.queue_size / weight)),
        )
        self.sequencer = Sequencer(self.rules)
        self.clock, self.costs, self.drawn = clock, costs, drawn
        self.changed = Event()  # a group has come
        self.tokens: dict[int, int] = {}  # of each sealed batch, prompts included
        self.is_up = False
        self.stops_at: float | None = None  # when the trainer is stopped, if that is near
        self.issue_clock = IssueClock(self._compute_left_s, lambda: clock.now)
        number = max(1, round(setup.num_servers / weight))
        self.fleet = Fleet(clock, costs, number, setup.num_servers, self._take)
        self._n_samples = setup.n_samples

    def come_up(self) -> None:
        self.is_up = True
        self._issue()

    def go_down(self) -> None:
        """Lose the running prompts: the next role issues them again."""
        self.is_up = False
        self.fleet.clear()
        self.issue_clock.forget(list(self.sequencer.running))
        self.sequencer.reissue(list(self.sequencer.running))

    def observe(self, lineage: int, version: int) -> None:
        """Note the trainer's version."""
        given_up = self.sequencer.observe(lineage, version)
        self.issue_clock.forget(given_up)
        self._issue()

    def cut(self, step: int) -> Seal | None:
        """Return batch `step`, cut now if necessary; None if it is not complete."""
        if not self.is_up:
            return None
        log = self.sequencer.log
        if step in log.seals:
            return log.seals[step]
        if len(log.ready) < self.rules.batch_size:
            return None
        for index in self.sequencer.find_too_old(step):
            record = RejectRecord(index, self.sequencer.version or 0, RejectReason.STALE)
            self.sequencer.reject(record)
        groups = self.sequencer.cut(step)
        if groups is None:
            self._issue()
            return None
        records = [record for record, _ in groups.values()]
        ages = Counter(compute_staleness(step, record.oldest_step) for record in records)
        seal = Seal(step, log.lineage, dict.fromkeys(groups, NOWHERE), ages, 0, "")
        self.sequencer.add_seal(seal)
        self.tokens[step] = sum(record.num_tokens for record in records)
        self._issue()
        return seal

    def trim(self, step: int) -> None:
        """Forget batches that no checkpoint needs."""
        if step > self.sequencer.log.trimmed:
            self.sequencer.log.trim(step)
            self.tokens = {number: tokens for number, tokens in self.tokens.items() if number > step}

    def _compute_left_s(self) -> float | None:
        return None if self.stops_at is None else self.stops_at - self.clock.now

    @property
    def is_held(self) -> bool:
        """Whether no batch can come: nothing is issued, because the job ends soon, and nothing runs."""
        return self.issue_clock.holding and not self.sequencer.running

    def _issue(self) -> None:
        if not self.is_up or self.issue_clock.check_hold():
            return
        lengths = self.costs.drawn_lengths
        for issue in self.sequencer.issue():
            self.issue_clock.begin(issue.ticket)
            least = WeightVersion(self.sequencer.log.lineage, issue.begun)
            self.fleet.submit(Group(issue.ticket, self.drawn.choices(lengths, k=self._n_samples), least))
        self.fleet.flush()

    def _take(self, group: Group) -> None:
        if self.costs.reward_s:
            self.clock.after(self.costs.reward_s, lambda: self._finish(group))
        else:
            self._finish(group)

    def _finish(self, group: Group) -> None:
        issue = self.sequencer.running.get(group.ticket)
        if issue is None or not self.is_up:
            return
        self.issue_clock.finish(group.ticket)
        tokens = group.num_tokens + round(len(group.lengths) * self.costs.prompt_tokens)
        record = GroupRecord(
            issue.index, issue.begun, group.oldest_step, self.sequencer.log.lineage,
            len(group.lengths), tokens, 0.0,
        )  # fmt: skip
        self.sequencer.finish(group.ticket, record, NOWHERE)
        self._issue()
        self.changed.fire()
