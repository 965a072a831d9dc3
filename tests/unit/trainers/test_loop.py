"""The loop, the run and the start around them, with an engine of a few lines: order, stops, resumes, what
lies on disk.
"""

import json
import shutil
import threading
import time

import pytest
from training import FakeEngine, FakeSnapshot, Starter, make_config

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import Commit, scan
from hpc_rl.config.options.experiment import count_steps
from hpc_rl.config.options.operations import EvaluatorConfig, RecoverConfig, SaverConfig
from hpc_rl.core.errors import CannotWrite, ConfigError, ExitCode, NothingToResume, Stale
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.status.trial_status import load_status
from hpc_rl.trainers.exports import Exports


@pytest.fixture
def starter(tmp_path):
    return Starter(tmp_path)


def stop(run_of, waits: bool = False):
    def act() -> None:
        run_of().stopping.set()

    act.waits = waits
    return act


def test_what_happens_when(tmp_path, caplog):
    caplog.set_level("INFO")
    starter = Starter(tmp_path, evaluator=EvaluatorConfig(freq_steps=2), saver=SaverConfig(freq_steps=4))
    code, recipe = starter(5)
    assert code == ExitCode.DONE
    expected = "publish 0, evaluate 0, update 1, publish 1, update 2, publish 2, evaluate 2, "
    expected += "update 3, publish 3, retain 3, "
    expected += "update 4, publish 4, evaluate 4, update 5, publish 5, evaluate 5, retain 3"
    assert recipe.calls == expected.split(", ")
    assert starter.generations() == [5, 3]
    assert sorted(path.name for path in starter.trial.exports.iterdir()) == ["final", "step-00000004"]
    assert json.loads((starter.trial.exports / "final" / "model.json").read_text()) == 15
    assert load_json(starter.trial.exports / "final" / "hpc_rl.json")["version"] == "0.5"
    rows = starter.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[1]["version"] == "0.2" and rows[1]["lineage"] == 0 and rows[1]["loss"] == 0.5
    assert {"time", "wait_s", "train_s", "publish_s", "save_s", "step_s"} <= set(rows[0])
    assert rows[0]["save_s"] == 0.0 < rows[3]["save_s"]
    assert any(line.startswith("step 2: reward/format 0.25  loss 0.5  step_s") for line in caplog.messages)


def test_told_to_stop_in_a_step_it_finishes_the_step_saves_and_exits_75(starter):
    code, recipe = starter(10, {"during 4": stop(lambda: starter.last)})
    assert code == ExitCode.STOPPED
    assert recipe.trained == [1, 2, 3, 4]
    assert starter.generations() == [4, 3]
    starter.end(75)
    code, recipe = starter(10)
    assert code == ExitCode.DONE
    assert recipe.trained == [5, 6, 7, 8, 9, 10]
    assert recipe.calls[:2] == ["publish 4", "update 5"]
    assert starter.last.engine.total == 55
    manifest = scan(starter.trial)[0].manifest
    assert (manifest.lineage, manifest.version, manifest.submission) == (1, "1.10", "7")
    assert (manifest.epoch, manifest.cursor) == (2, 0)


def test_told_to_stop_while_it_waits_for_a_batch_it_saves_what_it_has(starter):
    code, recipe = starter(10, {5: stop(lambda: starter.last, waits=True)})
    assert code == ExitCode.STOPPED
    assert recipe.trained == [1, 2, 3, 4]
    assert starter.generations() == [4, 3]


def test_a_stop_before_the_first_step_saves_nothing(starter):
    code, _ = starter(2, {1: stop(lambda: starter.last, waits=True)})
    assert (code, starter.generations()) == (ExitCode.STOPPED, [])
    starter.end(75)
    code, recipe = starter(2)
    assert (code, recipe.trained) == (ExitCode.DONE, [1, 2])


def test_told_to_stop_right_after_a_save_it_does_not_save_again(starter):
    _, recipe = starter(10, {4: stop(lambda: starter.last, waits=True)})
    assert starter.generations() == [3]
    assert [call for call in recipe.calls if call.startswith("retain")] == ["retain 3"]


def overtake(starter: Starter) -> None:
    """Let another start of the trainer begin, while this one lives on a node that was cut off."""
    write_json(starter.trial.lineage(1), {"lineage": 1, "from_step": 3})


