"""Direct preference optimization: hand-computed losses, the frozen reference, and a step of a real model."""

import math

import numpy as np
import plain_training
import pytest
import torch
from recipes import RecordingEngine, make_run
from small_engines import config_of

from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import DPOConfig
from hpc_rl.config.options.training import DPOEngineConfig, MicroBatchSpec
from hpc_rl.engines.base import MicroBatch
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.trainers.dpo import compute_ipo_loss, compute_sigmoid_loss, make_dpo_task
from hpc_rl.trainers.supervised import SupervisedRecipe

# four completions of three tokens: two pairs of chosen and rejected
LOGPROBS = [[-1.0, -2.0, -1.0], [-3.0, -1.0, -1.0], [-2.0, -2.0, -2.0], [-1.0, -0.5, -0.5]]
REFERENCE = [[-1.5, -2.0, -1.5], [-2.0, -1.0, -1.0], [-2.0, -1.5, -2.0], [-1.0, -1.0, -1.0]]
RATIOS = torch.tensor([[1.0, -1.0], [-0.5, 1.0]])  # log pi / ref of whole completions


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def batch_of(logprobs: list[list[float]], reference: list[list[float]]) -> MicroBatch:
    values_T = torch.tensor(logprobs).flatten().requires_grad_()
    mask_T = torch.ones(12, dtype=torch.bool)
    columns = {"loss_mask": mask_T, "ref": torch.tensor(reference).flatten()}
    return MicroBatch(values_T, torch.zeros(12), columns, torch.arange(4).repeat_interleave(3))


def test_the_loss_of_two_pairs_by_hand():
    task = make_dpo_task(DPOEngineConfig(path="m", beta=0.5), RecordingEngine())
    batch = batch_of(LOGPROBS, REFERENCE)
    loss, sums = task.loss(batch)
    # margins 0.5 * (1 - -1) = 1 and 0.5 * (-0.5 - 1) = -0.75
    assert loss.item() == pytest.approx(softplus(-1.0) + softplus(0.75))
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(
        {"num_correct": 1, "margin": 0.25, "chosen": 0.25, "rejected": 0.0}
    )
    loss.backward()
    first, second = -0.5 / (1 + math.exp(1.0)), -0.5 / (1 + math.exp(-0.75))
    wanted = np.repeat([first, -first, second, -second], 3)
    assert batch.logprobs_T.grad.tolist() == pytest.approx(wanted.tolist())


def test_label_smoothing_mixes_the_loss_with_the_one_of_the_other_order():
    by_hand = [0.9 * softplus(-1.0) + 0.1 * softplus(1.0), 0.9 * softplus(0.75) + 0.1 * softplus(-0.75)]
    assert compute_sigmoid_loss(RATIOS, 0.5, 0.1).tolist() == pytest.approx(by_hand)
    turned = compute_sigmoid_loss(RATIOS.flip(1), 0.5)
    torch.testing.assert_close(compute_sigmoid_loss(RATIOS, 0.5, 1.0), turned)


def test_ipo_is_a_square_around_half_a_margin():
    assert compute_ipo_loss(RATIOS, 0.5).tolist() == pytest.approx([(2 - 1) ** 2, (-1.5 - 1) ** 2])
    options = DPOEngineConfig(path="m", beta=0.5, loss_type="ipo")
    loss, _ = make_dpo_task(options, RecordingEngine()).loss(batch_of(LOGPROBS, REFERENCE))
    assert loss.item() == pytest.approx(7.25)


def test_the_policy_that_equals_its_reference_has_the_loss_of_a_coin():
    task = make_dpo_task(DPOEngineConfig(path="m", beta=0.3), RecordingEngine())
    loss, sums = task.loss(batch_of(REFERENCE, REFERENCE))
    assert loss.item() == pytest.approx(2 * math.log(2))
    assert sums["margin"] == sums["num_correct"] == 0


