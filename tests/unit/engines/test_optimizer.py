"""The schedule by hand. What an update does is in test_engine_options.py."""

import pytest

from hpc_rl.config.sections.training import OptimizerConfig
from hpc_rl.engines.optimizer import learning_rate


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
    assert [learning_rate(config, update, 8) for update in (0, 2, 4, 8, 20)] == pytest.approx(
        [2.0, 1.5 + 0.5 * 0.5**0.5, 1.5, 1.0, 1.0]
    )
