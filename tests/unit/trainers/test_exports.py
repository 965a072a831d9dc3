"""Exports: whole under their names whatever is killed, and what becomes of them on a full disk."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from training import FakeEngine, Starter

from hpc_rl.config.options.operations import SaverConfig
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import load_json
from hpc_rl.trainers import exports


class Killed(BaseException):
    """kill -9"""


def kill() -> None:
    raise Killed


@pytest.fixture
def starter(tmp_path):
    return Starter(tmp_path)


@pytest.fixture
def full_disk(starter, monkeypatch):
    """Exports fail while there is no room; what happens at the n-th try is a test's to say."""
    monkeypatch.setattr("hpc_rl.core.files.PAUSE_S", (0.001, 0.001))
    disk = SimpleNamespace(room=True, tries=0, at={})
    write = FakeEngine.export

    def export(self, folder, tokenizer=None):
        if not disk.room:
            disk.tries += 1
            (folder / "half").write_text("half")
            disk.at.get(disk.tries, lambda: None)()
        if not disk.room:
            raise OSError(28, "No space left on device")
        write(self, folder, tokenizer)

    monkeypatch.setattr(FakeEngine, "export", export)
    return disk


def test_on_a_full_disk_the_final_export_waits_for_room(starter, full_disk, caplog):
    full_disk.room, full_disk.at = False, {3: lambda: setattr(full_disk, "room", True)}
    code, recipe = starter(4)
    assert code == ExitCode.DONE and recipe.trained == [1, 2, 3, 4]
    assert sorted(path.name for path in starter.trial.exports.iterdir()) == ["final"]
    assert json.loads((starter.trial.exports / "final" / "model.json").read_text()) == 10
    assert caplog.text.count("DISK FULL: exports/final can't be written") == 1
    assert "exports/final is written" in caplog.text


def test_a_stop_while_the_final_export_waits_leaves_it_to_the_next_start(starter, full_disk):
    full_disk.room, full_disk.at = False, {2: lambda: starter.last.stopping.set()}
    assert starter(4)[0] == ExitCode.STOPPED
    assert list(starter.trial.exports.iterdir()) == []
    starter.end(75)
    full_disk.room = True
    code, recipe = starter(4)
    assert code == ExitCode.DONE and recipe.trained == []
    assert json.loads((starter.trial.exports / "final" / "model.json").read_text()) == 10


def test_a_periodic_export_that_finds_no_room_is_left_out_loudly(starter, full_disk, caplog):
    starter.config.saver = SaverConfig(freq_steps=2)
    fill, empty = (lambda: setattr(full_disk, "room", False)), (lambda: setattr(full_disk, "room", True))
    code, recipe = starter(5, {2: fill, 3: empty})
    assert code == ExitCode.DONE and recipe.trained == [1, 2, 3, 4, 5]
    assert "EXPORT FAILED: the disk has no room for step-00000002" in caplog.text
    assert sorted(path.name for path in starter.trial.exports.iterdir()) == ["final", "step-00000004"]


@pytest.mark.parametrize("cut", range(1, 8))
def test_an_export_killed_at_any_instant_is_whole_after_the_next_start(starter, monkeypatch, cut):
    """The final export of a longer training takes the place of the one before; it is killed before its n-th
    change of names.
    """
    starter(3)
    starter.end(0)
    count = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal count
            count += starter.trial.exports in Path(args[0]).parents
            if count == cut:
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for name in ("rename", "rmdir"):
            patched.setattr(f"os.{name}", counted(getattr(os, name)))
        patched.setattr("shutil.rmtree", counted(shutil.rmtree))
        try:
            starter(5)
        except Killed:
            starter.end(137)
    names = {path.name for path in starter.trial.exports.iterdir() if not path.name.startswith(".")}
    assert names <= {"final"}
    for path in [starter.trial.exports / name for name in names]:  # what has the name is whole
        assert {one.name for one in path.iterdir()} == {"model.json", "hpc_rl.json"}
    exports.repair(starter.trial.exports)
    assert [path.name for path in starter.trial.exports.iterdir()] == ["final"]
    final = starter.trial.exports / "final"
    found = json.loads((final / "model.json").read_text()), load_json(final / "hpc_rl.json")["step"]
    assert found in ((6, 3), (15, 5))


def test_an_export_that_goes_is_never_seen_in_half(tmp_path, monkeypatch):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "model.json").write_text("1")
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: kill() if Path(path).exists() else None)
    with pytest.raises(Killed):
        exports.remove(folder)
    assert not folder.exists()
    monkeypatch.undo()
    exports.repair(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_person_exports_meanwhile_is_left_alone_by_a_start(starter):
    theirs = starter.trial.exports / ".checkpoint-00000003.tmp"
    theirs.mkdir()
    starter(1)
    assert theirs.is_dir()


def test_the_newest_exports_are_kept(tmp_path):
    folder = tmp_path / "exports"
    for name in ("step-00000001", "step-00000002", "step-00000010", "final"):
        (folder / name).mkdir(parents=True)
    exports.drop_old_exports(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["final", "step-00000002", "step-00000010"]
    exports.drop_old_exports(folder, None)
    assert len(list(folder.iterdir())) == 3
