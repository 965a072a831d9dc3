"""Options that every trainer has, each with a value that is not its default, in trials of ten steps.

The configuration is loaded as a user's is, and composed and trained as the trainer does it; but the engine is one of a
few lines, and batches of grpo are made here.
"""

import json
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from recipes import RecordingEngine
from training import FakeEngine

from hpc_rl.checkpoint.generation import scan
from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.rules.check import check
from hpc_rl.core.allocation import Train
from hpc_rl.core.errors import GivenUp
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import Batch, EvalResult, Trajectory, TrajectoryGroup, encode
from hpc_rl.examples.toy import ALPHABET, make_tokenizer
from hpc_rl.name_resolve import open_names
from hpc_rl.stats.read import History, load_history
from hpc_rl.trainers import compose
from hpc_rl.trainers.loop import train
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.run import Timer
from hpc_rl.trainers.start import TrainerContext
from hpc_rl.weights.transport import TransportContext

TRAINERS = ("grpo", "sft", "rw")
NUM_ROWS, BATCH_SIZE, STEP_S = 8, 2, 10.0


class Engine(RecordingEngine, FakeEngine):
    """Records what it is made of and trained on; a step takes it ten seconds of a clock of its own."""

    made: ClassVar[list["Engine"]] = []
    now = 0.0

    def __init__(self, model: Any, _mesh: Any, *, name: str, device: str, seed: int, frozen: bool) -> None:
        RecordingEngine.__init__(self)
        FakeEngine.__init__(self)
        self.model, self.name, self.seed = model, name, seed
        Engine.made.append(self)

    def train_batch(self, *batch: Any, **more: Any) -> dict[str, float]:
        Engine.now += STEP_S
        return super().train_batch(*batch, **more)

    def counters(self) -> dict[str, int]:
        return {**FakeEngine.counters(self), "adam_steps": self.total}

    def export(self, folder: Path, tokenizer: Path | None = None) -> None:
        (folder / "tokenizer").write_text(str(tokenizer))


class Rollout:
    """Batches of random groups, and evaluations, whose labels all clients keep together."""

    evaluated: ClassVar[list[str]] = []

    def __init__(self, *_: Any) -> None: ...

    def batch_bytes(self, step: int, *_: Any, **__: Any) -> bytes:
        return encode(Batch(step, [TrajectoryGroup(i, [row(1.0), row(0.0)]) for i in range(BATCH_SIZE)]))

    def evaluate(self, label: str, *_: Any) -> EvalResult:
        self.evaluated.append(label)
        return EvalResult(label, NUM_ROWS, 0.25, {})

    def retain(self, step: int) -> None: ...

    def close(self) -> None: ...


class Publisher:
    """Has no servers; keeps its arguments."""

    held = SimpleNamespace(problem="")

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options

    def hold(self, label: str, is_published: bool) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


class Transport:
    """Sends nothing."""

    def __init__(self, context: TransportContext) -> None:
        self.publisher = context.publisher

    def start(self, version: object) -> None: ...

    def settle(self, wait: bool) -> None: ...

    def close(self) -> None: ...


