"""The ledger and the seals of a trial as a whole, as an incarnation reads them at its start.

If several records name one prompt index, a seal has priority, then the first group or rejection; a rejection
after the group (the group got too old) replaces it. So every reader gets the same result, even after two
concurrent writers.
"""

from collections import Counter
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.core.trial import load_object, write_json
from hpc_rl.datasets.rows import Draw, RowKey, check_same_rows
from hpc_rl.rollout.batch_log.ledger import (
    FIRST_OUTSIDE,
    OF_USER_CODE,
    BaseRecord,
    DrawRecord,
    EnvironmentRecord,
    GroupRecord,
    LedgerDamaged,
    NoteRecord,
    OutsideRecord,
    Record,
    RecordPlace,
    RejectReason,
    RejectRecord,
    get_segment_path,
    list_segments,
    load_segment,
)
from hpc_rl.rollout.batch_log.seals import Seal, load_seals

ReadyGroup = tuple[GroupRecord, RecordPlace]
NotePlace = tuple[bytes, RecordPlace]  # encoded value

# Rejections by user code in each base record: a workflow may reject half of all prompts.
KEPT_REJECTIONS = 10_000
DATA_NAME = "data.json"  # fingerprint of the rows of this log's prompts


class IndexSet:
    """A set of non-negative integers that is nearly a prefix: everything below `floor`, and some above."""

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.above: set[int] = set()

    def add(self, index: int) -> None:
        if index >= self.floor:
            self.above.add(index)
            self._close_gaps()

    def raise_floor(self, floor: int) -> None:
        """Add everything below `floor`."""
        self.floor = max(self.floor, floor)
        self.above = {index for index in self.above if index >= self.floor}
        self._close_gaps()

    def _close_gaps(self) -> None:
        while self.floor in self.above:
            self.above.remove(self.floor)
            self.floor += 1

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and (index < self.floor or index in self.above)

    @property
    def end(self) -> int:
        """One more than the largest member."""
        return max(self.above, default=self.floor - 1) + 1


@dataclass(frozen=True)
class NewBatches:
    """The start of new batches by a lineage: it sets aside later batches than `after` with older segments.

    Of segments below `segment`, only the records of batches up to `after` count.
    """

    lineage: int
    after: int
    segment: int

    def sets_aside(self, seal: Seal) -> bool:
        return seal.step > self.after and any(place.segment < self.segment for place in seal.places.values())


