"""The sequencer's promises, on a made-up world: random completions, rejections, kills, replays, trainers that
go back.
"""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.core.errors import Stale
from hpc_rl.rollout.batch_log.ledger import BaseRecord, GroupRecord, NoteRecord, RecordPlace, RejectRecord
from hpc_rl.rollout.batch_log.replay import replay
from hpc_rl.rollout.batch_log.seals import Seal
from hpc_rl.rollout.sequencer import Rules, Sequencer
from hpc_rl.rollout.staleness import compute_staleness

ACTIONS = ["note", "note", "fail", "lose", "kill", "go_back", "trim", "commit", "ask", "finish"]


class World:
    """Ledger, seals, servers and a trainer, as far as the sequencer can tell. A prompt in `hopeless` never
    gives a group.
    """

    def __init__(self, rules: Rules, hopeless: frozenset[int] = frozenset()) -> None:
        self.rules = rules
        self.hopeless = hopeless
        self.records: list = []
        self.committed = 0
        self.seals: dict[int, Seal] = {}
        self.every_seal: dict[int, Seal] = {}
        self.oldest: dict[RecordPlace, int] = {}
        self.noted: dict[int, dict[str, bytes]] = {}  # what each prompt must find again
        self.min_seen: dict[int, int] = {}  # the oldest weights that each ticket may have seen
        self.lineage, self.version = 0, 0
        self.places = itertools.count()
        self.core = Sequencer(rules)
        self.begin()

    def begin(self) -> None:
        self.core.observe(self.lineage, self.version)
        self.issue()

    def issue(self) -> None:
        for issue in self.core.issue():
            self.min_seen[issue.ticket] = self.version
        assert len(self.core.running) <= self.rules.max_concurrent
        self.check()

    def append(self, record) -> RecordPlace:
        place = RecordPlace(0, next(self.places))
        self.records.append((place, record))
        return place

    def running(self, pick: int):
        tickets = sorted(self.core.running)
        return self.core.running[tickets[pick % len(tickets)]] if tickets else None

    def finish(self, pick: int) -> None:
        if (issue := self.running(pick)) is None:
            return
        if issue.index in self.hopeless:
            self.reject(issue.index, "workflow_none")
        else:
            oldest = self.min_seen[issue.ticket]
            record = GroupRecord(issue.index, issue.begun, oldest, self.lineage, 1, 1, 0.0)
            place = self.append(record)
            self.oldest[place] = oldest
            self.core.finish(issue.ticket, record, place)
        self.issue()

    def note(self, pick: int) -> None:
        """A workflow makes something under one of two keys; it is on disk before anything else happens."""
        issue = self.running(pick)
        if issue is None:
            return
        key, value = "ab"[pick % 2], str(pick).encode()
        record = NoteRecord(issue.index, key, value)
        self.core.log.add_note(record, self.append(record))
        self.noted.setdefault(issue.index, {}).setdefault(key, value)
        self.commit()

    def reject(self, index: int, reason: str) -> None:
        record = RejectRecord(index, self.version, reason)
        self.append(record)
        self.core.reject(record)

    def fail(self, pick: int) -> None:
        """A failure that ends well: the last retry always works, so that no rejection depends on chance."""
        issue = self.running(pick)
        if issue is not None and self.core._failures[issue.index] < self.rules.prompt_retries:
            assert self.core.fail(issue.ticket)
            self.issue()

    def lose(self, pick: int) -> None:
        tickets = sorted(self.core.running)
        self.core.reissue(tickets[: pick % (len(tickets) + 1)])
        self.issue()

    def commit(self, _pick: int = 0) -> None:
        self.committed = len(self.records)

    def kill(self, pick: int) -> None:
        """Some of what was not committed is lost."""
        keep = self.committed + pick % (len(self.records) - self.committed + 1)
        del self.records[keep:]
        self.commit()
        self.core = Sequencer(self.rules)
        self.core.restore(replay(self.records, self.seals))
        self.check()
        self.begin()

    def ask(self, _pick: int = 0) -> bool:
        """The trainer asks for its next batch; with it, it makes the next version."""
        step = self.version + 1
        self.core.observe(self.lineage, self.version)
        self.issue()
        if step not in self.core.log.seals and not self.cut(step):
            return False
        self.set_version(step)
        return True

    def set_version(self, version: int) -> None:
        """What runs gets tokens of these weights."""
        self.version = version
        for ticket in self.core.running:
            self.min_seen[ticket] = min(self.min_seen[ticket], version)

    def cut(self, step: int) -> bool:
        for index in self.core.find_too_old(step):
            self.reject(index, "stale")
        groups = self.core.cut(step)
        if groups is None:
            self.issue()
            return False
        self.commit()
        places = {index: place for index, (_, place) in groups.items()}
        ages = [compute_staleness(step, record.oldest_step) for record, _ in groups.values()]
        seal = Seal(step, self.lineage, places, {age: ages.count(age) for age in ages}, 1, "")
        assert step not in self.seals
        self.seals[step] = self.every_seal[step] = seal
        self.core.add_seal(seal)
        self.issue()
        return True

    def go_back(self, pick: int) -> None:
        """The trainer dies and recovers from an older generation."""
        self.lineage += 1
        self.set_version(self.version - pick % (self.version - self.core.log.trimmed + 1))
        self.core.observe(self.lineage, self.version)
        with pytest.raises(Stale):
            self.core.observe(self.lineage - 1, self.version)
        self.issue()

    def trim(self, pick: int) -> None:
        """What is deleted is what the sequencer says is not needed; one segment here, so records of sealed
        groups go.
        """
        trimmed, newest = self.core.log.trimmed, min(self.version, self.core.log.top)
        step = trimmed + pick % (newest - trimmed + 1)
        if step == trimmed:
            return
        self.append(BaseRecord(self.core.log.summarize(step)))
        self.commit()
        for number in self.seals.keys() - range(step + 1, self.core.log.top + 1):
            del self.seals[number]
        self.core.log.trim(step)
        ready = {place for _, place in self.core.log.ready.values()}
        needed = ready | {place for seal in self.seals.values() for place in seal.places.values()}
        needed |= {place for notes in self.core.log.notes.values() for _, place in notes.values()}
        kept = ((place, one) for place, one in self.records if place in needed or isinstance(one, BaseRecord))
        self.records = list(kept)
        self.commit()

    def check(self) -> None:
        """Every index below next_index is in exactly one place."""
        core = self.core
        running = [issue.index for issue in core.running.values()]
        placed = [*running, *core._waiting, *core.log.ready]
        placed += [*core.log.resolved.above, *range(core.log.resolved.floor)]
        assert sorted(placed) == list(range(core.next_index))
        notes = {i: {key: value for key, (value, _) in made.items()} for i, made in core.log.notes.items()}
        open_again = {*running, *core._waiting, *range(core.next_index, max(self.noted, default=-1) + 1)}
        assert notes == {index: made for index, made in self.noted.items() if index in open_again}
        consumed = [index for seal in self.every_seal.values() for index in seal.places]
        assert len(set(consumed)) == len(consumed) == core.log.consumed
        if self.rules.bound != "soft":
            for step, seal in self.every_seal.items():
                ages = (compute_staleness(step, self.oldest[place]) for place in seal.places.values())
                assert all(age <= self.rules.eta for age in ages)

    def drain(self, num_steps: int) -> None:
        """From here on everything finishes: the trainer must get its batches."""
        goal = self.version + num_steps
        for turn in range(200 * num_steps):
            if self.version == goal:
                return
            if not self.ask():
                assert self.core.running, "nothing runs and no batch can be cut"
                self.finish(turn)
        left = f"{len(self.core.log.ready)} ready, {len(self.core.running)} running"
        raise AssertionError(f"no batch {self.version + 1}: {left}")


