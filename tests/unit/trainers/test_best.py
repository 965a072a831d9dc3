"""The best model by its evaluations: kept as exports/best across restarts, and the final export where that is
asked for.
"""

import pytest
from training import FakeEngine, Starter

from hpc_rl.config.changes import digest_options
from hpc_rl.config.load.load import load
from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.operations import EvaluatorConfig, KeepBestConfig, RecoverConfig, SaverConfig
from hpc_rl.config.rules.check import check
from hpc_rl.core.errors import ConfigError, ExitCode
from hpc_rl.core.trial import load_json

LOSSES = {2: {"eval_loss": 0.5}, 4: {"eval_loss": 0.2}, 6: {"eval_loss": 0.9}}


def starter(tmp_path, **keep) -> Starter:
    saver = SaverConfig(keep_best=KeepBestConfig(**keep), freq_steps=3, keep_last=1)
    recover = RecoverConfig(mode="auto", freq_steps=2)
    return Starter(tmp_path, saver=saver, evaluator=EvaluatorConfig(freq_steps=2), recover=recover)


def model(start: Starter, name: str) -> int:
    """The sum of all batches up to the step that the export is of."""
    return load_json(start.trial.exports / name / "model.json")


def record(start: Starter, name: str) -> dict:
    return load_json(start.trial.exports / name / "hpc_rl.json")


def test_the_best_model_is_kept_and_is_the_final_one(tmp_path):
    start = starter(tmp_path, as_final=True)
    start(6, numbers=LOSSES)
    assert (model(start, "best"), model(start, "final"), model(start, "step-00000006")) == (10, 10, 21)
    best = record(start, "best")
    assert (best["step"], best["version"], best["metric"], best["value"]) == (4, "0.4", "eval_loss", 0.2)
    final = record(start, "final")
    # the end of all 6 steps, weights of the 4th
    assert (final["step"], final["version"], final["best"]["step"]) == (6, "0.4", 4)
    assert start(6)[1].trained == []  # it is done


def test_without_as_final_the_last_weights_are_the_final_ones(tmp_path):
    start = starter(tmp_path)
    start(6, numbers=LOSSES)
    assert (model(start, "best"), model(start, "final")) == (10, 21)


@pytest.mark.parametrize(
    ("keep", "numbers", "step"),
    [
        ({"mode": "max"}, LOSSES, 6),
        (
            {"metric": "eval_accuracy"},
            {2: {"eval_accuracy": 0.7, "eval_loss": 3}, 4: {"eval_accuracy": 0.7}},
            2,
        ),
        ({}, {2: {"eval_loss": float("nan")}, 4: {"eval_loss": 7.0}, 6: {"eval_loss": float("inf")}}, 4),
    ],
)
def test_the_metric_and_its_direction_say_what_is_best(tmp_path, keep, numbers, step):
    start = starter(tmp_path, **keep)
    start(6, numbers=numbers)
    assert record(start, "best")["step"] == step


def test_a_restart_remembers_the_best(tmp_path):
    start = starter(tmp_path, as_final=True)
    start(4, numbers=LOSSES)
    (start.trial.exports / "best" / "critic").mkdir()
    (start.trial.exports / "best" / "critic" / "config.json").write_text("of the critic")
    start.attempt_id = "8.0"
    start(8, numbers={6: {"eval_loss": 0.3}, 8: {"eval_loss": 0.4}})
    assert (record(start, "best")["step"], model(start, "final")) == (4, 10)
    assert (start.trial.exports / "final" / "critic" / "config.json").read_text() == "of the critic"


def test_a_stop_while_the_best_waits_for_space_leaves_it_to_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_rl.core.files.PAUSE_S", (0.001, 0.001))
    start = starter(tmp_path)
    start.config.saver.freq_steps = None

    def full(*_args, **_kwargs):
        start.last.stopping.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FakeEngine, "export", full)
        assert start(4, numbers=LOSSES)[0] == ExitCode.STOPPED
    assert list(start.trial.exports.iterdir()) == []
    start.end(75)
    start(4, numbers=LOSSES)
    assert [record(start, "best")["step"], model(start, "best")] == [4, 10]
    assert load_json(start.trial.lineages / "0001.json")["from_step"] == 2