@dataclass
class LogState:
    """The state of a batch log: replayed from disk, then updated by the sequencer that writes it.

    A prompt index is in `ready` or in `resolved`, or it is unknown.
    """

    seals: dict[int, Seal] = field(default_factory=dict)
    ready: dict[int, ReadyGroup] = field(default_factory=dict)  # in no batch yet, by arrival
    resolved: IndexSet = field(default_factory=IndexSet)  # in a batch, or rejected
    # since the last trim; rejections by user code permanently, the newest KEPT_REJECTIONS
    rejected: dict[int, RejectRecord] = field(default_factory=dict)
    rejections: Counter[str] = field(default_factory=Counter)  # by reason, trimmed ones included
    staleness: Counter[int] = field(default_factory=Counter)
    consumed: int = 0  # groups in batches, trimmed ones included
    trimmed: int = 0  # batches up to this one are deleted
    lineage: int = 0  # the latest lineage that asked for a batch
    new_batches: NewBatches | None = None  # the latest
    # seals set aside by new_batches that still exist
    set_aside: dict[int, Seal] = field(default_factory=dict)
    # groups from outside have indexes from FIRST_OUTSIDE on, in the order of their acknowledgement
    resolved_outside: IndexSet = field(default_factory=lambda: IndexSet(FIRST_OUTSIDE))
    parts: dict[int, ReadyGroup] = field(default_factory=dict)  # parts of incomplete groups
    # all groups from outside that are not trimmed
    outside: dict[int, OutsideRecord] = field(default_factory=dict)
    keys: set[bytes] = field(default_factory=set)  # keys of `outside`
    # acknowledged whole groups, and groups that got too old, by env_id; trimmed ones included
    taken: Counter[int] = field(default_factory=Counter)
    too_old: Counter[int] = field(default_factory=Counter)
    counted_to: int = FIRST_OUTSIDE  # a base record has counted groups with a smaller index in `taken`
    environments: dict[int, dict[str, Any]] = field(default_factory=dict)  # by env_id, as they registered
    notes: dict[int, dict[str, NotePlace]] = field(default_factory=dict)  # of open prompts: index -> key
    # rows of prompts that are open, in a batch that is not trimmed, or may be issued again
    draws: dict[int, Draw] = field(default_factory=dict)
    next_visits: dict[int, int] = field(default_factory=dict)  # by data set, after all draws
    rates: dict[RowKey, float] = field(default_factory=dict)  # mean reward of each row's latest group
    trimmed_rates: dict[RowKey, float] = field(default_factory=dict)  # the same, of trimmed batches only

    @property
    def top(self) -> int:
        """The newest batch that was cut."""
        return max(self.seals, default=self.trimmed)

    @property
    def next_index(self) -> int:
        own = (index for index in self.ready if index < FIRST_OUTSIDE)
        return max(self.resolved.end, max(own, default=-1) + 1)

    @property
    def next_outside(self) -> int:
        newest = max((*self.ready, *self.parts), default=-1)
        return max(self.resolved_outside.end, newest + 1)

    def is_resolved(self, index: int) -> bool:
        return index in self._get_resolved(index)

    def _get_resolved(self, index: int) -> IndexSet:
        return self.resolved if index < FIRST_OUTSIDE else self.resolved_outside

    def add_group(self, record: GroupRecord, place: RecordPlace) -> None:
        """Add a group or a part of one; the first of two with the same index counts."""
        if not isinstance(record, OutsideRecord):
            self.ready.setdefault(record.index, (record, place))
            self.notes.pop(record.index, None)
            return
        self.note_outside(record)
        (self.parts if record.is_part else self.ready).setdefault(record.index, (record, place))

    def note_outside(self, record: OutsideRecord) -> None:
        """Remember a group or part from outside, even a used or rejected one; it replaces its parts."""
        if record.index not in self.outside and record.index >= self.counted_to and not record.is_part:
            self.taken[record.env_id] += 1
        self.outside[record.index] = record
        self.keys.add(record.key)
        for index in record.joins:
            self.parts.pop(index, None)
            self.resolved_outside.add(index)

    def is_open(self, index: int) -> bool:
        """Whether a prompt has neither a group nor a rejection."""
        return index not in self.ready and not self.is_resolved(index)

    def begin_at(self, index: int) -> None:
        """Count all prompts before this one as used."""
        self.resolved.raise_floor(index)
        self.notes = {number: notes for number, notes in self.notes.items() if self.is_open(number)}

    def add_note(self, record: NoteRecord, place: RecordPlace) -> None:
        """Keep a workflow's value for an open prompt; the first of two under one key counts."""
        if self.is_open(record.index):
            self.notes.setdefault(record.index, {}).setdefault(record.key, (record.value, place))

    def add_draw(self, index: int, draw: Draw) -> None:
        """Keep the row of a prompt; the first of two for one index counts."""
        if index not in self.draws:
            self.draws[index] = draw
            self.next_visits[draw.part] = max(draw.visit + 1, self.next_visits.get(draw.part, 0))

    def add_seal(self, seal: Seal) -> None:
        self.seals[seal.step] = seal
        self.rates.update(seal.rates)
        self.staleness.update(seal.staleness)
        self.consumed += len(seal.places)
        self.lineage = max(self.lineage, seal.lineage)
        for index in seal.places:
            self.ready.pop(index, None)
            self.notes.pop(index, None)
            self._get_resolved(index).add(index)

    def reject(self, record: RejectRecord) -> None:
        if record.reason == RejectReason.STALE and (outside := self.outside.get(record.index)):
            self.too_old[outside.env_id] += 1
        self.ready.pop(record.index, None)
        self.notes.pop(record.index, None)
        self._get_resolved(record.index).add(record.index)
        self.rejected[record.index] = record
        self.rejections[record.reason] += 1

    def trim(self, step: int) -> None:
        """Forget batches up to `step` and earlier rejections, except rejections by user code."""
        self.trimmed_rates = self._find_rates(step)
        self.draws = self._find_draws(step)
        self.seals = {number: seal for number, seal in self.seals.items() if number > step}
        self.trimmed = max(self.trimmed, step)
        self.rejected = {record.index: record for record in self._list_remembered(step)}
        kept = {index for seal in self.seals.values() for index in seal.places}
        kept |= self.ready.keys() | self.parts.keys()
        self.outside = {index: record for index, record in self.outside.items() if index in kept}
        self.keys = {record.key for record in self.outside.values()}

    def _list_remembered(self, step: int) -> list[RejectRecord]:
        """Return the rejections that survive a trim of batches up to `step`: later ones, and by user code."""
        by_code = [record.index for record in self.rejected.values() if record.reason in OF_USER_CODE]
        kept = {*by_code[-KEPT_REJECTIONS:]}
        return [record for record in self.rejected.values() if record.index in kept or record.version >= step]

    def _find_rates(self, step: int) -> dict[RowKey, float]:
        """Return the mean reward of each row's latest group in the batches up to `step`."""
        rates = dict(self.trimmed_rates)
        for number, seal in sorted(self.seals.items()):
            if number <= step:
                rates.update(seal.rates)
        return rates

    def _find_draws(self, step: int) -> dict[int, Draw]:
        """Return the draws that survive a trim of batches up to `step`."""
        kept = {index for number, seal in self.seals.items() if number > step for index in seal.places}
        kept |= {record.index for record in self._list_remembered(step)}
        return {
            index: draw for index, draw in self.draws.items() if index in kept or not self.is_resolved(index)
        }

    def summarize(self, step: int) -> dict[str, Any]:
        """Return the content of the base record that replaces all batches up to `step`, and rejections."""
        later = [seal for seal in self.seals.values() if seal.step > step]
        ages = self.staleness.copy()
        for seal in later:
            ages.subtract(seal.staleness)
        return {
            "trimmed": step,
            "consumed": self.consumed - sum(len(seal.places) for seal in later),
            "lineage": self.lineage,
            "rejections": dict(self.rejections),
            "rejected": [astuple(record) for record in self._list_remembered(step)],
            "staleness": dict(+ages),
            "floor": self.resolved.floor,
            "above": sorted(self.resolved.above),
            "renewal": asdict(self.new_batches) if self.new_batches else None,
            "draws": [[index, *astuple(draw)] for index, draw in self._find_draws(step).items()],
            "next_visits": self.next_visits,
            "rates": [[*key, rate] for key, rate in self._find_rates(step).items()],
            "outside": {
                "floor": self.resolved_outside.floor,
                "above": sorted(self.resolved_outside.above),
                "environments": list(self.environments.values()),
                "taken": dict(self.taken),
                "too_old": dict(self.too_old),
                "counted_to": self.next_outside,
            },
        }

    def add_base(self, content: dict[str, Any]) -> None:
        self.trimmed = content["trimmed"]
        self.consumed = content["consumed"]
        self.lineage = max(self.lineage, content["lineage"])
        self.rejections = Counter(content["rejections"])
        self.rejected = {fields[0]: RejectRecord(*fields) for fields in content.get("rejected", [])}
        self.staleness = Counter(content["staleness"])
        self.resolved.raise_floor(content["floor"])
        for index in content["above"]:
            self.resolved.add(index)
        # logs from versions without draws lack them
        for index, *draw in content.get("draws", ()):
            self.add_draw(index, Draw(*draw))
        for part, visit in content.get("next_visits", {}).items():
            self.next_visits[part] = max(visit, self.next_visits.get(part, 0))
        self.trimmed_rates = {(part, row): rate for part, row, rate in content.get("rates", ())}
        self.rates = dict(self.trimmed_rates)
        # logs from versions without groups from outside lack it
        outside = content.get("outside") or {"floor": 0, "above": [], "environments": []}
        self.resolved_outside.raise_floor(outside["floor"])
        for index in outside["above"]:
            self.resolved_outside.add(index)
        self.environments |= {facts["env_id"]: facts for facts in outside["environments"]}
        if outside.get("counted_to", 0) > self.counted_to:
            self.counted_to = outside["counted_to"]
            self.taken = Counter(outside["taken"])
        self.too_old = Counter(outside.get("too_old", {}))


