"""The schedule by hand. engines/test_engine_options.py tests the updates."""

import pytest
import torch
import transformers

from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.training import OptimizerConfig, PPOActorConfig
from hpc_rl.config.schedule import (
    compute_learning_rate,
    compute_step_rate,
    find_highest_rate,
    is_length_exact,
)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125]),
    ],
)
def test_warmup_then_shape(kind: str, want: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, lr_scheduler_type=kind, warmup_steps_proportion=0.2, min_lr_ratio=0.1)
    assert [compute_learning_rate(config, update, 10) for update in range(10)] == pytest.approx(want)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_warmup_from_zero_is_that_of_hugging_face(kind: str) -> None:
    config = OptimizerConfig(
        lr=0.5, lr_scheduler_type=kind, warmup_steps_proportion=0.25, warmup_from_zero=True
    )
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    name = "constant_with_warmup" if kind == "constant" else kind
    # 2.5 updates are rounded up
    schedule = transformers.get_scheduler(name, made, num_warmup_steps=3, num_training_steps=10)
    want = []
    for _ in range(10):
        want += schedule.get_last_lr()
        made.step()
        schedule.step()
    assert want[:4] == pytest.approx([0, 0.5 / 3, 1 / 3, 0.5])
    assert [compute_learning_rate(config, update, 10) for update in range(10)] == pytest.approx(want)


def test_cosine_is_half_way_in_the_middle_and_stays_at_the_end() -> None:
    config = OptimizerConfig(
        lr=2.0, lr_scheduler_type="cosine", warmup_steps_proportion=0.0, min_lr_ratio=0.5
    )
    assert [compute_learning_rate(config, update, 8) for update in (0, 2, 4, 8, 20)] == pytest.approx(
        [2.0, 1.5 + 0.5 * 0.5**0.5, 1.5, 1.0, 1.0]
    )


def make_config(**more) -> GRPOConfig:
    dataset = DatasetConfig(path="x.jsonl", batch_size=2, max_length=more.pop("max_length", None))
    optimizer = OptimizerConfig(lr=0.5, lr_scheduler_type="linear", warmup_steps_proportion=0.0)
    return GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=dataset,
        gconfig=GenerationHyperparameters(n_samples=4),
        actor=PPOActorConfig(path="m", optimizer=optimizer, ppo_n_minibatches=4),
        **more,
    )


def test_a_steps_rate_is_that_of_its_first_update() -> None:
    config = make_config(total_train_steps=10, total_train_epochs=None)
    assert [compute_step_rate(config, step, None) for step in (1, 6, 11)] == [0.5, 0.25, 0.0]
    assert compute_step_rate(config, 6, None) == compute_learning_rate(config.actor.optimizer, 5 * 4, 10 * 4)


def test_epochs_need_the_number_of_rows_and_dropped_rows_make_them_shorter() -> None:
    config = make_config(total_train_epochs=2)
    assert compute_step_rate(config, 3, None) is None
    assert compute_step_rate(config, 3, 8) == 0.375  # step 3 of 8
    assert is_length_exact(config, 8)
    assert not is_length_exact(make_config(total_train_epochs=2, max_length=16), 8)
    assert is_length_exact(make_config(total_train_steps=2, max_length=16), 8)


def test_a_longer_warmup_rises_again() -> None:
    config = make_config(total_train_steps=100, total_train_epochs=None)
    assert find_highest_rate(config, 51, None) == 0.25
    config.actor.optimizer.warmup_steps_proportion = 0.6
    assert find_highest_rate(config, 51, None) == 0.5 > compute_step_rate(config, 51, None)
