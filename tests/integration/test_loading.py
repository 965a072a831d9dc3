"""Checkpoints in shards: bit for bit what transformers loads, and in the memory of a share."""

import json
import math
from pathlib import Path
from typing import Any

import gloo_ranks
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.core.trial import load_json

SCRIPT = Path(__file__).with_name("loading_rank.py")
SIZES = {
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
NUM_RANKS = 8
pytestmark = pytest.mark.timeout(400)


def make(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a random checkpoint of transformers."""
    config = AutoConfig.for_model(kind, **{**SIZES, "tie_word_embeddings": False, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder, max_shard_size=changes.pop("max_shard_size", "20kB"))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    make(folder / "model-qwen2", "qwen2")
    make(folder / "model-qwen3", "qwen3", head_dim=6)
    make(folder / "model-llama", "llama", dtype=torch.float16)
    tied = make(folder / "model-tied", "qwen3", head_dim=6, tie_word_embeddings=True)
    assert (tied / "model.safetensors.index.json").is_file()
    old = make(folder / "model-pickled", "llama", dtype=torch.float32)
    tensors = AutoModelForCausalLM.from_pretrained(old).state_dict()
    for path in old.glob("model*"):
        path.unlink()
    torch.save(tensors, old / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
def test_every_rank_count_loads_what_transformers_loads(models, num_ranks):
    gloo_ranks.run(SCRIPT, "equal", num_ranks, models)
    for rank in range(num_ranks):
        found = load_json(models / f"equal-{num_ranks}-{rank}.json")
        assert len(found) == 5 * 6
        assert not {name: odd for name, odd in found.items() if odd}


def write_large(folder: Path, shape: dict[str, Any]) -> None:
    """Write a random checkpoint in bfloat16, in two files, tensor by tensor; and sums of first parts of rows."""
    (folder / "large").mkdir()
    config = AutoConfig.for_model(**shape)
    config.save_pretrained(folder / "large")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    named = {name: parameter.shape for name, parameter in model.named_parameters()}
    noise = torch.randn(1 << 20).bfloat16()  # repeated: random numbers take longer than all else
    halves: list[list[str]] = [[], []]
    for index, name in enumerate(named):
        halves[index * 2 // len(named)].append(name)
    weight_map = {}
    for index, half in enumerate(halves):
        file = f"model-{index + 1:05d}-of-00002.safetensors"
        tensors = {}
        for name in half:
            size = math.prod(named[name])
            tensors[name] = noise.repeat(-(-size // len(noise)))[:size].view(named[name])
            if name == "model.layers.0.mlp.up_proj.weight":
                parts = {num: tensors[name].chunk(num)[0].float() for num in (2, NUM_RANKS)}
                sums = {num: float(rows.sum(dtype=torch.float64)) for num, rows in parts.items()}
                (folder / "sums.json").write_text(json.dumps(sums))
        save_file(tensors, folder / "large" / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(half, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "large" / "model.safetensors.index.json").write_text(json.dumps(index))


def check_memory(folder: Path, shape: dict[str, Any], engine: str = "fsdp") -> None:
    write_large(folder, shape)
    script = {"fsdp": SCRIPT, "megatron": SCRIPT.with_name("megatron_rank.py")}[engine]
    gloo_ranks.run(script, "memory", NUM_RANKS, folder, timeout_s=380)
    found = [load_json(folder / f"memory-{rank}.json") for rank in range(NUM_RANKS)]
    print(json.dumps(found))
    for one in found:
        assert one["peak_bytes"] <= 1.3 * (one["share_bytes"] + one["block_bytes"] + 300e6)


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("megatron", marks=pytest.mark.soak)])
def test_loading_takes_the_memory_of_a_share(tmp_path, engine):
    smaller = {"vocab_size": 50_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    check_memory(tmp_path, {**QWEN_1_5B, **smaller, "num_attention_heads": 8}, engine)


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_a_checkpoint_of_1_5b_parameters_takes_the_memory_of_a_share(tmp_path, engine):
    check_memory(tmp_path, QWEN_1_5B, engine)