def plan(**fixed):
    rules = {
        "batch_size": st.integers(1, 4),
        "max_concurrent": st.integers(1, 10),
        "eta": st.integers(0, 3),
        "bound": st.sampled_from(["soft", "hard", "drop"]),
        "order": st.sampled_from(["ready", "in_order"]),
    }
    return st.builds(Rules, **{**rules, **{name: st.just(value) for name, value in fixed.items()}})


@st.composite
def scripts(draw, without: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """Long scripts: what matters needs many finished groups, and drawn lists stay short."""
    actions = [action for action in dict.fromkeys(ACTIONS) if action not in without]
    rare = draw(st.lists(st.sampled_from(actions), max_size=12))
    chance = random.Random(draw(st.integers(0, 2**32)))
    script = [chance.choices(["finish", "ask"], [3, 1])[0] for _ in range(draw(st.integers(0, 120)))]
    for action in rare:
        script.insert(chance.randrange(len(script) + 1), action)
    return [(action, chance.randrange(10_000)) for action in script]


hopeless = st.frozensets(st.integers(0, 40), max_size=8)


def play(rules: Rules, hopeless: frozenset[int], script: list[tuple[str, int]]) -> World:
    world = World(rules, hopeless)
    sealed: dict[int, Seal] = {}
    for action, pick in script:
        getattr(world, action)(pick)
        assert all(world.every_seal[step] == seal for step, seal in sealed.items())
        sealed = dict(world.every_seal)
        state = replay(world.records[: world.committed], world.seals)
        assert state.top == world.core.log.top and state.consumed == world.core.log.consumed
    world.drain(3)
    return world


@settings(max_examples=120, deadline=None)
@given(plan(), hopeless, scripts())
def test_promises_hold_whatever_happens(rules, hopeless, script):
    play(rules, hopeless, script)


@settings(max_examples=150, deadline=None)
@given(plan(order="in_order", bound="soft"), hopeless, scripts())
def test_in_order_batches_are_those_of_a_run_that_nothing_happened_to(rules, hopeless, script):
    world = play(rules, hopeless, script)
    good = (index for index in itertools.count() if index not in hopeless)
    for step in range(1, world.core.log.top + 1):
        assert list(world.every_seal[step].places) == list(itertools.islice(good, rules.batch_size))


@settings(max_examples=120, deadline=None)
@given(plan(bound="hard"), hopeless, scripts(without=("go_back",)))
def test_hard_rejects_nothing_as_stale_while_the_trainer_goes_forward(rules, hopeless, script):
    world = play(rules, hopeless, script)
    assert world.core.log.rejections["stale"] == 0


@settings(max_examples=100, deadline=None)
@given(plan(eta=0, order="in_order"), scripts(without=("go_back",)))
def test_synchronous_training_gets_fresh_data_only(rules, script):
    world = play(rules, frozenset(), script)
    assert set(world.core.log.staleness) <= {0}


def test_nothing_is_issued_before_a_trainer_has_asked():
    core = Sequencer(Rules(batch_size=2, max_concurrent=8, eta=1))
    assert core.issue() == []
    core.observe(0, 0)
    assert [issue.index for issue in core.issue()] == [0, 1, 2, 3]


def test_an_answer_under_a_ticket_that_was_given_up_does_not_count():
    core = Sequencer(Rules(batch_size=1, max_concurrent=1, eta=0))
    core.observe(0, 0)
    (first,) = core.issue()
    core.reissue([first.ticket])
    (second,) = core.issue()
    assert second.index == first.index and first.ticket not in core.running and second.ticket in core.running


def test_a_prompt_is_rejected_after_its_retries():
    core = Sequencer(Rules(batch_size=1, max_concurrent=1, eta=0, prompt_retries=2))
    core.observe(0, 0)
    outcomes = []
    for _ in range(3):
        (issue,) = core.issue()
        outcomes.append(core.fail(issue.ticket))
    assert outcomes == [True, True, False]
    core.reject(RejectRecord(0, 0, "exception"))
    assert core.issue()[0].index == 1 and core.log.rejections == {"exception": 1}


def test_an_empty_ledger_can_begin_at_any_step():
    core = Sequencer(Rules(batch_size=4, max_concurrent=8, eta=0))
    for index in (3, 50):
        core.log.add_note(NoteRecord(index, "probe", b""), RecordPlace(0, index))
    core.skip_to(13)
    core.observe(2, 12)
    assert [issue.index for issue in core.issue()] == [48, 49, 50, 51]
    assert core.log.notes.keys() == {50}, "others keep no segment"
    state = replay([(RecordPlace(0, 0), BaseRecord(core.log.summarize(12)))], {})
    assert (state.top, state.consumed, state.next_index, state.lineage) == (12, 48, 48, 2)


@pytest.mark.parametrize(("bound", "given_up"), [("soft", 0), ("hard", 2), ("drop", 2)])
def test_a_trainer_that_goes_back_has_prompts_of_bounded_age_reissued(bound, given_up):
    core = Sequencer(Rules(batch_size=1, max_concurrent=2, eta=1, bound=bound))
    core.skip_to(4)
    core.observe(0, 3)
    assert len(core.issue()) == 2
    assert len(core.observe(1, 1)) == given_up


def test_a_segment_is_needed_while_it_has_a_note_of_an_open_prompt():
    core = Sequencer(Rules(batch_size=1, max_concurrent=2, eta=0))
    core.observe(0, 0)
    for issue, segment in zip(core.issue(), (3,), strict=True):
        core.log.add_note(NoteRecord(issue.index, "probe", b""), RecordPlace(segment, 16))
    assert core.find_needed_segments() == {3}
    core.reject(RejectRecord(0, 0, "workflow_none"))
    assert core.find_needed_segments() == set()
