"""The history of published weights: its budget, the versions that stay, and the cost of a removal."""

import json
import os
import shutil
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from version_history import make_history, read_model

from hpc_rl.config.load.load import load
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.holds import hold_entry
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files import chain
from hpc_rl.weight_files.chain import VersionIndex, find_rebuildable, load_indices
from hpc_rl.weight_files.model_copy import build_model
from hpc_rl.weights import disk
from hpc_rl.weights.disk import History

WHOLE, PART = 100, 5  # bytes of a version


@pytest.fixture
def trial(tmp_path) -> Trial:
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    return trial


def publish(trial: Trial, step: int, base: int | None, lineage: int = 0, is_current: bool = True) -> None:
    """Write a version whose index says WHOLE or PART bytes."""
    version = WeightVersion(lineage, step)
    folder = trial.published(str(version))
    folder.mkdir()
    size = PART if base else WHOLE
    (folder / "rank-00000.safetensors").write_bytes(bytes(size))
    files = (FileRecord("rank-00000.safetensors", size, ""),)
    VersionIndex(version, WeightVersion(lineage, base) if base else None, files, WHOLE).write(folder)
    if is_current:
        point_to(trial, version)


def point_to(trial: Trial, version: WeightVersion) -> None:
    record = {"label": str(version), "lineage": version.lineage, "step": version.step}
    write_json(trial.current_weights, record | {"path": str(trial.published(str(version)))})


def publish_chains(trial: Trial, *lengths: int) -> None:
    """Publish chains of these lengths, at steps from 1."""
    step = 0
    for length in lengths:
        for i in range(length):
            step += 1
            publish(trial, step, step - 1 if i else None)


def labels(trial: Trial) -> list[str]:
    return sorted((path.name for path in trial.weights.iterdir() if path.is_dir()), key=lambda name: name[2:])


def test_the_budget_is_an_option_of_trials_that_publish():
    common = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d.jsonl", "cluster.n_gpus_per_node=0"]
    grpo = [*common, "actor.path=/m", "gconfig.n_samples=4"]
    for more, expected in (([], 0), (["weights.history_gb=0"], 0), (["weights.history_gb=2.5"], 2.5e9)):
        assert disk.find_history_bytes(load([], [*grpo, *more]).config) == expected
    with pytest.raises(ConfigError, match=r"weights.history_gb .* at least 0"):
        load([], [*grpo, "weights.history_gb=-1"])
    with pytest.raises(ConfigError, match="weights"):
        load([], [*common, "model.path=/m", "weights.history_gb=1"])
    assert disk.find_history_bytes(load([], [*common, "model.path=/m"]).config) == 0


def test_without_a_budget_the_chain_that_servers_need_stays(trial):
    publish_chains(trial, 3, 2, 4)
    assert History(trial).prune([]) == ["0.3", "0.2", "0.1", "0.5", "0.4"]
    assert labels(trial) == ["0.6", "0.7", "0.8", "0.9"]
    assert not trial.weights_history.exists()


def test_a_server_that_is_late_keeps_its_chain(trial):
    publish_chains(trial, 3, 2, 4)
    assert History(trial).prune({"0.2"}) == ["0.3", "0.5", "0.4"]


def test_a_budget_keeps_the_newest_chains_and_their_beginnings(trial):
    publish_chains(trial, 3, 2, 4)
    budget = (WHOLE + 3 * PART) + (WHOLE + PART) + WHOLE
    assert History(trial, budget).prune([]) == ["0.3", "0.2"]
    assert json.loads(trial.weights_history.read_text()) == {
        "num_versions": 7,
        "bytes": budget,
        "steps": [[1, 1], [4, 9]],
    }


def test_needed_versions_may_exceed_the_budget(trial):
    publish_chains(trial, 3, 4)
    assert History(trial, 1.0).prune([]) == ["0.3", "0.2", "0.1"]
    assert labels(trial) == ["0.4", "0.5", "0.6", "0.7"]


def test_each_index_is_read_once(trial, monkeypatch):
    publish_chains(trial, 20)
    history, reads = History(trial, 1e9), []
    real = VersionIndex.read
    monkeypatch.setattr(VersionIndex, "read", lambda folder: reads.append(folder.name) or real(folder))
    history.prune([])
    assert len(reads) == 20
    publish(trial, 21, 20)
    history.prune([])
    assert reads[20:] == ["0.21"]


def test_a_version_that_is_published_again_is_read_again(trial):
    """A difference that a server could not apply is replaced by all values: the chain before it may go."""
    publish_chains(trial, 3)
    history = History(trial)
    assert history.prune([]) == []
    trial.published("0.3").rename(trial.weights / "old")
    publish(trial, 3, None)
    shutil.rmtree(trial.weights / "old")
    publish(trial, 4, 3)
    assert history.prune([]) == ["0.2", "0.1"]


def test_folders_without_an_index_go_once_they_are_old(trial):
    publish_chains(trial, 2, 1)
    for name in ("0.2", "0.3"):
        (trial.published(name) / chain.INDEX_NAME).unlink()
    trial.published("0.9").mkdir()  # newer than the current version
    (trial.weights / ".0.4.tmp").mkdir()  # is being written
    publish(trial, 4, None)
    assert History(trial, 1e9).prune([]) == ["0.3", "0.2"]
    assert (trial.weights / ".0.4.tmp").is_dir() and trial.published("0.9").is_dir()