def row(reward: float) -> Trajectory:
    mask = np.array([False, True])
    return Trajectory(
        ids=np.array([3, 4], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
        lineages=np.where(mask, 0, -1).astype(np.int32),
        steps=np.where(mask, 0, -1).astype(np.int32),
        reward=reward,
        finish_reason="stop",
    )


@dataclass
class Trained:
    trial: Trial
    recipe: Any
    engines: dict[str, Engine]
    labels: list[str]  # of evaluations by the rollout role

    @property
    def history(self) -> History:
        return load_history(self.trial)

    @property
    def evaluated(self) -> list[int]:
        """Steps after which there was an evaluation."""
        if isinstance(self.recipe.config, GRPOConfig):
            return [int(label.partition(".")[2]) for label in self.labels]
        return [step for step, _ in self.history.held_out[1]]

    @property
    def seen(self) -> list[list[int]]:
        """What each row of each update consisted of."""
        return [row.tolist() for rows, *_ in self.engines["actor"].updates for row in rows.ids]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """`trained(trainer, *overrides)` trains a trial; `HERE` is the directory of its files."""
    for name in ("model", "other"):
        make_tokenizer(ALPHABET if name == "model" else ALPHABET[::-1]).save_pretrained(tmp_path / name)
    for name, rows in (("train", NUM_ROWS), ("short", 4)):
        lines = (
            f'{{"prompt": "{i}", "completion": "{i}", "chosen": "1", "rejected": "0"}}' for i in range(rows)
        )
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(Engine, "made", [])
    monkeypatch.setattr(Engine, "now", 0.0)
    monkeypatch.setattr(compose, "resolve_name", lambda name: Transport if ".weights." in name else Engine)
    monkeypatch.setattr(compose, "RolloutClient", Rollout)
    monkeypatch.setattr(compose, "Publisher", Publisher)
    monkeypatch.setattr(Timer.__init__, "__defaults__", (lambda: Engine.now,))
    attempts = iter(range(9))

    def make(trainer: str, *overrides: str, trial: Trial | None = None) -> Trained:
        section = "actor" if trainer == "grpo" else "model"
        words = [
            "experiment_name=e",
            "trial_name=t",
            f"trainer={trainer}",
            f"{section}.path={tmp_path / 'model'}",
        ]
        words += [f"train_dataset.path={tmp_path / 'train.jsonl'}", f"train_dataset.batch_size={BATCH_SIZE}"]
        words += ["cluster.n_gpus_per_node=0"]
        words += ["gconfig.n_samples=2", "actor.ppo_n_minibatches=1"] if trainer == "grpo" else []
        text = [one.replace("HERE", str(tmp_path)) for one in overrides]
        if not any("total_train" in one for one in text):
            text.append("total_train_steps=10")
        config = check(load([], [*words, *text], profiles=[]), files=False).config
        number = next(attempts)
        trial = trial or Trial(tmp_path / f"trial-{number}")
        trial.make_dirs()
        attempt = trial.attempt(f"7.{number}")
        attempt.make_dirs()
        context = TrainerContext(
            trial=trial,
            attempt=attempt,
            incarnation=0,
            config=config,
            tokens={},
            names=open_names(trial),
            train=Train("fsdp"),
            device="cpu",
            ranks=Ranks(),
            stopping=threading.Event(),
        )
        Engine.made.clear()
        Rollout.evaluated.clear()
        with ExitStack() as stack:
            run, recipe = compose.COMPOSE[trainer](context, stack)
            train(run, recipe)
        return Trained(trial, recipe, {one.name: one for one in Engine.made}, [*Rollout.evaluated])

    return make


LENGTHS = {"total_train_epochs": (3, 12), "total_train_steps": (2, 2), "total_train_n_seqs": (5, 3)}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("option", LENGTHS)
def test_a_trial_ends_where_it_is_told(trained, trainer, option):
    value, num_steps = LENGTHS[option]
    if trainer == "grpo" and option == "total_train_n_seqs":
        num_steps = 2  # of two prompts with two samples each
    epochs = 3 if option == "total_train_epochs" else 9
    done = trained(trainer, f"total_train_epochs={epochs}", f"{option}={value}")
    assert done.history.last_step == num_steps


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_seed_draws_weights_and_the_order_of_rows(trained, trainer):
    runs = [trained(trainer, "total_train_steps=4", f"seed={seed}") for seed in (5, 5, 6)]
    assert [one.engines["actor"].seed for one in runs] == [5, 5, 6]
    if trainer != "grpo":  # its rows are ordered by the rollout role
        first, again, other = (one.seen for one in runs)
        assert first == again != other and sorted(first) == sorted(other)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_tokenizer_of_another_folder(trained, trainer):
    """It reads the rows, and goes with what is exported."""
    own, other = (trained(trainer, f"tokenizer_path={path}") for path in ("''", "HERE/other"))
    names = [Path((one.trial.exports / "final" / "tokenizer").read_text()).name for one in (own, other)]
    assert names == ["model", "other"]
    if trainer != "grpo":
        assert own.seen != other.seen


def test_servers_pause_as_the_section_weights_says(trained):
    words = ["weights.pause_mode=abort", "weights.max_paused=2", "weights.history_gb=3"]
    options = trained("grpo", *words).recipe.transport.publisher.options
    assert [options[name] for name in ("pause_mode", "max_paused", "history_bytes")] == ["abort", 2, 3e9]


def test_servers_are_awaited_for_the_setup_time_at_a_publish(trained):
    done = trained("grpo", "rollout.setup_timeout=77", "total_train_steps=1")
    assert done.recipe.transport.publisher.args[-1] == 77


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_model_that_is_trained(trained, trainer):
    section = "actor" if trainer == "grpo" else "model"
    assert trained(trainer, f"{section}.path=HERE/other").engines["actor"].model.path.endswith("/other")


def test_a_reference_model_is_made_for_its_terms(trained):
    terms = trained("grpo", "ref.path=HERE/other", "actor.kl_ctl=0.1")
    assert terms.engines["ref"].model.path.endswith("/other")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_rows_of_another_file(trained, trainer):
    done = trained(trainer, "train_dataset.path=HERE/short.jsonl", "total_train_epochs=1")
    assert done.history.last_step == 2


@pytest.mark.parametrize("trainer", TRAINERS)
def test_held_out_rows_are_evaluated(trained, trainer):
    assert trained(trainer).evaluated == []
    first = [] if trainer != "grpo" else [0]
    done = trained(trainer, "valid_dataset.path=HERE/short.jsonl")
    assert done.evaluated == [*first, 10] and done.recipe.run.data["rows"] == NUM_ROWS


def checkpoints(done: Trained) -> list[int]:
    return sorted(one.step for one in scan(done.trial))


def exports(done: Trained) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in done.trial.exports.glob("step-*"))