def test_a_trainer_that_was_overtaken_in_a_step_writes_no_more(tmp_path):
    starter = Starter(tmp_path, saver=SaverConfig(freq_steps=2))
    with pytest.raises(Stale, match=r"lineage 1\) has taken the place"):
        starter(10, {"during 6": lambda: overtake(starter)})
    assert [row["step"] for row in starter.rows()] == [1, 2, 3, 4, 5]
    assert starter.generations() == [3]
    assert sorted(path.name for path in starter.trial.exports.iterdir()) == ["step-00000002", "step-00000004"]


def test_a_trainer_that_was_overtaken_while_it_saves_commits_nothing(starter, monkeypatch):
    begin = Commit.begin

    def begin_late(commit: Commit) -> None:
        begin(commit)
        if commit.step == 6:
            overtake(starter)

    monkeypatch.setattr(Commit, "begin", begin_late)
    with pytest.raises(Stale, match=r"lineage 1\) has taken the place"):
        starter(10)
    assert starter.generations() == [3]


class Killed(BaseException):
    """kill -9"""


def kill() -> None:
    raise Killed


def starts_of(starter: Starter) -> list[int]:
    """The step that each lineage begins with."""
    return [load_json(path)["from_step"] for path in sorted(starter.trial.lineages.iterdir())]


def kill_at(starter: Starter, num_steps: int, actions: dict) -> None:
    with pytest.raises(Killed):
        starter(num_steps, actions)
    starter.end(137)


@pytest.mark.parametrize("moment", [1, 3, 4, 7, "during 1", "during 4", "during 10"], ids=str)
def test_killed_anywhere_it_goes_on_from_the_newest_generation(starter, moment):
    kill_at(starter, 10, {moment: kill})
    code, recipe = starter(10)
    step = moment if isinstance(moment, int) else int(moment.split()[1])
    resumed_from = (step - 1) // 3 * 3
    assert code == ExitCode.DONE
    assert recipe.trained == list(range(resumed_from + 1, 11))
    assert starter.last.engine.total == 55
    assert starts_of(starter) == [0, resumed_from]


def test_a_damaged_generation_is_set_aside_and_the_one_before_is_taken(starter, caplog):
    kill_at(starter, 10, {8: kill})
    path = starter.trial.generation(6) / "state.json"
    path.write_text(path.read_text().replace("21", "22"))
    code, recipe = starter(10)
    assert code == ExitCode.DONE
    assert recipe.trained[0] == 4
    assert starter.last.engine.total == 55
    assert "CHECKPOINT SET ASIDE" in caplog.text
    assert [p.name[:12] for p in (starter.trial.recover / "set-aside").iterdir()] == ["gen-00000006"]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"rows": 24, "xxh3": "bb"}, "had 32 rows when checkpoint 6 was made, and has 24 rows now"),
        (
            {"rows": 32, "xxh3": "bb"},
            "had 32 rows when .* made, and has the same number with other content now",
        ),
    ],
)
def test_a_generation_of_other_rows_is_refused_and_left_as_it_is(starter, now, words):
    starter.data = {"rows": 32, "xxh3": "aa"}
    kill_at(starter, 10, {8: kill})
    starter.data = now
    with pytest.raises(ConfigError, match=words):
        starter(10)
    assert len(list(starter.trial.lineages.iterdir())) == 1 and starter.generations() == [6, 3]
    starter.data = {"rows": 32, "xxh3": "aa"}
    assert starter(10)[0] == ExitCode.DONE and starter.last.engine.total == 55


def test_a_generation_without_a_fingerprint_is_gone_on_from(starter):
    kill_at(starter, 10, {8: kill})
    starter.data = {"rows": 32, "xxh3": "aa"}
    assert starter(10)[1].trained[0] == 7
    assert scan(starter.trial)[0].manifest.data == starter.data


def test_a_finished_trial_ends_cleanly_when_started_again(starter):
    starter(4)
    starter.end(0)
    before = sorted(path.stat().st_mtime_ns for path in (starter.trial.exports / "final").iterdir())
    code, recipe = starter(4)
    assert code == ExitCode.DONE
    assert recipe.calls == []
    assert sorted(path.stat().st_mtime_ns for path in (starter.trial.exports / "final").iterdir()) == before


