"""Recover state of parameters of any shape."""

import torch
from torch import nn

from hpc_rl.config.sections.training import OptimizerConfig
from hpc_rl.engines import state
from hpc_rl.engines.optimizer import Optimizer, Shard


def part(values: dict[str, torch.Tensor]) -> tuple[list[Shard], Optimizer]:
    shards = []
    for name, value in values.items():
        parameter = nn.Parameter(value.clone())
        shards.append(Shard(name, parameter, parameter.data, tuple(value.shape), 0))
    return shards, Optimizer(OptimizerConfig(), shards)


def test_a_parameter_without_dimensions_comes_back(tmp_path):
    """As a learnt temperature or gate."""
    values = {"scale": torch.tensor(2.5), "w": torch.arange(6.0).reshape(3, 2)}
    shards, optimizer = part(values)
    for shard in shards:
        shard.parameter.grad = torch.ones_like(shard.local)
    optimizer.step(lr=0.1, grad_norm=1.0)
    files = state.RankState(0, 1, shards, optimizer).take({"updates": 1}, None).write(tmp_path)
    loaded, its_optimizer = part({name: torch.zeros_like(value) for name, value in values.items()})
    counters = state.RankState(0, 1, loaded, its_optimizer).load(
        tmp_path, 1, {file.name: file for file in files}
    )
    assert counters["updates"] == 1
    for one, other in zip(shards, loaded, strict=True):
        assert torch.equal(one.parameter, other.parameter)
        assert all(map(torch.equal, optimizer.moments[one.name], its_optimizer.moments[one.name]))
    model, _ = part({name: torch.zeros_like(value) for name, value in values.items()})
    state.RankState(0, 1, model, None).load(tmp_path, 1, {file.name: file for file in files})
    assert torch.equal(model[0].parameter, shards[0].parameter)