# section -> when it is due, and steps at which something happens without it
DUE = {
    "saver": (exports, set()),
    "evaluator": (lambda done: done.evaluated, {0, 10}),
    "recover": (checkpoints, {10}),
}
PERIODS = {"freq_epochs": (1, {4, 8}), "freq_steps": (3, {3, 6, 9}), "freq_secs": (45, {5, 10})}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("section", DUE)
def test_what_happens_from_time_to_time(trained, section, period, trainer):
    due, anyway = DUE[section]
    value, steps = PERIODS[period]
    more = ["recover.mode=auto", "recover.keep=9"] if section == "recover" else []
    done = trained(trainer, f"{section}.{period}={value}", "valid_dataset.path=HERE/short.jsonl", *more)
    assert set(due(done)) - anyway == steps - anyway


@pytest.mark.parametrize("trainer", TRAINERS)
def test_metrics_go_where_they_are_asked_for(trained, trainer, tmp_path, monkeypatch):
    runs: dict[str, dict] = {}

    def ignore(*_: Any, **__: Any) -> None: ...

    def init(name: str):
        run = SimpleNamespace(log=ignore, finish=lambda: None, id="x", define_metric=ignore)
        return lambda **options: runs.update({name: options}) or run

    made = SimpleNamespace(init=init("wandb"), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", made)
    other = SimpleNamespace(init=init("swanlab"), log=lambda *_, **__: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "swanlab", other)
    trackio = SimpleNamespace(init=init("trackio"), log=ignore, finish=ignore)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    wanted = [
        "trackio.mode=local",
        "trackio.name=n",
        "tensorboard.path=HERE/board",
        "wandb.mode=offline",
        "wandb.tags=[a]",
        "swanlab.mode=local",
    ]
    trained(trainer, *(f"stats_logger.{one}" for one in wanted))
    assert runs["wandb"]["tags"] == ["a"] and runs["swanlab"]["mode"] == "local"
    assert runs["trackio"]["name"] == "n"
    assert list((tmp_path / "board").iterdir())


def test_the_mode_says_whether_checkpoints_are_saved_and_loaded(trained):
    saved = trained("sft", "recover.mode=auto", "recover.freq_steps=5")
    assert checkpoints(saved) == [5, 10]
    again = trained("sft", "recover.mode=auto", "total_train_steps=12", trial=saved.trial)
    assert len(again.seen) == 2 * BATCH_SIZE
    assert checkpoints(trained("sft", "recover.mode=disabled", "recover.freq_steps=5")) == []


def test_a_trial_is_given_up_after_its_retries(trained, monkeypatch, tmp_path):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("of the test")

    monkeypatch.setattr(Engine, "train_batch", fail)
    trial = Trial(tmp_path / "trial")
    for number, error in enumerate((RuntimeError, RuntimeError, GivenUp)):
        with pytest.raises(error):
            trained("sft", "recover.mode=auto", "recover.retries=1", trial=trial)
        event = {"event": "exited", "role": "trainer", "incarnation": 0, "code": 1}
        trial.attempt(f"7.{number}").events.write_text(json.dumps(event) + "\n")
