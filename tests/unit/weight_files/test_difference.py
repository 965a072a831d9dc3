"""Differences: after any changes, applying them to the earlier version gives the later one, byte for byte."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hpc_rl.core import checked_file
from hpc_rl.core.errors import Damaged
from hpc_rl.weight_files import rank_file
from hpc_rl.weight_files.difference import Rectangle, apply_changes, find_changes
from hpc_rl.weight_files.rank_file import compare

MAX_GAP = 0xFFFF


def whole_of(shape, dtype="BF16", seed=0):
    rectangle = Rectangle("w", dtype, (0,) * len(shape), tuple(shape), tuple(shape))
    high = np.iinfo(rectangle.word).max
    values = np.random.default_rng(seed).integers(0, high, rectangle.num_values, rectangle.word)
    return rectangle, values


def changed(values, share, seed=1):
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(len(values)) < share)
    after = values.copy()
    after[positions] ^= rng.integers(1, np.iinfo(values.dtype).max, len(positions), values.dtype)
    return after


def test_by_hand():
    before = np.array([7, 7, 7, 7, 7, 7], np.uint16)
    after = np.array([7, 8, 7, 7, 9, 7], np.uint16)
    changes = find_changes(before, after)
    assert changes.gaps.tolist() == [1, 2] and changes.gaps.dtype == np.uint8
    assert changes.values.tolist() == [8, 9]
    assert changes.positions().tolist() == [1, 4]
    assert changes.nbytes == 6


def test_negative_zero_and_nan_are_compared_by_their_bits():
    before = np.array([0.0, np.nan, 1.0], np.float32).view(np.uint32)
    after = np.array([-0.0, np.nan, 1.0], np.float32).view(np.uint32)
    assert find_changes(before, after).positions().tolist() == [0]


@pytest.mark.parametrize("position", [MAX_GAP, MAX_GAP + 1, 3 * MAX_GAP + 2, 3 * MAX_GAP + 3, 400_000])
def test_a_long_gap_stores_unchanged_values_in_between(position):
    rectangle, before = whole_of([400_001])
    after = before.copy()
    after[position] ^= 1
    changes = find_changes(before, after)
    assert len(changes.gaps) == 1 + position // (MAX_GAP + 1)
    target = before.copy()
    apply_changes(rectangle, changes, target)
    assert target.tobytes() == after.tobytes()


@pytest.mark.parametrize("share", [0.001, 0.004, 0.01, 0.1])
def test_the_smaller_type_of_gaps_is_stored(share, tmp_path):
    rectangle, before = whole_of([1000, 1000])
    after = changed(before, share)
    stored = compare(rectangle, before, after)
    assert stored.changes.gaps.itemsize == (1 if share >= 0.01 else 2)
    assert stored.nbytes < 4.01 * np.count_nonzero(before != after)
    record = rank_file.write(tmp_path / "rank-00000.safetensors", 0, [stored])
    (back,) = rank_file.load(tmp_path / record.name, 0, record)
    back.apply(before)
    assert before.tobytes() == after.tobytes()


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    data=st.data(),
    share=st.sampled_from([0, 0.01, 0.3, 1]),
    dtype=st.sampled_from(["BF16", "F32", "F8_E4M3", "F64"]),
)
def test_any_rectangle_of_any_tensor(shape, data, share, dtype):
    tensor, before = whole_of(shape, dtype)
    cuts = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    part = replace(tensor, offset=tuple(a for a, _ in cuts), shape=tuple(b - a for a, b in cuts))
    after = before.copy()
    view = part.view(after)
    view[...] = changed(np.ascontiguousarray(view).reshape(-1), share).reshape(view.shape)

    def flat(values):
        return np.ascontiguousarray(part.view(values)).reshape(-1)

    stored = compare(part, flat(before), flat(after))
    target = before.copy()
    stored.apply(target)
    assert target.tobytes() == after.tobytes()
    stored.apply(target)  # again, as after a kill
    assert target.tobytes() == after.tobytes()


def test_dense_changes_are_stored_whole():
    rectangle, before = whole_of([1000])
    assert not compare(rectangle, before, changed(before, 0.3)).is_whole
    assert compare(rectangle, before, changed(before, 0.7)).is_whole
    assert compare(rectangle, None, before).is_whole


def test_the_wrong_version_before_is_noticed():
    rectangle, before = whole_of([1000])
    stored = compare(rectangle, before, changed(before, 0.01))
    with pytest.raises(Damaged, match="differs from the published one"):
        stored.apply(changed(before, 0.01, seed=5))


def write_two(folder):
    """A file with a rectangle that is whole, one that changed, and one that did not; and its record."""
    dense, values = whole_of([40, 50])
    sparse = replace(dense, name="s", offset=(10, 5), shape=(20, 30))
    part = np.ascontiguousarray(sparse.view(values)).reshape(-1)
    stored = [compare(dense, None, values), compare(sparse, part, changed(part, 0.02))]
    stored.append(compare(replace(dense, name="same"), values, values))
    return stored, rank_file.write(folder / "rank-00003.safetensors", 3, stored)


def test_a_file_returns_what_was_written(tmp_path):
    stored, record = write_two(tmp_path)
    back = list(rank_file.load(tmp_path / record.name, 3, record))
    assert [one.rectangle for one in back] == [one.rectangle for one in stored]
    assert [one.is_whole for one in back] == [True, False, False]
    for one, other in zip(stored, back, strict=True):
        assert one.xxh3 == other.xxh3 and one.values.tobytes() == other.values.tobytes()
        assert one.nbytes == other.nbytes
    assert back[1].changes.gaps.tobytes() == stored[1].changes.gaps.tobytes()


def test_safetensors_reads_the_file(tmp_path):
    stored, record = write_two(tmp_path)
    with safe_open(tmp_path / record.name, framework="pt") as opened:
        assert sorted(opened.keys()) == ["0.values", "1.gaps", "1.values"]
        described = json.loads(opened.metadata()["version"])
        assert [one["name"] for one in described["rectangles"]] == ["w", "s", "same"]
        assert opened.get_tensor("1.gaps").tolist() == stored[1].changes.gaps.tolist()
        assert str(opened.get_tensor("0.values").dtype) == "torch.bfloat16"


def test_every_flipped_byte_is_noticed(tmp_path):
    _, record = write_two(tmp_path)
    path = tmp_path / record.name
    content = path.read_bytes()
    for at in range(0, len(content), 97):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(Damaged):
            list(rank_file.load(path, 3, record))
    path.write_bytes(content[:-1])
    with pytest.raises(Damaged):
        list(rank_file.load(path, 3, record))


def test_without_a_record_a_flipped_value_is_noticed_by_the_checksum_of_the_rectangle(tmp_path):
    _, record = write_two(tmp_path)
    path = tmp_path / record.name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in a value of the second rectangle
    path.write_bytes(content)
    _, values = whole_of([40, 50])
    back = list(rank_file.load(path, 3, None))
    back[0].apply(values)
    with pytest.raises(Damaged, match="differs from the published one"):
        back[1].apply(values.copy())
    assert checked_file.record(path) != record


@pytest.mark.parametrize("rank", [0, 4])
def test_the_file_of_another_rank_is_refused(tmp_path, rank):
    _, record = write_two(tmp_path)
    with pytest.raises(Damaged, match="rank 3 in format 1, expected: rank"):
        list(rank_file.load(tmp_path / record.name, rank, record))
