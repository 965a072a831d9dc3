"""Chains: any version of a random history is rebuilt byte for byte, and pruning never breaks a needed one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from version_history import SHAPES, as_bytes, make_history, read_model

from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.errors import Damaged
from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files.chain import (
    INDEX_NAME,
    VersionIndex,
    choose_removable,
    find_rebuildable,
    load_chain,
    load_indices,
    load_rank,
)
from hpc_rl.weight_files.model_copy import WEIGHTS_NAME, ModelFile, build_model


def test_every_version_of_a_random_chain_of_fifty(tmp_path):
    history, indices = make_history(tmp_path, 7, 50)
    assert find_rebuildable(indices) == set(history)
    for version, weights in history.items():
        target = tmp_path / f"model-{version}"
        target.mkdir()
        build_model(target, tmp_path, load_chain(tmp_path, version))
        assert read_model(target) == as_bytes(weights), version
        places = ModelFile(target / WEIGHTS_NAME).places
        assert {name: place.shape for name, place in places.items()} == SHAPES
    assert load_indices(tmp_path) == indices


def test_a_chain_starts_with_the_newest_whole_version(tmp_path):
    _, indices = make_history(tmp_path, 3, 30)
    for version in indices:
        first, *rest = load_chain(tmp_path, version)
        assert first.base is None
        assert all(index.base is not None for index in rest)
        assert (rest or [first])[-1].version == version


def test_a_damaged_or_missing_file_is_named(tmp_path):
    _, indices = make_history(tmp_path, 5, 3)
    version = WeightVersion(0, 3)
    record = indices[version].files[0]
    path = tmp_path / "0.3" / record.name
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 64]) + content[-2:])
    with pytest.raises(Damaged, match=record.name):
        build_model(tmp_path, tmp_path, load_chain(tmp_path, version))
    path.unlink()
    with pytest.raises(Damaged, match=f"0.3/{record.name} is missing"):
        list(load_rank(tmp_path / "0.3", indices[version], 0))
    (tmp_path / "0.2" / INDEX_NAME).unlink()
    with pytest.raises(Damaged, match=r"0\.2 is missing, incomplete or damaged \(weights 0\.3 need it\)"):
        load_chain(tmp_path, version)


def test_an_index_is_read_as_it_was_written_and_anything_else_is_no_version(tmp_path):
    _, indices = make_history(tmp_path, 5, 2)
    folder = tmp_path / "0.2"
    assert VersionIndex.read(folder) == indices[WeightVersion(0, 2)]
    content = json.loads((folder / INDEX_NAME).read_text())
    for change in ({"format": 99}, {"files": [1]}, {"version": "x"}, {"base": 7}, {"whole_bytes": None}):
        (folder / INDEX_NAME).write_text(json.dumps(content | change))
        assert VersionIndex.read(folder) is None, change
    (folder / INDEX_NAME).write_text("[")
    assert VersionIndex.read(folder) is None
    assert VersionIndex.read(tmp_path / "9.9") is None


def index_of(step, base, size):
    files = (FileRecord("rank-00000.safetensors", size, ""),)
    version = WeightVersion(0, step)
    return version, VersionIndex(version, WeightVersion(0, base) if base else None, files, 100)


def steps(versions):
    return [version.step for version in versions]


def test_the_oldest_chain_goes_first_and_its_newest_version_before_the_others():
    indices = dict(index_of(*one) for one in [(1, 0, 100), (2, 1, 5), (3, 2, 5), (4, 0, 100), (5, 4, 5)])
    newest = WeightVersion(0, 5)
    assert steps(choose_removable(indices, {newest}, 215)) == []
    assert steps(choose_removable(indices, {newest}, 211)) == [3]
    assert steps(choose_removable(indices, {newest}, 150)) == [3, 2, 1]
    assert steps(choose_removable(indices, {newest}, 0)) == [3, 2, 1]
    assert steps(choose_removable(indices, {newest, WeightVersion(0, 2)}, 0)) == [3]
    assert steps(choose_removable(indices, set(), 0)) == [3, 2, 1, 5, 4]


@given(
    bases=st.lists(st.booleans(), min_size=1, max_size=20),
    needed=st.sets(st.integers(1, 20)),
    budget=st.integers(0, 500),
    gone=st.sets(st.integers(1, 20), max_size=3),
)
def test_pruning_never_breaks_a_needed_version(bases, needed, budget, gone):
    indices = dict(
        index_of(step, 0 if whole or step == 1 else step - 1, 100 if whole else 5)
        for step, whole in enumerate(bases, 1)
        if step not in gone
    )
    before = find_rebuildable(indices)
    wanted = {WeightVersion(0, step) for step in needed}
    removed = set(choose_removable(indices, wanted, budget))
    left = {version: index for version, index in indices.items() if version not in removed}
    assert find_rebuildable(left) >= before & wanted
    assert find_rebuildable(left) == before - removed
    assert not removed & wanted
    total = sum(index.stored_bytes for index in left.values())
    assert total <= budget or all(
        version in wanted or any(index.base == version for index in left.values()) for version in left
    )
