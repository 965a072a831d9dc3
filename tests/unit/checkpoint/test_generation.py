import json
import os

import pytest

from hpc_rl.checkpoint import generation, retention
from hpc_rl.checkpoint.generation import Commit, Manifest, check, clear_leftovers, move_aside, scan, verify
from hpc_rl.checkpoint.retention import RetentionPolicy, hold, retain
from hpc_rl.core import checked_file
from hpc_rl.core.errors import RoleFailed, TrialStateError
from hpc_rl.core.trial import Trial


def facts(step: int, lineage: int = 0, num_ranks: int = 2) -> Manifest:
    who = {"attempt": "7.0", "incarnation": 0, "submission": "7", "version": f"{lineage}.{step}"}
    timers = {"save": {"steps": 1, "epochs": 0, "secs": 0.5}}
    return Manifest(step=step, lineage=lineage, num_ranks=num_ranks, config_hash="abc", timers=timers, **who)


def save(trial: Trial, step: int, lineage: int = 0, num_ranks: int = 2) -> Manifest:
    commit = Commit(trial, step, f"{7 + lineage}.0", 0)
    commit.begin()
    for rank in range(num_ranks):
        (commit.folder / f"shard-{rank}.bin").write_bytes(bytes([step, rank]) * 100)
        commit.record_rank(rank, [checked_file.record(commit.folder / f"shard-{rank}.bin")])
    return commit.commit(facts(step, lineage, num_ranks))


@pytest.fixture
def trial(tmp_path):
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    return trial


def steps(trial: Trial) -> list[int]:
    return [found.step for found in map(verify, scan(trial)) if not found.problem]


def test_a_commit_is_found_again_with_all_it_said(trial):
    written = save(trial, 12)
    (found,) = map(verify, scan(trial))
    assert (found.step, found.problem, found.manifest) == (12, "", written)
    assert {file.name for file in written.files} == {"shard-0.bin", "shard-1.bin", "rank_0.ok", "rank_1.ok"}


class Cut(BaseException):
    """The process dies here."""


POINTS = ["mkdir", "engine", "first_ok", "second_ok", "gather", "manifest", "rename", "renamed"]


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_stage_leaves_the_old_generations_or_also_the_new(trial, monkeypatch, point):
    save(trial, 3)

    def cut(*_args, **_kwargs):
        raise Cut

    commit = Commit(trial, 4, "7.1", 0)
    with pytest.raises(Cut):
        commit.begin()
        if point == "mkdir":
            cut()
        for rank in range(2):
            (commit.folder / f"shard-{rank}.bin").write_bytes(b"new" * 50)
            if point == "engine":
                cut()
            if point == ("first_ok", "second_ok")[rank]:
                monkeypatch.setattr(generation, "write_json", cut)
            commit.record_rank(rank, [checked_file.record(commit.folder / f"shard-{rank}.bin")])
        if point == "gather":
            monkeypatch.setattr(Commit, "_gather", cut)
        elif point == "manifest":
            monkeypatch.setattr(generation, "write_atomic", cut)
        elif point == "rename":
            monkeypatch.setattr(generation.os, "rename", cut)
        elif point == "renamed":
            real = os.rename

            def then_cut(*args):
                real(*args)
                raise Cut

            monkeypatch.setattr(generation.os, "rename", then_cut)
        commit.commit(facts(4))
    monkeypatch.undo()
    assert steps(trial) == ([4, 3] if point == "renamed" else [3])
    assert [found for found in scan(trial) if found.problem] == []
    clear_leftovers(trial)
    assert not [entry for entry in os.listdir(trial.recover) if entry.startswith(".")]
    save(trial, 5)
    assert steps(trial)[0] == 5