def test_versions_that_cannot_be_rebuilt_go_except_what_a_server_follows(trial):
    publish_chains(trial, 5, 3)
    shutil.rmtree(trial.published("0.2"))
    assert History(trial, 1e9).prune(["0.4"]) == ["0.5"]
    assert labels(trial) == ["0.1", "0.3", "0.4", "0.6", "0.7", "0.8"]
    assert History(trial, 1e9).prune([]) == ["0.4", "0.3"]


def test_nothing_goes_while_an_index_cannot_be_read(trial, caplog):
    publish_chains(trial, 3, 3)
    path = trial.published("0.4") / chain.INDEX_NAME
    path.rename(path.with_name("kept"))
    path.mkdir()  # reading it fails
    history = History(trial)
    assert history.prune([]) == [] and len(labels(trial)) == 6
    assert "can't be removed yet" in caplog.text
    path.rmdir()
    path.with_name("kept").rename(path)
    assert history.prune([]) == ["0.3", "0.2", "0.1"]


def test_a_version_in_use_stays_and_goes_afterwards(trial):
    publish_chains(trial, 3, 2)
    history = History(trial)
    with hold_entry(trial.weights, "0.2", "export"):
        assert history.prune([]) == ["0.3"]
    assert history.prune([]) == ["0.2", "0.1"]


def test_the_hold_of_a_dead_process_ends(trial):
    publish_chains(trial, 3, 2)
    write_json(trial.weights / ".hold-0.3.abc.json", {"count": 7})
    now = [0.0]
    history = History(trial, clock=lambda: now[0])
    assert history.prune([]) == []
    now[0] = 61.0
    assert history.prune([]) == ["0.3", "0.2", "0.1"]


def test_a_version_that_is_taken_during_a_removal_is_put_back(trial, monkeypatch):
    publish_chains(trial, 3, 2)
    real, taken = os.rename, []

    def rename(source, target):
        if not taken:
            taken.append(source)
            write_json(trial.weights / ".hold-0.2.abc.json", {"count": 0})
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert History(trial).prune([]) == ["0.3"]
    assert labels(trial) == ["0.1", "0.2", "0.4", "0.5"]


def test_a_removal_that_was_killed_leaves_no_part_and_is_finished(trial, monkeypatch):
    publish_chains(trial, 3, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        History(trial).prune([])
    monkeypatch.undo()
    assert {*find_rebuildable(load_indices(trial.weights))} == {WeightVersion(0, 4), WeightVersion(0, 5)}
    History(trial).prune([])
    assert sorted(os.listdir(trial.weights)) == ["0.4", "0.5", "current.json"]


def test_a_trial_that_is_done_keeps_its_history_within_the_budget(trial):
    publish_chains(trial, 3, 2)
    assert disk.drop(trial, WHOLE + PART) > 0
    assert sorted(os.listdir(trial.weights)) == ["0.4", "0.5", "history.json"]
    assert disk.drop(trial) > 0 and not labels(trial)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(data=st.data())
def test_a_needed_version_stays_rebuildable_whatever_happens(tmp_path_factory, data):
    trial = Trial(tmp_path_factory.mktemp("trial"))
    trial.make_dirs()
    budget = data.draw(st.sampled_from([0, 50, 120, 300, 1000]))
    history, step, lineage, base = History(trial, budget), 0, 0, None
    held: set[str] = set()
    for _ in range(data.draw(st.integers(1, 15))):
        step += 1
        if data.draw(st.integers(0, 5)) == 0:  # a recover
            lineage, step, base = lineage + 1, max(1, step - 3), None
        publish(trial, step, base if data.draw(st.integers(0, 3)) else None, lineage)
        base = step
        before = find_rebuildable(load_indices(trial.weights))
        held = {str(one) for one in data.draw(st.sets(st.sampled_from(sorted(before)), max_size=2))}
        if data.draw(st.booleans()):
            history = History(trial, budget)  # another start of the trainer
        removed = set(history.prune(held))
        left = load_indices(trial.weights)
        newest = {str(one) for one in sorted(before)[-disk.KEEP :]}
        needed = {version for version in before if str(version) in held | newest}
        assert needed <= find_rebuildable(left) == left.keys()
        assert not removed & (held | newest)
        total = sum(index.stored_bytes for index in left.values())
        needed_bytes = sum(
            index.stored_bytes
            for index in {
                one.version: one for version in needed for one in chain.load_chain(trial.weights, version)
            }.values()
        )
        assert total <= max(budget, needed_bytes)


def test_real_versions_are_rebuilt_after_each_removal(trial, tmp_path):
    weights, indices = make_history(trial.weights, 11, 25)
    point_to(trial, WeightVersion(0, 25))
    total = sum(index.stored_bytes for index in indices.values())
    for share in (0.8, 0.5, 0.2, 0.0):
        History(trial, share * total).prune(["0.12"])
        for version in find_rebuildable(load_indices(trial.weights)):
            target = tmp_path / f"{share}-{version}"
            target.mkdir()
            chain_of = chain.load_chain(trial.weights, version)
            build_model(target, trial.weights, chain_of)
            assert read_model(target) == {name: one.tobytes() for name, one in weights[version].items()}


def test_a_removal_among_thousands_of_versions_is_cheap(trial):
    """Of 2,000 kept versions only the new one is read. The limit is generous: a busy machine is slow."""
    for start in range(1, 2001, 50):
        for step in range(start, start + 50):
            publish(trial, step, step - 1 if step > start else None, is_current=False)
    history = History(trial, 1e9)
    history.prune([])
    publish(trial, 2001, None)
    begun = time.process_time()
    assert history.prune([]) == []
    assert time.process_time() - begun < 1.0