def test_killed_before_the_final_export_it_makes_up_for_it(starter, monkeypatch):
    monkeypatch.setattr(FakeEngine, "export", lambda *_args, **_kwargs: kill())
    with pytest.raises(Killed):
        starter(4)
    monkeypatch.undo()
    starter.end(137)
    code, recipe = starter(4)
    assert code == ExitCode.DONE and recipe.calls == []
    assert json.loads((starter.trial.exports / "final" / "model.json").read_text()) == 10


def test_the_export_of_a_lost_lineage_is_not_taken_for_the_end(starter, monkeypatch):
    """A finished trial is set back to an earlier generation, trained again, killed before its export."""
    starter(4)
    shutil.rmtree(starter.trial.generation(4))
    starter.end(137)
    with monkeypatch.context() as patched:
        patched.setattr(Exports, "write_final", lambda *_: kill())
        with pytest.raises(Killed):
            starter(4)
    starter.end(137)
    assert load_json(starter.trial.exports / "final" / "hpc_rl.json")["version"] == "0.4"
    assert starter(4)[0] == ExitCode.DONE
    assert load_json(starter.trial.exports / "final" / "hpc_rl.json")["version"] == "1.4"


def test_an_end_before_the_loaded_state_is_refused(starter):
    kill_at(starter, 10, {8: kill})
    with pytest.raises(ConfigError, match=r"ends after step 5, .* is of step 6"):
        starter(5)
    assert not (starter.trial.exports / "final").exists()


def test_an_evaluation_that_a_stop_cut_short_is_made_up_for(starter):
    starter.config.evaluator = EvaluatorConfig(freq_steps=2)
    code, recipe = starter(4, {"during 4": stop(lambda: starter.last)})
    assert code == ExitCode.STOPPED and "evaluate 4" in recipe.calls
    starter.end(75)
    code, recipe = starter(4)
    assert code == ExitCode.DONE
    assert recipe.calls == ["publish 4", "evaluate 4"]
    starter.end(0)
    assert starter(4)[1].calls == []


def test_mode_disabled_never_saves(tmp_path):
    starter = Starter(tmp_path, recover=RecoverConfig(mode="disabled", freq_steps=1))
    code, _ = starter(10, {"during 4": stop(lambda: starter.last)})
    assert code == ExitCode.STOPPED
    assert starter.generations() == []


def test_mode_disabled_trims_the_batch_log_but_not_below_a_generation(tmp_path):
    starter = Starter(tmp_path, recover=RecoverConfig(mode="disabled"))
    _, recipe = starter(25)
    assert [call for call in recipe.calls if call.startswith("retain")] == ["retain 10", "retain 20"]
    starter = Starter(tmp_path / "other", recover=RecoverConfig(mode="auto", freq_steps=4))
    starter(4)
    starter.end(0)
    starter.config.recover = RecoverConfig(mode="disabled")
    write_json(starter.trial.job("8"), {"start_mode": "resume"})
    starter.attempt_id = "8.0"
    _, recipe = starter(12)
    assert recipe.trained[0] == 5 and "retain 4" in recipe.calls and "retain 10" not in recipe.calls


def test_a_drain_saves_although_no_frequency_is_set(tmp_path):
    starter = Starter(tmp_path, recover=RecoverConfig(mode="fault"))
    starter(10, {"during 2": stop(lambda: starter.last)})
    assert starter.generations() == [2]


def test_resume_without_a_generation_or_fresh_over_state_is_refused(tmp_path):
    starter = Starter(tmp_path, recover=RecoverConfig(mode="resume"))
    with pytest.raises(NothingToResume):
        starter(3)
    assert list(starter.trial.lineages.iterdir()) == []
    starter.config.recover = RecoverConfig(mode="auto", freq_steps=1)
    starter(3)
    starter.config.recover = RecoverConfig(mode="disabled")
    starter.attempt_id = "8.0"
    with pytest.raises(ConfigError, match="already has state"):
        starter(3)