def test_a_bit_flip_in_any_file_is_detected(trial):
    save(trial, 3)
    folder = trial.generation(3)
    names = sorted(os.listdir(folder))
    assert names == ["manifest.json", "rank_0.ok", "rank_1.ok", "shard-0.bin", "shard-1.bin"]
    for name in names:
        good = (folder / name).read_bytes()
        for at in {0, len(good) // 3, len(good) - 2}:
            bad = bytearray(good)
            bad[at] ^= 1
            (folder / name).write_bytes(bad)
            assert verify(check(folder)).problem, (name, at)
        (folder / name).write_bytes(good)
    assert verify(check(folder)).problem == ""


@pytest.mark.parametrize(
    "spoil", [lambda raw: raw[:-1], lambda raw: bytes(len(raw)), lambda raw: raw[:200], lambda raw: b""]
)
def test_a_manifest_that_is_not_what_was_written_is_called_damaged(trial, spoil):
    save(trial, 3)
    path = trial.generation(3) / "manifest.json"
    path.write_bytes(spoil(path.read_bytes()))
    assert check(trial.generation(3)).problem.startswith("manifest.json: it is damaged: ")


def test_what_is_of_the_wrong_kind_is_passed_over_and_never_waited_for(trial):
    """A pipe that is opened waits for a writer, for ever."""
    for step in (3, 4, 5):
        save(trial, step)
    (trial.generation(4) / "manifest.json").unlink()
    os.mkfifo(trial.generation(4) / "manifest.json")
    (trial.generation(5) / "shard-1.bin").unlink()
    os.mkfifo(trial.generation(5) / "shard-1.bin")
    trial.generation(6).write_text("a file")
    trial.generation(7).symlink_to(trial.generation(7).name)
    problems = {found.step: verify(found).problem for found in scan(trial)}
    assert problems[3] == "" and problems[4] == "manifest.json: it is not a regular file"
    assert problems[5] == "shard-1.bin is not a regular file"
    assert all(problems.values()) is False and problems[6] and problems[7]


@pytest.mark.parametrize("kind", ["file", "loop", "dangling"])
def test_nothing_starts_if_the_place_of_generations_is_not_a_folder(trial, kind):
    trial.recover.rmdir()
    if kind == "file":
        trial.recover.write_text("")
    else:
        trial.recover.symlink_to("recover" if kind == "loop" else "unmounted")
    with pytest.raises(TrialStateError, match=r"recover must be a folder"):
        scan(trial)


def test_missing_and_short_files_are_named_without_reading_content(trial):
    save(trial, 3)
    shard = trial.generation(3) / "shard-1.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert check(trial.generation(3)).problem == "shard-1.bin has 199 bytes, 200 were written"
    shard.unlink()
    assert check(trial.generation(3)).problem == "shard-1.bin is missing"


def test_a_rank_that_did_not_finish_stops_the_commit(trial):
    commit = Commit(trial, 1, "7.0", 0)
    commit.begin()
    (commit.folder / "shard-0.bin").write_bytes(b"x")
    commit.record_rank(0, [checked_file.record(commit.folder / "shard-0.bin")])
    with pytest.raises(RoleFailed, match=r"has no rank_1\.ok"):
        commit.commit(facts(1))
    assert scan(trial) == []


def test_a_file_that_changed_after_its_rank_was_done_stops_the_commit(trial):
    commit = Commit(trial, 1, "7.0", 0)
    commit.begin()
    (commit.folder / "shard-0.bin").write_bytes(b"xyz")
    commit.record_rank(0, [checked_file.record(commit.folder / "shard-0.bin")])
    (commit.folder / "shard-0.bin").write_bytes(b"x")
    with pytest.raises(RoleFailed, match="has 1 bytes, 3 were written"):
        commit.commit(facts(1, num_ranks=1))


def test_a_generation_that_is_in_the_way_is_set_aside_not_overwritten(trial, caplog):
    save(trial, 3, lineage=0)
    (trial.generation(3) / "shard-0.bin").write_bytes(b"damaged")
    save(trial, 3, lineage=1)
    assert check(trial.generation(3)).manifest.lineage == 1
    (kept,) = (trial.recover / "set-aside").iterdir()
    assert (kept / "shard-0.bin").read_bytes() == b"damaged"
    assert "CHECKPOINT SET ASIDE" in caplog.text
    assert steps(trial) == [3]


def test_a_rename_whose_reply_was_lost_counts(trial, monkeypatch):
    real = os.rename

    def lost(source, target):
        real(source, target)
        raise OSError("no reply")

    monkeypatch.setattr(generation.os, "rename", lost)
    save(trial, 3)
    monkeypatch.undo()
    assert steps(trial) == [3]


def test_what_a_person_asked_to_set_aside_is_no_error(trial, caplog, monkeypatch):
    caplog.set_level("INFO")
    synced = []
    monkeypatch.setattr(generation, "fsync_dir", synced.append)
    save(trial, 3)
    synced.clear()
    there = move_aside(trial.generation(3), "it is later than checkpoint 2", asked=True)
    assert synced == [there.parent, trial.recover]
    assert [row.levelname for row in caplog.records if "set aside" in row.message] == ["INFO"]


def test_set_aside_twice_keeps_both(trial):
    for _ in range(2):
        save(trial, 3)
        move_aside(trial.generation(3), "does not verify")
    assert len(list((trial.recover / "set-aside").iterdir())) == 2
    assert scan(trial) == []


def test_retention_keeps_the_newest_and_what_is_damaged_or_loaded(trial):
    for step in range(1, 7):
        save(trial, step)
    (trial.generation(5) / "manifest.json").unlink()
    with hold(trial, 1, "a test"):
        assert retain(trial, RetentionPolicy(2)) == 1
    left = [(found.step, bool(found.problem)) for found in scan(trial)]
    assert left == [(6, False), (5, True), (4, False), (1, False)]
    assert retain(trial, RetentionPolicy(0)) == 6
    assert steps(trial) == [6]


def test_an_intact_generation_never_goes_in_favour_of_a_damaged_one(trial, monkeypatch, caplog):
    for step in (1, 2, 3, 4):
        save(trial, step)
    for step in (2, 4):  # the same size, other content
        shard = trial.generation(step) / "shard-0.bin"
        shard.write_bytes(bytes(shard.stat().st_size))
    known: dict[str, str] = {}
    assert retain(trial, RetentionPolicy(2), known=known) == 1
    assert [found.step for found in scan(trial)] == [4, 3, 2, 1]
    assert "checkpoint 4 is damaged, so recover.keep does not count it: shard-0.bin" in caplog.text
    save(trial, 5)
    read = []
    noted = lambda found, most: read.append(found.step) or verify(found, most)  # noqa: E731
    monkeypatch.setattr(retention, "verify", noted)
    assert retain(trial, RetentionPolicy(2), known=known) == 3
    assert [found.step for found in scan(trial)] == [5, 4, 3, 2] and read == [5]


def test_a_manifest_of_another_schema_or_shape_is_a_problem_in_words(trial):
    save(trial, 3)
    path = trial.generation(3) / "manifest.json"
    data = json.loads(path.read_text())
    for change, words in (({"schema": 99}, "schema 99"), ({"surprise": 1}, "lacks a field")):
        new = {key: value for key, value in {**data, **change}.items() if key != "xxh3"}
        path.write_text(generation.seal(new))
        assert words in check(trial.generation(3)).problem
    path.write_text("{")
    assert "manifest.json" in check(trial.generation(3)).problem


def test_a_generation_under_another_name_is_refused(trial):
    save(trial, 3)
    os.rename(trial.generation(3), trial.generation(4))
    assert check(trial.generation(4)).problem == "its manifest.json belongs to step 3"


def test_config_hash_does_not_depend_on_order():
    first, turned, other = map(generation.hash_config, ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 2}))
    assert first == turned != other