def test_a_rank_without_rows_reports_the_same_names():
    task = make_dpo_task(DPOEngineConfig(path="m"), RecordingEngine())
    zero = torch.zeros(0, requires_grad=True)
    empty = MicroBatch(zero, zero, {"ref": torch.zeros(0)}, torch.zeros(0, dtype=torch.long))
    loss, sums = task.loss(empty)
    assert loss == 0 and loss.requires_grad
    assert sums.keys() == task.loss(batch_of(LOGPROBS, REFERENCE))[1].keys()


def make_recipe(tmp_path, options: DPOEngineConfig, reference, engine=None) -> SupervisedRecipe:
    dataset = DatasetConfig(path="x.jsonl", batch_size=2, shuffle=False, type="dpo")
    config = DPOConfig(experiment_name="e", trial_name="t", train_dataset=dataset, model=options)
    rng = np.random.default_rng(0)
    pairs = []
    for number in range(4):
        ids = [rng.integers(2, 32, size=5 + number + more).astype(np.int32) for more in (0, 2)]
        pairs.append((*ids, *(np.arange(len(one)) >= 3 for one in ids)))
    run = make_run(tmp_path, config, engine)
    return SupervisedRecipe(run, make_dpo_task(options, reference), pairs, pairs[:1])


def test_a_step_asks_the_reference_once_and_reports_rewards(tmp_path):
    reference = RecordingEngine(logprob=-1.5)
    recipe = make_recipe(tmp_path, DPOEngineConfig(path="m", beta=0.5), reference)
    recipe.update(1, recipe.batch(1))
    ((rows, weight, temperature),) = recipe.run.engine.updates
    assert (weight, temperature, len(rows)) == (2.0, 1.0, 4)
    assert [int(mask.sum()) for mask in rows.columns["loss_mask"]] == [2, 4, 3, 5]
    assert rows.columns["ref"][1].tolist() == [0, 0, 0, -1.5, -1.5, -1.5, -1.5]
    numbers = recipe.run.stats.take()
    assert numbers["num_tokens"] == 5 + 7 + 6 + 8


def test_evaluation_is_on_whole_completions(tmp_path):
    recipe = make_recipe(tmp_path, DPOEngineConfig(path="m", beta=0.5), RecordingEngine(logprob=-1.5))
    # log pi / ref of 2 and 4 tokens: 1 and 2
    wanted = {"eval_loss": softplus(0.5), "eval_accuracy": 0.0, "eval_margin": -0.5}
    assert recipe.evaluate(1) == pytest.approx(wanted)


def test_a_real_model_learns_pairs_as_the_formula_on_plain_logits_says(tmp_path):
    plain_training.write_model(tmp_path / "m", plain_training.ARCHITECTURES["qwen3"])
    options = DPOEngineConfig(
        **vars(config_of(tmp_path / "m", mb_spec=MicroBatchSpec(granularity=2, n_mbs=2))), beta=0.5
    )
    engine, reference = FSDPEngine(options), FSDPEngine(options, frozen=True, name="ref")
    engine.initialize(20)
    reference.initialize(0)
    recipe = make_recipe(tmp_path, options, reference, engine)
    losses = []
    for step in range(1, 9):
        pairs = recipe.batch(1)
        engine.model.eval()
        losses.append(compute_plain_loss(engine.model.hf, reference.model.hf, pairs, 0.5))
        recipe.update(step, pairs)
        numbers = recipe.run.stats.take()
        assert numbers["loss"] == pytest.approx(losses[-1], abs=1e-5)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and losses[-1] < 0.9 * losses[0]
    assert numbers["accuracy"] == 1 and numbers["margin"] > 0


@torch.no_grad()
def compute_plain_loss(policy, reference, pairs, beta: float) -> float:
    total = 0.0
    for chosen, rejected, *masks in pairs:
        ratios = []
        for ids, mask in zip((chosen, rejected), masks, strict=True):
            ids_T = torch.from_numpy(ids).long()
            both = [
                torch.log_softmax(model(input_ids=ids_T[None]).logits[0], 1)[:-1].gather(1, ids_T[1:, None])
                for model in (policy, reference)
            ]
            ratios.append(float((both[0] - both[1])[torch.from_numpy(mask[1:])].sum()))
        total += softplus(-beta * (ratios[0] - ratios[1]))
    return total / len(pairs)