def load_state(folder: Path) -> LogState:
    """Return the state of the trial with this `rollout/`. Raises OSError."""
    records = [record for number in list_segments(folder) for record in load_segment(folder, number)]
    return replay(records, load_seals(folder))


def check_data(folder: Path, state: LogState, path: str, now: dict[str, Any]) -> None:
    """Check that a log still has its original rows: a prompt is identified by its index alone.

    Raises ConfigError, OSError.
    """
    if state.next_index:  # the stored fingerprint stays: a refused start must not change it
        check_same_rows(path, load_fingerprint(folder), now, "its batch log was begun")
    elif now and load_fingerprint(folder) != now:
        folder.mkdir(exist_ok=True)
        write_json(folder / DATA_NAME, now)


def load_fingerprint(folder: Path) -> dict[str, Any]:
    """Return the fingerprint of a log's original rows; {} if unknown."""
    return load_object(folder / DATA_NAME)


def check_replay(folder: Path, step: int) -> None:
    """Raise LedgerDamaged if a batch cut after `step` can't be made again, or the batches can't be read.

    Reads every segment with groups of such a batch.
    """
    seals = [seal for _, seal in sorted(load_seals(folder).items()) if seal.step > step]
    needed = {place.segment for seal in seals for place in seal.places.values()}
    records = [one for number in sorted(needed) for one in load_segment(folder, number)]
    groups = {place for place, record in records if isinstance(record, GroupRecord)}
    for seal in seals:
        lost = [place.segment for place in seal.places.values() if place not in groups]
        if lost:
            path = get_segment_path(folder, lost[0])
            raise LedgerDamaged(f"batch {seal.step} can't be read again: {path} is damaged or missing")


