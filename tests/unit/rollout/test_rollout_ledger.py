"""Ledger, seals and what they amount to: torn tails, damage, two owners, trimming."""

import errno
import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.core.types import Batch, Trajectory, TrajectoryGroup, decode, encode
from hpc_rl.rollout.batch_log.ledger import (
    FRAME,
    MAGIC,
    GroupRecord,
    Ledger,
    LedgerDamaged,
    NoteRecord,
    RecordPlace,
    RejectRecord,
    get_segment_path,
    list_segments,
    load_segment,
)  # fmt: skip
from hpc_rl.rollout.batch_log.replay import KEPT_REJECTIONS, IndexSet, load_state, replay
from hpc_rl.rollout.batch_log.seals import Batches, encode_batch, load_seals


def record(index: int, oldest: int = 0) -> GroupRecord:
    return GroupRecord(index, oldest, oldest, 0, 2, 24, 1.5)


def group(index: int) -> TrajectoryGroup:
    ids = np.arange(5, dtype=np.int32)
    mask = ids > 2
    steps = np.where(mask, 3, -1).astype(np.int32)
    made = Trajectory(ids, mask, np.zeros(5, np.float32), steps, steps, 0.5, "stop", {"x": 1.0})
    return TrajectoryGroup(index, [made, made])


def test_records_come_back_as_they_were_written(tmp_path):
    ledger = Ledger(tmp_path)
    reject, note = RejectRecord(8, 3, "reward_timeout: é"), NoteRecord(9, "baseline/é", b"\x00answers")
    places = [
        ledger.append_group(record(7), b"tokens"),
        ledger.append_reject(reject),
        ledger.append_note(note),
    ]
    assert list(load_segment(tmp_path, 0)) == []  # nothing is promised before the commit
    ledger.commit()
    expected = list(zip(places, [record(7), reject, note], strict=True))
    assert list(load_segment(tmp_path, 0)) == expected
    assert ledger.fetch_group(places[0]) == b"tokens"
    ledger.close()


@pytest.mark.parametrize("last_is", ["group", "note"])
def test_a_tail_torn_at_any_byte_costs_the_last_record_only(tmp_path, last_is):
    ledger = Ledger(tmp_path / "whole")
    for index in range(2):
        ledger.append_group(record(index), b"tokens" * 5)
    if last_is == "group":
        ledger.append_group(record(2), b"tokens" * 5)
    else:
        ledger.append_note(NoteRecord(2, "probe", b"approach"))
    ledger.close()
    path = get_segment_path(tmp_path / "whole", 0)
    whole = path.read_bytes()
    last = [place.offset for place, _ in load_segment(tmp_path / "whole", 0)][-1]
    cut = [whole[:size] for size in range(last, len(whole))]
    flipped = [whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in range(last, len(whole))]
    for content in (*cut, *flipped):
        path.write_bytes(content)
        assert [r.index for _, r in load_segment(tmp_path / "whole", 0)] == [0, 1]
    for size in range(len(MAGIC)):
        path.write_bytes(whole[:size])
        assert list(load_segment(tmp_path / "whole", 0)) == []


def test_each_incarnation_has_its_own_segment_and_a_full_one_is_followed(tmp_path):
    first, second = Ledger(tmp_path), Ledger(tmp_path, segment_bytes=100)
    assert (first.segment, second.segment) == (0, 1)
    places = [second.append_group(record(index), b"x" * 60) for index in range(3)]
    assert len({place.segment for place in places}) > 1
    second.commit()
    assert [second.fetch_group(place) for place in places] == [b"x" * 60] * 3
    assert list_segments(tmp_path) == list(range(max(place.segment for place in places) + 1))
    first.close()
    second.close()


def test_a_segment_begun_during_a_sync_can_be_written(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, segment_bytes=100)
    ledger.append_group(record(0), b"x" * 100)
    sync, later = os.fsync, []

    def slow_sync(fd: int) -> None:
        if not later:
            later.append(None)
            later[0] = ledger.append_group(record(1), b"later")  # full: begins the next segment
        sync(fd)

    monkeypatch.setattr("hpc_rl.rollout.batch_log.ledger.os.fsync", slow_sync)
    ledger.commit()
    assert later[0].segment == 1
    ledger.commit()
    assert ledger.fetch_group(later[0]) == b"later"
    ledger.close()


def test_what_a_sync_finds_no_room_for_is_written_once_more_and_only_once(tmp_path, monkeypatch):
    """As network file systems have it: the bytes seem to be written, the sync tells of the quota, and forgets
    them.
    """
    monkeypatch.setattr("hpc_rl.core.files.PAUSE_S", (0.01, 0.01))
    ledger = Ledger(tmp_path)
    ledger.append_group(record(0), b"before")
    ledger.commit()
    size, sync, tries = get_segment_path(tmp_path, 0).stat().st_size, os.fsync, []

    def no_room(fd: int) -> None:
        if len(tries) < 2:
            tries.append(fd)
            os.ftruncate(fd, size + 3 * len(tries))
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        sync(fd)

    monkeypatch.setattr("hpc_rl.rollout.batch_log.ledger.os.fsync", no_room)
    place = ledger.append_group(record(1), b"x" * 100)
    ledger.commit()
    ledger.append_group(record(2), b"after")
    ledger.close()
    assert len(tries) == 2 and not ledger.room.waiting
    written = [(there.offset, r.index) for there, r in load_segment(tmp_path, 0)]
    assert [index for _, index in written] == [0, 1, 2] and written[1][0] == place.offset