def test_hpc_rl_recover_starts_as_resume_whatever_the_mode(starter):
    starter(2)
    starter.config.recover = RecoverConfig(mode="fault", freq_steps=1)
    starter.attempt_id = "8.0"
    write_json(starter.trial.job("8"), {"start_mode": "resume"})
    code, recipe = starter(4)
    assert code == ExitCode.DONE and recipe.trained == [3, 4]


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def write_by_step(monkeypatch, states: dict) -> None:
    """Snapshots are written as their step says."""
    write = lambda self, folder, cancel: states[int(folder.name[5:13])](self, folder, cancel)  # noqa: E731
    monkeypatch.setattr(FakeSnapshot, "write", write)


def test_a_full_disk_fails_the_save_loudly_and_training_goes_on(starter, monkeypatch, caplog):
    saved = FakeSnapshot.write
    write_by_step(monkeypatch, {3: saved, 6: full, 9: saved})
    with pytest.raises(Killed):
        starter(12, {11: kill})
    assert starter.generations() == [9, 3]
    words = (
        "SAVE FAILED: checkpoint 6 could not be saved: [Errno 28] No space left on device; checkpoint 3 is"
    )
    assert words in caplog.text
    assert not [path for path in starter.trial.recover.iterdir() if path.name.startswith(".")]
    rows = {row["step"]: row for row in starter.rows()}
    assert "save_failed" not in rows[6] and "save_failed" not in rows[10]
    assert rows[7]["save_failed"] == rows[9]["save_failed"] == 1
    assert "No space left" in rows[7]["save_error"]


def test_a_stop_whose_save_fails_does_not_say_that_the_state_is_saved(starter, monkeypatch):
    monkeypatch.setattr(FakeSnapshot, "write", full)
    words = r"checkpoint 2 could not be saved: .*No space left.*; there is no checkpoint yet"
    with pytest.raises(CannotWrite, match=words):
        starter(4, {"during 2": stop(lambda: starter.last)})
    assert starter.generations() == []


def test_a_failed_last_save_is_tried_again_after_the_export_and_recorded(starter, monkeypatch, caplog):
    saved, states = FakeSnapshot.write, {3: FakeSnapshot.write, 4: full}
    write_by_step(monkeypatch, states)
    assert starter(4)[0] == ExitCode.DONE
    words = "checkpoint 4 could not be saved: [Errno 28] No space left on device; checkpoint 3 is the newest"
    assert f"THE LAST STATE IS NOT SAVED: {words}" in caplog.text and "Training continues" not in caplog.text
    assert load_json(starter.trial.exports / "final" / "hpc_rl.json")["not_saved"] == words
    write_json(starter.trial.done, {})
    found = load_status(starter.trial)
    assert found.state == "done" and words in found.reason
    starter.end(0)
    states[4] = lambda self, folder, cancel: states.update({4: saved}) or full()
    assert starter(4)[0] == ExitCode.DONE
    assert starter.generations()[0] == 4 and load_status(starter.trial).reason == ""


def test_a_generation_that_does_not_fit_is_not_begun(starter, monkeypatch, caplog):
    monkeypatch.setattr(FakeEngine, "state_bytes", lambda self: 10**18)
    with pytest.raises(Killed):
        starter(5, {5: kill})
    assert "it needs 931322574.6 GB, but only" in caplog.text
    assert list(starter.trial.recover.iterdir()) == []