def test_another_metric_starts_anew(tmp_path):
    start = starter(tmp_path)
    start(4, numbers=LOSSES)
    start.attempt_id = "8.0"
    start.config.saver.keep_best = KeepBestConfig(metric="eval_accuracy")
    start(6, numbers={6: {"eval_accuracy": 0.1}})
    assert record(start, "best")["metric"] == "eval_accuracy"


def test_a_best_that_was_measured_otherwise_does_not_count(tmp_path, caplog):
    start = starter(tmp_path, as_final=True)
    start.config.valid_dataset = DatasetConfig(path="easy.jsonl", batch_size=2)
    start(4, numbers=LOSSES)
    assert record(start, "best")["step"] == 4
    start.attempt_id, start.config.valid_dataset = "8.0", DatasetConfig(path="hard.jsonl", batch_size=2)
    start(5)
    assert (record(start, "best")["step"], model(start, "final")) == (4, 15)  # nothing was measured since
    start.attempt_id = "9.0"
    start(10, numbers={6: {"eval_loss": 0.9}, 8: {"eval_loss": 0.8}, 10: {"eval_loss": 0.85}})
    assert (record(start, "best")["step"], model(start, "final")) == (8, 36)
    said = [one.getMessage() for one in caplog.records if "is not the best any more" in one.getMessage()]
    assert said == [
        "the model of step 4 is not the best any more, because it was measured with another valid_dataset.path"
    ]


def test_a_number_depends_on_what_is_asked_and_on_what_scores():
    def digests(*words: str) -> dict[str, str]:
        given = [*BASE, "rollout.reward_fn=judge", "rollout.judge.pool=j", "pools.j.path=/j", *words]
        return digest_options(load([], given, profiles=[]).config)

    before = digests()
    for option in ("rollout.reward_fn=contains", "rollout.judge.template=x", "pools.j.path=/k"):
        after = digests(option)
        assert [name for name in before if after[name] != before[name]] == [option.partition("=")[0]]
    assert digests("pools.j.max_requests=3", "gconfig.n_samples=7", "actor.optimizer.lr=1") == before


def test_a_metric_that_no_evaluation_has_is_said(tmp_path, caplog):
    start = starter(tmp_path, metric="eval_hints")
    start(4, numbers={2: {"eval_loss": 1.0, "eval_version": "0.2"}, 4: {"eval_hints": 3.0}})
    assert record(start, "best")["step"] == 4
    said = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert said == [
        "saver.keep_best has no effect: the evaluation of step 2 lacks its metric eval_hints; it has eval_loss"
    ]


def test_where_nothing_was_measured_the_last_weights_are_final(tmp_path):
    start = starter(tmp_path, as_final=True)
    start(3)
    assert model(start, "final") == 6
    assert not (start.trial.exports / "best").exists()


BASE = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "train_dataset.batch_size=4"]
BASE += ["actor.path=/m"]


def test_it_needs_held_out_data_and_a_number_that_is_measured():
    with pytest.raises(ConfigError, match=r"saver\.keep_best .*valid_dataset"):
        check(load([], [*BASE, "saver.keep_best.metric=eval_reward"]), files=False)
    alone = check(load([], [*BASE, "load_best_model_at_end=true"]), files=False)  # ATLAS's default
    assert alone.config.saver.keep_best is None
    assert any("load_best_model_at_end" in note for note in map(str, alone.notes))
    with pytest.raises(ConfigError, match=r"saver\.keep_best\.metric eval_loss .*eval_reward"):
        check(load([], [*BASE, "valid_dataset.path=/v", "metric_for_best_model=loss"]), files=False)
    own = [*BASE, "valid_dataset.path=/v", "saver.keep_best.metric=eval_hints"]
    check(load([], [*own, "rollout.workflow=my.module:run"]), files=False)
    with pytest.raises(ConfigError, match=r"metric eval_hints .*measures eval_reward"):
        check(load([], own), files=False)
    done = check(load([], [*BASE, "valid_dataset.path=/v", "load_best_model_at_end=true"]), files=False)
    assert any(
        "the first and the last" in note and "saver.keep_best" in note for note in map(str, done.notes)
    )