def replay(records: list[tuple[RecordPlace, Record]], seals: dict[int, Seal]) -> LogState:
    """Return the state that results from these records and seals. Pure."""
    state = LogState()
    bases = [record.content for _, record in records if isinstance(record, BaseRecord)]
    state.new_batches = max(
        filter(None, map(_parse_new_batches, bases)), key=lambda one: one.segment, default=None
    )
    new = state.new_batches
    if new is not None:
        bases = [content for content in bases if _parse_new_batches(content) == new]
        records = [(place, record) for place, record in records if place.segment >= new.segment]
        state.set_aside = {step: seal for step, seal in seals.items() if new.sets_aside(seal)}
    for content in sorted(bases, key=lambda content: content["trimmed"]):
        state.add_base(content)
    for step in sorted(step for step in seals.keys() - state.set_aside if step > state.trimmed):
        state.add_seal(seals[step])
    for place, record in records:
        if isinstance(record, EnvironmentRecord):
            state.environments[record.facts["env_id"]] = record.facts
        elif isinstance(record, BaseRecord):
            continue
        elif isinstance(record, DrawRecord):
            state.add_draw(record.index, record.draw)
        elif isinstance(record, NoteRecord):
            state.add_note(record, place)
        elif isinstance(record, OutsideRecord) and state.is_resolved(record.index):
            state.note_outside(record)
        elif state.is_resolved(record.index):
            continue
        elif isinstance(record, RejectRecord):
            state.reject(record)
        else:
            state.add_group(record, place)
    return state


def make_base(state: LogState, new: NewBatches, judged_anew: bool = False) -> dict[str, Any]:
    """Return the content of the base record that begins `new`: the part of `state` that still counts.

    Open again are prompts of dropped batches, prompts rejected after the step that the lineage starts from
    and, with `judged_anew`, prompts rejected by user code, because the code has changed. Dropped groups from
    outside are lost: their environments make new ones.
    """
    again = {
        index: record
        for index, record in state.rejected.items()
        if index < FIRST_OUTSIDE
        and (record.version >= new.after or (judged_anew and record.reason in OF_USER_CODE))
    }
    given_up = (seal for step, seal in state.seals.items() if step > new.after)
    lost = {index for seal in given_up for index in seal.places if index < FIRST_OUTSIDE} | again.keys()
    floor = min([*lost, state.resolved.floor])
    base = state.summarize(state.trimmed)
    return {
        **base,
        "outside": {**base["outside"], "floor": state.next_outside, "above": []},
        "rejections": dict(state.rejections - Counter(record.reason for record in again.values())),
        "rejected": [astuple(one) for index, one in state.rejected.items() if index not in again],
        "floor": floor,
        "above": [i for i in range(floor, state.resolved.end) if i in state.resolved and i not in lost],
        "renewal": asdict(new),
    }


def _parse_new_batches(content: dict[str, Any]) -> NewBatches | None:
    stored = content.get("renewal")
    return NewBatches(**stored) if stored else None