def test_a_damaged_group_is_never_given_out(tmp_path):
    ledger = Ledger(tmp_path)
    place = ledger.append_group(record(1), b"tokens")
    ledger.commit()
    with get_segment_path(tmp_path, 0).open("r+b") as file:
        file.seek(place.offset + FRAME.size + 40)
        file.write(b"!")
    for where in (place, RecordPlace(0, place.offset + 3), RecordPlace(0, 10_000), RecordPlace(5, 16)):
        with pytest.raises(LedgerDamaged):
            ledger.fetch_group(where)
    ledger.close()


def test_a_segment_that_was_removed_is_named(tmp_path):
    ledger = Ledger(tmp_path)
    place = ledger.append_group(record(1), b"tokens")
    ledger.close()
    get_segment_path(tmp_path, 0).unlink()
    for content in (None, b""):  # gone, and begun anew by the next role
        if content is not None:
            get_segment_path(tmp_path, 0).write_bytes(content)
        again = Ledger(tmp_path)
        with pytest.raises(LedgerDamaged, match=r"^rollout/segment-0000.ledger is missing or truncated"):
            again.fetch_group(place)
        again.close()


def test_batch_bytes_are_what_encode_gives():
    groups = [group(4), group(9)]
    body = encode_batch(3, [encode(g) for g in groups])
    assert body == encode(Batch(3, groups))
    assert decode(body).groups[1].index == 9
    assert encode_batch(300, []) == encode(Batch(300, []))


def test_the_first_seal_wins_and_the_other_service_reads_what_won(tmp_path):
    one, two = Ledger(tmp_path), Ledger(tmp_path)
    a = one.append_group(record(0), encode(group(0)))
    b = two.append_group(record(1), encode(group(1)))
    seal, body, ours = Batches(tmp_path, one).seal(1, 1, {0: (record(0), a)}, {})
    assert ours and seal.staleness == {0: 1} and seal.counters == {"older_lineage": 1}
    other, other_body, others = Batches(tmp_path, two).seal(1, 1, {1: (record(1), b)}, {})
    assert not others and other == seal and other_body == body
    assert load_seals(tmp_path) == {1: seal}
    one.close()
    two.close()


def test_a_seal_over_a_segment_that_a_later_owner_deleted_is_refused(tmp_path):
    ledger = Ledger(tmp_path)
    place = ledger.append_group(record(0), encode(group(0)))
    ledger.commit()
    get_segment_path(tmp_path, 0).unlink()
    with pytest.raises(LedgerDamaged):
        Batches(tmp_path, ledger).seal(1, 0, {0: (record(0), place)}, {})
    assert load_seals(tmp_path) == {}
    ledger.close()


def test_a_seal_outranks_rejections_and_the_first_record_later_ones():
    places = [RecordPlace(0, i) for i in range(8)]
    records = [
        (places[0], record(0)),
        (places[1], RejectRecord(0, 5, "stale")),  # a group that got too old
        (places[2], RejectRecord(1, 5, "workflow_none")),
        (places[3], record(1)),  # by a second owner, too late
        (places[4], record(2)),
        (places[5], record(2, oldest=4)),
    ]
    state = replay(records, {})
    assert {i: record.reason for i, record in state.rejected.items()} == {0: "stale", 1: "workflow_none"}
    assert state.ready == {2: (record(2), places[4])}
    assert state.next_index == 3
    # A trim leaves the newest rejections by user code.
    many = range(10, 10 + KEPT_REJECTIONS)
    state.rejected |= {index: RejectRecord(index, 5, "workflow_none") for index in many}
    base = state.summarize(6)
    state.trim(6)
    assert [one[0] for one in base["rejected"]] == list(state.rejected) == [*many]


def test_notes_count_until_their_prompt_is_resolved_the_first_of_a_key():
    places = [RecordPlace(i // 4, i) for i in range(9)]
    records = [
        NoteRecord(0, "probe", b"zero"),
        record(0),
        NoteRecord(1, "probe", b"one"),
        RejectRecord(1, 5, "workflow_none"),
        NoteRecord(2, "probe", b"first"),
        NoteRecord(2, "probe", b"second"),
        NoteRecord(2, "baseline", b"answers"),
        NoteRecord(0, "probe", b"too late"),
        NoteRecord(1, "probe", b"too late"),
    ]
    state = replay(list(zip(places, records, strict=True)), {})
    assert state.notes == {2: {"probe": (b"first", places[4]), "baseline": (b"answers", places[6])}}


@given(st.lists(st.integers(0, 30)), st.integers(0, 10))
@settings(max_examples=100)
def test_index_set_is_a_set(members, floor):
    mine, real = IndexSet(), set()
    for index in members:
        mine.add(index)
        real.add(index)
    mine.raise_floor(floor)
    real |= set(range(floor))
    assert [index in mine for index in range(40)] == [index in real for index in range(40)]
    assert mine.floor == next(i for i in itertools.count() if i not in real)
    assert mine.end == max(real, default=-1) + 1


def test_an_empty_folder_is_an_empty_state(tmp_path):
    state = load_state(tmp_path / "none")
    assert (state.top, state.next_index, state.consumed) == (0, 0, 0)
