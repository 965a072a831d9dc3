"""Evaluations beside training: what waits for what, what a restart does, and what becomes the best."""

import threading
import time
from types import SimpleNamespace

import pytest
from patience import extend
from training import Starter

from hpc_rl.checkpoint.generation import scan
from hpc_rl.config.options.operations import EvaluatorConfig, KeepBestConfig, RecoverConfig, SaverConfig
from hpc_rl.core.errors import ExitCode, RoleFailed
from hpc_rl.core.trial import load_json, load_object, write_json
from hpc_rl.core.types import EvalResult
from hpc_rl.trainers import activity, exports
from hpc_rl.trainers.evaluations import EvaluationsBeside
from hpc_rl.trainers.run import WAITS_FOR_EVALUATION


class Rollout:
    """Answers the evaluation of a version when a test allows it; the reward is that of its step."""

    def __init__(self, rewards: dict[int, float] | None = None, waits_at: str = "") -> None:
        self.rewards, self.waits_at = rewards or {}, waits_at
        self.allowed = threading.Event()
        self.allowed.set()
        self.asked: list[str] = []
        self.error: Exception | None = None

    def evaluate(self, label, trainer, name, together, stopping, on_progress, within_s) -> EvalResult | None:
        self.asked.append(label)
        on_progress()
        while label == self.waits_at or not self.allowed.is_set():
            if stopping.wait(0.01):
                return None
        if self.error is not None:
            raise self.error
        return EvalResult(label, 7, self.rewards.get(int(label.partition(".")[2]), 0.0))


class Publisher:
    """Notes which versions are held."""

    def __init__(self) -> None:
        self.kept: frozenset[str] = frozenset()
        self.held = SimpleNamespace(problem="")
        self.calls: list[str] = []

    def hold(self, label: str, is_published: bool) -> None:
        assert label in self.kept
        self.calls.append(f"hold {label}")

    def release(self) -> None:
        self.calls.append("release")


@pytest.fixture
def trial(tmp_path, monkeypatch):
    start = Starter(
        tmp_path,
        saver=SaverConfig(keep_best=KeepBestConfig(metric="eval_reward")),
        evaluator=EvaluatorConfig(freq_steps=2),
        recover=RecoverConfig(mode="auto", freq_steps=1, keep=2, keep_best=1),
    )
    start.rollout, start.publisher = Rollout(), Publisher()
    start.beside = lambda run: EvaluationsBeside(
        start.rollout, start.publisher, run.lineage, run.stopping, run.make_progress
    )
    # the weights of a version are its label
    monkeypatch.setattr(exports, "load_chain", lambda folder, version: version)
    build = lambda target, folder, version: write_json(target / "model.json", str(version))  # noqa: E731
    monkeypatch.setattr(exports, "build_model", build)
    yield start
    start.last.stopping.set()  # no evaluation goes on waiting


def held_out_rows(start: Starter) -> list[tuple[int, float]]:
    return [(row["step"], row["eval_reward"]) for row in start.rows() if "eval_reward" in row]


def test_training_goes_on_and_the_best_model_is_of_the_evaluated_step(trial):
    trial.rollout.rewards = {2: 0.9, 4: 0.3}
    trial.rollout.allowed.clear()
    code, recipe = trial(4, {"during 2": trial.rollout.allowed.set})
    assert code == ExitCode.DONE
    assert recipe.calls.index("update 2") < recipe.calls.index("evaluated 0")
    assert trial.rollout.asked == ["0.0", "0.2", "0.4"]
    assert trial.publisher.calls == ["hold 0.0", "release", "hold 0.2", "release", "hold 0.4", "release"]
    assert trial.publisher.kept == frozenset()
    assert held_out_rows(trial) == [(0, 0.0), (2, 0.9), (4, 0.3)]
    assert load_json(trial.trial.exports / "best" / "model.json") == "0.2"
    best = load_json(trial.trial.exports / "best" / "hpc_rl.json")
    assert (best["step"], best["version"], best["value"]) == (2, "0.2", 0.9)
    # its checkpoint was made before the result came
    assert trial.generations() == [4, 3, 2]
    assert next(one for one in scan(trial.trial) if one.step == 2).metrics["eval_reward"] == 0.9


def test_a_stop_leaves_the_evaluation_to_the_next_start(trial):
    trial.rollout = Rollout(waits_at="0.2")
    code, _ = trial(6, {"during 3": lambda: trial.last.stopping.set()})
    assert (code, held_out_rows(trial)) == (ExitCode.STOPPED, [(0, 0.0)])
    trial.end(75)
    trial.rollout, trial.publisher = Rollout({2: 0.5}), Publisher()
    assert trial(6)[0] == ExitCode.DONE
    assert trial.rollout.asked == ["0.2", "1.4", "1.6"]
    assert held_out_rows(trial) == [(2, 0.5), (4, 0.0), (6, 0.0)]
    assert load_json(trial.trial.exports / "best" / "model.json") == "0.2"


def test_a_stop_while_the_end_waits_for_the_last_evaluation_is_made_up_for(trial):
    trial.rollout = Rollout(waits_at="0.2")

    def wait_and_stop() -> None:
        while "0.2" not in trial.rollout.asked:
            trial.last.stopping.wait(0.01)
        trial.last.stopping.set()

    code, _ = trial(2, {"during 2": threading.Thread(target=wait_and_stop, daemon=True).start})
    assert code == ExitCode.STOPPED and not (trial.trial.exports / "final").exists()
    trial.end(75)
    trial.rollout = Rollout({2: 0.5})
    code, recipe = trial(2)
    assert (code, recipe.trained, trial.rollout.asked) == (ExitCode.DONE, [], ["0.2"])
    assert held_out_rows(trial) == [(2, 0.5)] and (trial.trial.exports / "final").exists()


def test_the_end_waits_for_the_last_evaluation_with_a_limit(trial, caplog):
    caplog.set_level("INFO")
    trial.config.evaluator = EvaluatorConfig(end_wait_s=1)
    trial.rollout = Rollout(waits_at="0.1")
    code, _ = trial(1)
    assert code == ExitCode.DONE and held_out_rows(trial) == [(0, 0.0)]
    assert "evaluator.end_wait_s" in caplog.text


def test_what_no_server_can_load_is_lost_and_said(trial, caplog):
    trial.publisher.held.problem = "0.0/rank-00000 is missing"
    code, _ = trial(1)
    assert code == ExitCode.DONE and held_out_rows(trial) == []
    assert "THE EVALUATION OF STEP 0 IS LOST" in caplog.text and "rank-00000 is missing" in caplog.text


def test_progress_counts_only_while_training_may_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(activity, "PERIOD_S", 0.01)
    made = activity.Activity(tmp_path / "activity" / "trainer.json")

    def wait_for(doing: str, changes: int) -> None:
        until = time.monotonic() + extend(10)
        while (found := load_object(tmp_path / "activity" / "trainer.json")).get("changes") != changes:
            assert time.monotonic() < until, found
            time.sleep(0.01)
        assert found["doing"] == doing

    made.does("evaluate", 3)
    made.make_progress(WAITS_FOR_EVALUATION)
    wait_for("evaluate", 2)
    made.does("train", 4)
    made.make_progress(WAITS_FOR_EVALUATION)  # a hang in training must be seen
    wait_for("train", 3)


def test_an_error_of_the_rollout_role_ends_the_trainer(trial):
    trial.rollout.error = RoleFailed("the reward raises")
    with pytest.raises(RoleFailed, match="the reward raises"):
        trial(3)
