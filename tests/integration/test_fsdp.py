"""The FSDP2 engine on 2 and 3 gloo ranks against one process: training, refusals, recover state."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import fsdp_rank  # noqa: E402
import gloo_ranks  # noqa: E402

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
pytestmark = pytest.mark.timeout(240)


def run_ranks(scenario: str, num_ranks: int, folder: Path) -> None:
    gloo_ranks.run(HERE / "fsdp_rank.py", scenario, num_ranks, folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_close(one: Path, other: Path, atol: float) -> None:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process and then two ranks have run the training scenario."""
    path = tmp_path_factory.mktemp("fsdp")
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text(json.dumps(ARCHITECTURE))
    fsdp_rank.scenario_train(path, 0, 1)
    torch.distributed.destroy_process_group()  # of the bfloat16 engine
    run_ranks("train", 2, path)
    return path


def result(folder: Path, num_ranks: int, rank: int = 0) -> dict:
    return json.loads((folder / f"train-{num_ranks}-{rank}.json").read_text())


@pytest.mark.parametrize("variant", ["plain", "three", "recompute", "in_cpu_memory"])
def test_two_ranks_train_as_one_does(folder: Path, variant: str) -> None:
    one, two, other = result(folder, 1), result(folder, 2), result(folder, 2, rank=1)
    for mine, theirs in zip(two[variant]["results"], one["plain"]["results"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert two[variant]["results"] == other[variant]["results"]
    assert two[variant]["logprob_sum"] + other[variant]["logprob_sum"] == pytest.approx(
        one["plain"]["logprob_sum"], abs=1e-4
    )
    assert_close(folder / f"2-{variant}", folder / "1-plain", atol=1e-5)


def test_two_ranks_twice_give_the_same_bits(folder: Path) -> None:
    assert_close(folder / "2-again", folder / "2-plain", atol=0.0)


def test_bfloat16_trains_alike_on_one_and_two_ranks(folder: Path) -> None:
    for mine, theirs in zip(result(folder, 2)["bfloat16"], result(folder, 1)["bfloat16"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-2)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(folder: Path) -> None:
    for rank in range(2):
        assert result(folder, 2, rank)["skipped"] == {"update_successful": 0.0, "unchanged": True}


def test_what_rank_0_alone_fetched_is_on_every_rank_as_it_was(folder: Path) -> None:
    for rank in range(2):
        assert result(folder, 2, rank)["from_rank0"] == ["as made", "as made", "as made", "lineage 1 asks"]


def test_a_row_that_does_not_fit_is_refused_on_all_ranks(folder: Path) -> None:
    for rank in range(2):
        assert "max_tokens_per_mb" in result(folder, 2, rank)["refused"][0]


def test_state_moves_from_two_ranks_to_one_to_three(folder: Path) -> None:
    uninterrupted = fsdp_rank.engine_of(folder, 0, 1)
    fsdp_rank.train(uninterrupted, range(2))
    one = fsdp_rank.engine_of(folder, 0, 1)
    one.load(folder / "state-2", saved_num_ranks=2)
    (folder / "moved-1").mkdir()
    one.save(folder / "moved-1")
    one.export(folder / "loaded-1")
    run_ranks("resume", 3, folder)
    assert_close(folder / "loaded-3", folder / "loaded-1", atol=0.0)
    went_on = fsdp_rank.train(uninterrupted, range(2, 4))
    uninterrupted.export(folder / "uninterrupted")
    resumed = json.loads((folder / "resume-3-0.json").read_text())
    for mine, theirs in zip(resumed, went_on, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert_close(folder / "resumed-3", folder / "uninterrupted", atol=2e-5)


def test_damage_met_by_one_rank_makes_all_ranks_load_the_one_before(folder):
    run_ranks("walk_back", 2, folder)
    answers = [json.loads((folder / f"walk_back-{rank}.json").read_text()) for rank in (0, 1)]
    assert answers == [{"step": 1, "same": True, "updates": 1}] * 2
    aside = [path.name.partition(".")[0] for path in (folder / "trial" / "recover" / "set-aside").iterdir()]
    assert aside == ["gen-00000002"]
