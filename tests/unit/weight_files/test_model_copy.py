"""The copy on a node: it follows versions in place, and damage leads to a full load or an error."""

import json
import random
import shutil
import threading

import pytest
from version_history import as_bytes, make_history, read_model

from hpc_rl.core.errors import Damaged
from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files.chain import MODEL_FOLDER
from hpc_rl.weight_files.model_copy import WEIGHTS_NAME, ModelCopy


@pytest.fixture(scope="module")
def thirty_versions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history") / "weights"
    return folder, *make_history(folder, 11, 30)


@pytest.fixture
def published(thirty_versions, tmp_path):
    folder, history, indices = thirty_versions
    shutil.copytree(folder, tmp_path / "weights")
    return history, indices


@pytest.fixture
def copy(tmp_path):
    return ModelCopy(tmp_path / "copy", tmp_path / "weights")


def find_whole(indices, last=99):
    return max(version for version, index in indices.items() if index.base is None and version.step <= last)


def damage(path, rng):
    """Flip a bit, cut the end off, or remove a file."""
    content = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "cut", "remove"])
    if kind == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        path.unlink()


def test_it_follows_any_increasing_steps_in_place(published, copy):
    history, indices = published
    rng = random.Random(0)
    wanted = sorted(rng.sample(sorted(history), 12))
    file = None
    for version in wanted:
        assert copy.bring_to(version) > 0
        assert copy.bring_to(version) == 0
        with copy.hold(version) as model:
            assert read_model(model) == as_bytes(history[version]), version
            whole = find_whole(indices, version.step)
            assert (model / "config.json").read_text() == f'"of {whole}"' or version.step > whole.step
            file = file or (model / WEIGHTS_NAME).stat().st_ino
            assert (model / WEIGHTS_NAME).stat().st_ino == file


def test_a_change_that_was_interrupted_is_repeated_from_all_values(published, copy):
    history, _ = published
    copy.bring_to(WeightVersion(0, 20))
    (copy.folder / "state.json").unlink()
    path = copy.model / WEIGHTS_NAME
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    copy.bring_to(WeightVersion(0, 21))
    assert read_model(copy.model) == as_bytes(history[WeightVersion(0, 21)])


def test_after_a_reboot_the_copy_is_not_trusted(published, copy):
    copy.bring_to(WeightVersion(0, 20))
    state = json.loads((copy.folder / "state.json").read_text())
    (copy.folder / "state.json").write_text(json.dumps(state | {"boot": "another"}))
    assert copy.find_version() is None


def test_a_changed_copy_is_replaced_by_a_full_load(published, copy):
    history, indices = published
    version = next(one for one in sorted(indices, reverse=True) if indices[one].base is not None)
    copy.bring_to(indices[version].base)
    path = copy.model / WEIGHTS_NAME
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # in a value, as a bad memory cell would
    path.write_bytes(content)
    copy.bring_to(version)
    assert read_model(copy.model) == as_bytes(history[version])


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_never_give_wrong_weights(published, copy, seed):
    history, _ = published
    rng = random.Random(seed)
    start, target = sorted(rng.sample(sorted(history), 2))
    copy.bring_to(start)
    for _ in range(rng.randint(1, 3)):
        folder = copy.versions / str(rng.choice(sorted(history)))
        if files := sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size):
            damage(rng.choice(files), rng)
    try:
        copy.bring_to(target)
    except Damaged:
        if copy.find_version() is None:
            return
        target = copy.find_version()
    with copy.hold(target) as model:
        assert read_model(model) == as_bytes(history[target])


def test_a_missing_model_folder_is_damage(published, copy):
    _, indices = published
    version = find_whole(indices)
    shutil.rmtree(copy.versions / str(version) / MODEL_FOLDER)
    with pytest.raises(Damaged, match="model is missing"):
        copy.bring_to(version)


def test_a_load_delays_a_change_and_has_only_its_own_version(published, copy):
    copy.bring_to(WeightVersion(0, 5))
    changed = threading.Event()

    def change():
        copy.bring_to(WeightVersion(0, 6))
        changed.set()

    with copy.hold(WeightVersion(0, 5)) as model:
        before = read_model(model)
        thread = threading.Thread(target=change)
        thread.start()
        assert not changed.wait(0.2)
        assert read_model(model) == before
    thread.join()
    with pytest.raises(ValueError, match=r"has version 0\.6, not 0\.5"), copy.hold(WeightVersion(0, 5)):
        pass
    with pytest.raises(ValueError, match=r"newer than 0\.5"):
        copy.bring_to(WeightVersion(0, 5))


def test_a_copy_of_an_adapter_becomes_one_of_a_whole_model_and_back(published, copy, tmp_path):
    """A trial may change what it publishes. Only the files of the newest kind are there."""
    history, indices = published
    wholes = sorted(version for version, index in indices.items() if index.base is None)
    kinds = [False, True, False]
    for version, is_adapter in zip(wholes[:3], kinds, strict=True):
        folder = tmp_path / "weights" / str(version) / MODEL_FOLDER
        if is_adapter:
            (folder / "config.json").rename(folder / "adapter_config.json")
        copy.bring_to(version)
        with copy.hold(version) as model:
            names = {path.name for path in model.iterdir()}
            assert ("adapter_model.safetensors" in names, "adapter_config.json" in names) == (is_adapter,) * 2
            assert (WEIGHTS_NAME in names) != is_adapter
            if not is_adapter:
                assert read_model(model) == as_bytes(history[version])
