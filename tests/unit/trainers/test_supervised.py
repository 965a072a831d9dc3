"""What a step of SFT and of a reward model asks of the engine, and their losses."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recipes import make_run

from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import RWConfig, SFTConfig
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core.errors import DataUnusable
from hpc_rl.datasets.encode import Prompts
from hpc_rl.engines.base import MicroBatch, Sequences
from hpc_rl.engines.shared.logprobs import token_logprobs
from hpc_rl.trainers.supervised import (
    REWARD_MODEL,
    SFT,
    SupervisedRecipe,
    compute_pairwise_loss,
    compute_sequence_loss,
    evaluate_loss,
)


def sft_recipe(tmp_path, num_rows: int = 7, batch_size: int = 3, held_out=None) -> SupervisedRecipe:
    config = SFTConfig(
        experiment_name="e",
        trial_name="t",
        seed=3,
        total_train_epochs=2,
        train_dataset=DatasetConfig(path="x.jsonl", batch_size=batch_size),
        model=TrainEngineConfig(path="m"),
    )
    rows = [(np.full(4, i, np.int32), np.array([False, False, True, True])) for i in range(num_rows)]
    return SupervisedRecipe(make_run(tmp_path, config), SFT, rows, held_out)


def test_sft_batches_follow_from_the_step_and_visit_each_row_once_an_epoch(tmp_path):
    recipe, again = sft_recipe(tmp_path), sft_recipe(tmp_path)
    seen = [int(ids[0]) for step in range(1, 8) for ids, _ in recipe.batch(step)]
    assert sorted(seen[:7]) == sorted(seen[7:14]) == list(range(7)) and seen[:7] != seen[7:14]
    assert [int(ids[0]) for ids, _ in again.batch(5)] == seen[12:15]
    assert recipe.total_steps == 4  # 14 rows, 3 a batch
    assert [recipe.position(step) for step in (0, 2, 3)] == [(0, 0), (0, 6), (1, 2)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_come_in_the_order_that_is_configured(tmp_path, shuffle):
    recipe = sft_recipe(tmp_path)
    dataset = recipe.config.train_dataset
    dataset.path, dataset.shuffle = str(tmp_path / "rows.jsonl"), shuffle
    rows = [int(ids[0]) for step in (1, 2) for ids, _ in recipe.batch(step)]
    assert (rows == list(range(6))) != shuffle
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n' * 7)
    tokenizer = SimpleNamespace(encode=lambda text: [1])
    prompts = Prompts(dataset, tokenizer, recipe.config.seed)
    assert [prompts.at(index).row for index in range(6)] == rows


def test_sft_trains_on_completion_tokens(tmp_path):
    recipe = sft_recipe(tmp_path)
    recipe.update(1, recipe.batch(1))
    ((rows, weight, temperature),) = recipe.run.engine.updates
    assert len(rows) == 3 and weight == 6.0 and temperature == 1.0
    assert recipe.run.stats.take()["loss"] == pytest.approx(1.0)


def test_sft_whose_updates_were_never_finite_is_not_done(tmp_path, monkeypatch):
    recipe = sft_recipe(tmp_path)
    engine = recipe.run.engine
    train_batch = engine.train_batch
    monkeypatch.setattr(
        engine, "train_batch", lambda *given, **more: train_batch(*given, **more) | {"update_successful": 0.0}
    )
    monkeypatch.setattr(engine, "counters", lambda: {"adam_steps": 0})
    for step in range(1, recipe.total_steps):
        recipe.update(step, recipe.batch(step))
    assert recipe.run.stats.take()["updates_skipped"] == recipe.total_steps - 1
    with pytest.raises(DataUnusable, match="none of the 4 steps made an optimizer update"):
        recipe.update(recipe.total_steps, recipe.batch(recipe.total_steps))


def test_sft_evaluation_is_the_mean_loss_of_the_held_out_tokens(tmp_path):
    recipe = sft_recipe(tmp_path)
    recipe.held_out = recipe.rows[:2]
    assert recipe.evaluate(0) == {}
    assert recipe.evaluate(1) == {"eval_loss": 1.0, "eval_token_accuracy": 0.0}
    assert recipe.run.stats.take() == {"eval_loss": 1.0, "eval_token_accuracy": 0.0}


def test_token_accuracy_counts_the_tokens_that_greedy_sampling_takes():
    torch.manual_seed(0)
    hidden_NH, head_VH, ids_N = torch.randn(60, 8), torch.randn(30, 8), torch.randint(0, 30, (60,))
    greedy_N = (hidden_NH @ head_VH.T).argmax(1)
    ids_N[::3] = greedy_N[::3]
    mask = np.arange(60) < 48

    class Engine:
        mesh = SimpleNamespace(is_data_leader=True)

        def logprobs(self, rows, temperature):
            return [token_logprobs(hidden_NH, head_VH, ids_N, temperature)[0].numpy()]

    numbers = evaluate_loss(Engine(), Sequences([ids_N.numpy()], {"loss_mask": [mask]}))
    right = (ids_N == greedy_N).numpy()[mask].mean()
    assert 16 / 48 <= right < 1 and numbers["eval_token_accuracy"] == pytest.approx(right)


def test_a_reward_model_trains_on_the_last_tokens_of_pairs(tmp_path):
    dataset = DatasetConfig(path="x.jsonl", batch_size=2, shuffle=False, type="rw")
    config = RWConfig(
        experiment_name="e", trial_name="t", train_dataset=dataset, model=TrainEngineConfig(path="m")
    )
    pairs = [(np.full(3 + i, i, np.int32), np.full(2, 10 + i, np.int32)) for i in range(4)]
    recipe = SupervisedRecipe(make_run(tmp_path, config), REWARD_MODEL, pairs, pairs[:3])
    assert (recipe.total_steps, recipe.position(1)) == (2, (0, 2))
    recipe.update(2, recipe.batch(2))
    ((rows, weight, _),) = recipe.run.engine.updates
    assert weight == 2.0
    assert [int(ids[0]) for ids in rows.ids] == [2, 12, 3, 13]
    masks = [mask.tolist() for mask in rows.columns["loss_mask"]]
    assert masks == [[False] * num + [True] for num in (4, 1, 5, 1)]
    numbers = recipe.run.stats.take()
    assert numbers["loss"] == pytest.approx(np.log(2))
    assert (numbers["accuracy"], numbers["num_tokens"]) == (0, 15)
    assert recipe.evaluate(0) == {}
    assert recipe.evaluate(1) == pytest.approx({"eval_loss": np.log(2), "eval_accuracy": 0.0})


def test_the_loss_of_sequences_sums_over_the_mask():
    mask, zero = torch.tensor([True, False, True]), torch.zeros(3)
    batch = MicroBatch(torch.tensor([-1.0, -2.0, -4.0]), zero, {"loss_mask": mask}, zero.long())
    loss, sums = compute_sequence_loss(batch)
    assert loss == 5.0
    assert sums["num_tokens"] == 2


def test_pairs_by_hand():
    scores = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 1.0]], requires_grad=True)
    loss, sums = compute_pairwise_loss(scores)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1)) + math.log1p(math.exp(1)) + math.log(2))
    assert (sums["num_correct"].item(), sums["margin"].item()) == (1, 0.0)  # a tie is not in order
    loss.backward()
    assert scores.grad[:, 0].tolist() == pytest.approx([-1 / (1 + math.e), -math.e / (1 + math.e), -0.5])


def test_no_pairs():
    loss, sums = compute_pairwise_loss(torch.zeros(0, 2))
    assert loss.item() == 0 and sums["num_correct"].item() == 0
