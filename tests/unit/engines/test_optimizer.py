"""The schedule by hand, and AdamW over shards against torch's own on whole parameters."""

import pytest
import torch

from hpc_rl.config.sections.training import OptimizerConfig
from hpc_rl.engines.optimizer import Optimizer, learning_rate, shards_of


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125]),
    ],
)
def test_warmup_then_shape(kind: str, want: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, lr_scheduler_type=kind, warmup_steps_proportion=0.2, min_lr_ratio=0.1)
    assert [learning_rate(config, update, 10) for update in range(10)] == pytest.approx(want)


def test_cosine_is_half_way_in_the_middle_and_stays_at_the_end() -> None:
    config = OptimizerConfig(
        lr=2.0, lr_scheduler_type="cosine", warmup_steps_proportion=0.0, min_lr_ratio=0.5
    )
    assert [learning_rate(config, update, 8) for update in (0, 4, 8, 20)] == pytest.approx(
        [2.0, 1.5, 1.0, 1.0]
    )


def test_steps_equal_torch_adamw_with_clipping() -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, gradient_clipping=0.5)
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(5)]
    ours = {str(i): torch.nn.Parameter(x.clone()) for i, x in enumerate(start)}
    theirs = [torch.nn.Parameter(x.clone()) for x in start]
    optimizer = Optimizer(config, shards_of(ours))
    adam = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5)
    for scale in (1.0, 0.01, 3.0):
        for mine, other in zip(ours.values(), theirs, strict=True):
            other.grad = scale * torch.randn_like(other)
            mine.grad = other.grad.clone()
        want_norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5).item()
        norm = optimizer.squared_norm() ** 0.5
        assert norm == pytest.approx(want_norm, rel=1e-5)
        optimizer.step(1e-2, norm)
        adam.step()
        optimizer.zero_grad()
    for mine, other in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)
