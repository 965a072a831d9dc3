"""The FSDP2 engine by tensor, context and data parallel ranks, against plain transformers and torch."""

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import gloo_ranks  # noqa: E402
import layout_rank  # noqa: E402
import plain_lora  # noqa: E402
import plain_objectives  # noqa: E402
import plain_training  # noqa: E402
import published_weights  # noqa: E402

from hpc_rl.core.allocation import parse  # noqa: E402
from hpc_rl.engines.fsdp.engine import FSDPEngine  # noqa: E402
from hpc_rl.engines.shared.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, plain_training.Trained]]:
    folder, trained = tmp_path_factory.mktemp("layouts"), {}
    for name, architecture in plain_training.ARCHITECTURES.items():
        plain_training.write_model(folder / name, architecture)
        trained[name] = plain_training.plain(folder / name)
    for name in {architecture for architecture, *_ in layout_rank.ADAPTERS.values()}:
        plain_lora.write_adapter(folder / name, folder / f"{name}-adapter")
    return folder, trained


@pytest.fixture(scope="module")
def two(models):
    gloo_ranks.run(HERE / "layout_rank.py", "train", 2, models[0])
    return models


@pytest.fixture(scope="module")
def four(models):
    gloo_ranks.run(HERE / "layout_rank.py", "train", 4, models[0])
    return models


@pytest.mark.parametrize("case", layout_rank.CASES[2])
def test_two_ranks_train_as_transformers_does(two, case):
    check(*two, 2, case)


@pytest.mark.parametrize("case", layout_rank.ADAPTERS)
def test_two_ranks_train_an_adapter_as_peft_does(two, case):
    folder, architecture = two[0], layout_rank.ADAPTERS[case][0]
    model, adapter = folder / architecture, folder / f"{architecture}-adapter"
    trained = plain_lora.plain(model, adapter)
    plain_lora.check(model, adapter, trained, folder / f"adapter-{case}", 2)


@pytest.mark.soak
@pytest.mark.parametrize("case", layout_rank.CASES[4])
def test_four_ranks_train_as_transformers_does(four, case):
    check(*four, 4, case)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_chains_of_fifty_versions_equal_exports(models, tmp_path, monkeypatch):
    monkeypatch.setenv(published_weights.LENGTH_VARIABLE, "50")
    for kind in plain_training.ARCHITECTURES:
        for source in models[0].glob(f"{kind}*"):  # the model, and its adapter
            shutil.copytree(source, tmp_path / source.name)
    gloo_ranks.run(HERE / "layout_rank.py", "train", 2, tmp_path, timeout_s=1200)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_one_rank_trains_as_transformers_does(models, tmp_path, layout):
    folder, trained = models
    engine = FSDPEngine(plain_training.config_of(folder / "qwen3"), layout=layout)
    engine.initialize(plain_training.NUM_STEPS)
    plain_training.train(engine, tmp_path)
    plain_training.check(trained["qwen3"], folder / "qwen3", tmp_path, 1, 1)


@pytest.fixture(scope="module")
def objectives(models):
    folder = models[0]
    plain_objectives.make_critic(folder / "qwen3", folder / "critic")
    gloo_ranks.run(HERE / "layout_rank.py", "objectives", 2, folder)
    return folder, {
        kind: plain_objectives.plain(folder / model, kind)
        for kind, model in (("critic", "critic"), ("dpo", "qwen3"), ("top", "qwen3"))
    }


@pytest.mark.parametrize("case", layout_rank.OBJECTIVES)
def test_two_ranks_train_other_objectives_as_plain_code_does(objectives, case):
    folder, wanted = objectives
    plain_objectives.check(plain_objectives.read(folder / case, 2), wanted[case.split()[0]])


@pytest.mark.parametrize("kind", layout_rank.KINDS)
def test_one_rank_trains_other_objectives_as_plain_code_does(objectives, kind):
    folder, wanted = objectives
    engine = layout_rank.objective_engine(folder, kind, "fsdp:d1", 0)
    plain_objectives.check([plain_objectives.train(engine, kind)], wanted[kind])


def check(folder: Path, trained: dict[str, plain_training.Trained], num_ranks: int, case: str) -> None:
    architecture, allocation, *_ = layout_rank.CASES[num_ranks][case]
    mesh = Mesh.of(parse(allocation).train, 0, num_ranks)
    plain_training.check(
        trained[architecture], folder / architecture, folder / case, num_ranks, mesh.num_data_ranks
    )
