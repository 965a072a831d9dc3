"""The estimate of a rank's memory against two real ranks on the CPU, by their resident memory."""

import json
import sys
from pathlib import Path

import gloo_ranks
import pytest

from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core.allocation import parse
from hpc_rl.core.trial import load_json
from hpc_rl.plan.memory import ModelShape, RankLoad, RankMemory, estimate_rank_memory

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc has the memory of a process"),
]
NUM_RANKS = 2
CLOSE = 0.15
# for megatron, whose peak on these small models was measured 14 to 16 % above the estimate
MEGATRON_CLOSE = 0.2
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def case(
    vocab: int,
    tokens: int,
    dtype: str,
    checkpointing: bool = True,
    mesh: str = f"fsdp:d{NUM_RANKS}",
    saves: bool = False,
    use_lora: bool = False,
) -> dict:
    return {
        "mesh": mesh,
        "model": f"vocab-{vocab}",
        "vocab": vocab,
        "tokens": tokens,
        "dtype": dtype,
        "checkpointing": checkpointing,
        "saves": saves,
        "use_lora": use_lora,
    }


CASES = {  # each moment of the estimate is the largest in one of them
    "layers": case(256, 2048, "float32"),
    "nothing recomputed": case(2000, 1024, "float32", checkpointing=False),
    "large vocabulary": case(32000, 256, "float32", saves=True),
    "fsdp:t2": case(256, 2048, "float32", mesh="fsdp:t2"),
    "megatron:t2": case(256, 2048, "float32", mesh="megatron:t2"),
    "adapter": case(64000, 128, "float32", use_lora=True),
}
SLOW_CASES = {
    "layers, bfloat16": case(256, 4096, "bfloat16"),
    "long": case(256, 4096, "float32"),
    "fsdp:c2": case(256, 2048, "float32", mesh="fsdp:c2"),
    "megatron:p2": case(256, 2048, "float32", mesh="megatron:p2"),
}
LARGEST = {
    "layers": "the backward pass of a layer",
    "layers, bfloat16": "the backward pass of a layer",
    "nothing recomputed": "the loss",
    "large vocabulary": "the sum of gradients outside of the layers",
    "adapter": "the gather outside of the layers",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return measure(tmp_path_factory.mktemp("ranks"), CASES, [])


@pytest.fixture(scope="module")
def slowly_measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return measure(tmp_path_factory.mktemp("slow"), SLOW_CASES, [SLOW_CASES["layers, bfloat16"]])


def measure(folder: Path, cases: dict[str, dict], more: list[dict]) -> list[dict]:
    """Return what each rank took for each case, after warming up with small cases and `more`."""
    for vocab in {256, *(one["vocab"] for one in cases.values())}:
        (folder / f"vocab-{vocab}").mkdir()
        content = MODEL | {"vocab_size": vocab}
        (folder / f"vocab-{vocab}" / "config.json").write_text(json.dumps(content))
    small = [case(256, 64, "float32", mesh=mesh, saves=True) for mesh in ("fsdp:d2", "megatron:d2")]
    (folder / "cases.json").write_text(json.dumps({"cases": cases, "warm_up": [*small, *more]}))
    with pytest.MonkeyPatch.context() as patch:
        # what is freed goes back at once, so that resident memory is what is in use
        for name, value in (("MMAP_THRESHOLD", "262144"), ("TRIM_THRESHOLD", "262144")):
            patch.setenv(f"MALLOC_{name}_", value)
        patch.setenv("MALLOC_ARENA_MAX", "1")
        gloo_ranks.run(Path(__file__).with_name("memory_rank.py"), "measure", NUM_RANKS, folder)
    return [load_json(folder / f"measured-{rank}.json") for rank in range(NUM_RANKS)]


def estimated(one: dict) -> RankMemory:
    engine = TrainEngineConfig(
        path="/m",
        attn_impl="sdpa",
        dtype=one["dtype"],
        gradient_checkpointing=one["checkpointing"],
        use_lora=one["use_lora"],
    )
    shape = ModelShape.of(MODEL | {"vocab_size": one["vocab"]})
    mesh = parse(one["mesh"]).train
    load = RankLoad(
        shape=shape,
        engine=engine,
        mesh=mesh,
        micro_batches=2 // (mesh.d or 1),
        on_gpu=False,
        tokens=one["tokens"],
        longest=one["tokens"] // 2,
        saves=True,
        saves_copies=True,
    )
    return estimate_rank_memory(load)


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_rank_is_near_the_estimate(name, measured):
    check(CASES[name], name, measured)


@pytest.mark.soak
@pytest.mark.parametrize("name", SLOW_CASES)
def test_the_peak_of_a_rank_of_a_slow_case_is_near_the_estimate(name, slowly_measured):
    check(SLOW_CASES[name], name, slowly_measured)


def check(one: dict, name: str, measured: list[dict]) -> None:
    memory = estimated(one)
    assert memory.largest == LARGEST.get(name, memory.largest)
    close = MEGATRON_CLOSE if name.startswith("megatron") else CLOSE
    for rank in measured:
        assert memory.device_bytes == pytest.approx(rank[name]["train"], rel=close)


def test_buffers_of_checkpoints_and_of_published_weights_are_near_the_estimate(measured):
    name = "large vocabulary"
    memory, (first, second) = estimated(CASES[name]), measured
    for rank in (first, second):
        copied = memory.host["copy of the state to be saved"]
        assert copied == pytest.approx(rank[name]["snapshot"], rel=CLOSE)
    # the first rank collects all weights; beside them the largest tensor is gathered, as on the others
    weights, table_bytes = memory.first["a file of weights"], 4 * 32000 * MODEL["hidden_size"]
    assert weights < first[name]["publish"] < (1 + CLOSE) * (weights + table_bytes), first[name]
    assert second[name]["publish"] < 2.5 * table_bytes, second[name]