class TestAsynchronous:
    @pytest.fixture
    def starter(self, tmp_path):
        return Starter(tmp_path, recover=RecoverConfig(mode="auto", freq_steps=2, keep=9, async_save=True))

    @pytest.fixture
    def slow(self, monkeypatch):
        """Snapshots whose writing begins when a test says so."""
        taken: list[tuple[FakeSnapshot, bool]] = []
        take = FakeEngine.snapshot

        def snapshot(self, copied):
            taken.append((take(self, copied), copied))
            taken[-1][0].may_write.clear()
            return taken[-1][0]

        monkeypatch.setattr(FakeEngine, "snapshot", snapshot)
        return taken

    def test_training_continues_while_one_is_written_and_the_next_follows_it(self, starter, slow):
        seen = []

        def look() -> None:
            seen.append((starter.generations(), len(slow)))

        def finish() -> None:
            slow[-1][0].may_write.set()
            wait_until(lambda: written(starter))

        with pytest.raises(Killed):
            starter(10, {3: look, 5: look, 6: finish, 8: look, "during 8": finish, 9: look, 10: kill})
        # what was due at 4 is made up for by that of 6
        assert seen == [([], 1), ([], 1), ([2], 2), ([6, 2], 3)]
        assert all(copied for _, copied in slow)
        slow[-1][0].may_write.set()
        wait_until(lambda: written(starter))

    def test_the_state_is_that_of_its_step_and_a_stop_waits_for_it(self, starter):
        code, _ = starter(10, {"during 5": stop(lambda: starter.last)})
        assert code == ExitCode.STOPPED
        assert starter.generations()[0] == 5
        starter.end(75)
        code, recipe = starter(10)
        assert code == ExitCode.DONE and recipe.trained == [6, 7, 8, 9, 10]
        assert starter.last.engine.total == 55
        assert starter.generations()[0] == 10

    def test_killed_while_one_is_written_the_one_before_is_taken(self, starter, slow):
        with pytest.raises(Killed):
            starter(10, {4: kill})
        slow[0][0].may_write.set()
        wait_until(lambda: written(starter))
        assert starter.last.saving.newest == -1  # what was not seen committed was not told as saved

    def test_a_failure_is_told_at_the_next_boundary(self, starter, monkeypatch, caplog):
        monkeypatch.setattr(FakeSnapshot, "write", full)
        with pytest.raises(Killed):
            starter(10, {3: lambda: wait_until(lambda: written(starter)), 4: kill})
        assert "SAVE FAILED: checkpoint 2" in caplog.text
        assert starter.rows()[-1]["save_failed"] == 1
        assert not list(starter.trial.recover.iterdir())


def written(starter) -> bool:
    return not any(thread.name.startswith("save-") for thread in threading.enumerate())


def wait_until(what, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_large_file_is_checked_while_it_is_loaded_and_walked_back(starter, monkeypatch, caplog):
    monkeypatch.setattr(generation, "LIGHT_BYTES", 0)
    kill_at(starter, 10, {8: kill})
    for step in (6, 3):
        path = starter.trial.generation(step) / "state.json"
        path.write_text("9" * path.stat().st_size)
    code, recipe = starter(10)
    assert code == ExitCode.DONE
    assert recipe.trained == list(range(1, 11)) and starter.last.engine.total == 55
    words = "CHECKPOINT SET ASIDE: gen-00000006 can't be used (state.json: bytes 0 to 2 differ from what was written"
    assert words in caplog.text
    aside = sorted(path.name[:12] for path in (starter.trial.recover / "set-aside").iterdir())
    assert aside == ["gen-00000003", "gen-00000006"]
    assert starts_of(starter) == [0, 0]


def test_leftovers_of_killed_incarnations_go(starter):
    (starter.trial.recover / ".gen-00000003.7.0.0.tmp").mkdir()
    (starter.trial.weights / ".0.1.tmp").mkdir()
    starter(1)
    for folder in (starter.trial.recover, starter.trial.weights):
        assert not [path for path in folder.iterdir() if path.name[0] == "."]


def test_total_steps(tmp_path):
    config = make_config(tmp_path)
    config.total_train_epochs = 3
    assert count_steps(config, 11) == 16  # 33 rows, 2 a batch
    config.total_train_steps = 4
    assert count_steps(config, 11) == 4
    config.total_train_steps = 40
    assert count_steps(config, 11) == 16  # the earlier end
    config.total_train_epochs = None
    assert count_steps(config, 11) == 40
    with pytest.raises(ConfigError, match="no whole batch"):
        count_steps(make_config(tmp_path), 1)


def test_total_steps_by_sequences_and_with_a_filled_last_batch(tmp_path):
    config = make_config(tmp_path)
    config.total_train_n_seqs = 7
    in_a_step = 2 * (config.gconfig.n_samples if hasattr(config, "gconfig") else 1)
    assert count_steps(config, 11) == -(-7 // in_a_step)
    config.total_train_steps = 1
    assert count_steps(config, 11) == 1
    config.total_train_steps = config.total_train_n_seqs = None
    config.train_dataset.drop_last = False
    assert count_steps(config, 11) == 6  # 11 rows, 2 a batch, the last one filled up
