"""GRPO of the recipe on every engine against the formulas in float64: weights after ten steps, and resumed."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import gloo_ranks  # noqa: E402
import grpo_rank  # noqa: E402
import grpo_scenarios as scenarios  # noqa: E402

from hpc_rl.config.options.training import TrainEngineConfig  # noqa: E402
from hpc_rl.engines.base import Engine  # noqa: E402
from hpc_rl.engines.fsdp.engine import FSDPEngine  # noqa: E402

NAMES = list(scenarios.SCENARIOS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grpo")
    scenarios.write_model(path / "model")
    scenarios.write_batches(path / "model", path)
    return path


class Wanted(dict[str, dict[str, torch.Tensor]]):
    """The weights that the formulas give, by scenario; each is computed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> dict[str, torch.Tensor]:
        self[name] = scenarios.compute(self.folder, scenarios.SCENARIOS[name].options)
        return self[name]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Wanted:
    return Wanted(folder)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_one_rank_trains_as_the_formulas_do(folder, wanted, tmp_path, layout, name):
    def make_engine(config: TrainEngineConfig, model: str, frozen: bool) -> Engine:
        return FSDPEngine(config, name=model, frozen=frozen, layout=layout)

    found, resumed = scenarios.Training(folder, name, make_engine).run(tmp_path / "out")
    print(f"gap {scenarios.check(found, resumed, wanted[name]):.2g}")  # `pytest -rP` shows it


@pytest.mark.parametrize("name", NAMES)
def test_another_value_of_an_option_is_noticed(folder, wanted, name):
    scenario = scenarios.SCENARIOS[name]
    changed = scenarios.compute(folder, {**scenario.options, **scenario.control})
    gap = scenarios.measure_gap(changed, wanted[name])
    print(f"gap {gap:.2g}")
    assert gap > 2 * scenarios.TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_a_scenario_matters(folder, wanted, name):
    options = scenarios.SCENARIOS[name].options
    for left_out in options:
        without = {option: value for option, value in options.items() if option != left_out}
        gap = scenarios.measure_gap(scenarios.compute(folder, without), wanted[name])
        assert gap > 2 * scenarios.TOLERANCE, left_out


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    gloo_ranks.run(HERE / "grpo_rank.py", "train", 2, folder, timeout_s=900)
    return folder


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", grpo_rank.ENGINES)
def test_two_ranks_train_as_the_formulas_do(two_ranks, wanted, engine, name):
    out = grpo_rank.find_folder(two_ranks, engine, name)
    found, resumed = (load_file(out / f"{kind}.safetensors") for kind in ("found", "resumed"))
    print(f"gap {scenarios.check(found, resumed, wanted[name]):.2g}")  # `pytest -rP` shows it
