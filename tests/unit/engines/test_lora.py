"""LoRA: the values of adapters, their files, and the FSDP engine on one rank, against plain peft and torch."""

import math
import shutil
from pathlib import Path

import numpy as np
import peft
import plain_lora
import plain_training
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hpc_rl.core.errors import ConfigError
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared import lora
from hpc_rl.engines.shared.offline import export_state, import_weights
from hpc_rl.trainers.supervised import compute_pair_loss, compute_sequence_loss, make_pairs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    plain_training.write_model(folder / "qwen2", plain_training.ARCHITECTURES["qwen2"])
    plain_lora.write_adapter(folder / "qwen2", folder / "adapter")
    return folder


def make_engine(folder: Path, **options) -> FSDPEngine:
    adapter = {**plain_lora.OPTIONS, "lora_path": str(folder / "adapter"), **options}
    engine = FSDPEngine(plain_training.config_of(folder / "qwen2", **adapter))
    engine.initialize(plain_lora.NUM_STEPS)
    return engine


def test_one_rank_trains_as_peft_does(model, tmp_path):
    trained = plain_lora.plain(model / "qwen2", model / "adapter")
    plain_lora.train(make_engine(model), tmp_path)
    plain_lora.check(model / "qwen2", model / "adapter", trained, tmp_path, 1)


def test_a_new_adapter_begins_as_in_peft(model):
    """B is 0, so the model is its base; A is uniform up to 1 / sqrt(inputs); other seeds give other values."""
    engines = [make_engine(model, lora_path=""), make_engine(model, lora_path="", lora_alpha=5)]
    other = FSDPEngine(plain_training.config_of(model / "qwen2", **plain_lora.OPTIONS), seed=2)
    other.initialize(1)
    shards = [{shard.name: shard.local for shard in engine.shards} for engine in [*engines, other]]
    name = "model.layers.0.mlp.down_proj.lora_A.weight"
    assert torch.equal(shards[0][name], shards[1][name]) and not torch.equal(shards[0][name], shards[2][name])
    first = shards[0][name]
    assert first.shape == (3, 48) and 0.9 < float(first.abs().max()) * math.sqrt(48) <= 1
    assert not any(bool(one.any()) for name, one in shards[0].items() if name.endswith(lora.B))
    rows = plain_training.batch(0)
    for one, base in zip(engines[0].logprobs(rows, 1.0), engines[0].base_logprobs(rows, 1.0), strict=True):
        np.testing.assert_array_equal(one, base)


def test_only_the_adapter_has_moments_state_and_float32_values(model, tmp_path):
    engine = make_engine(model, target_modules=["q_proj"], lora_path="", dtype="bfloat16")
    engine.train_batch(plain_training.batch(0), compute_sequence_loss, 80.0, 1.0)
    dtypes = {shard.name: shard.local.dtype for shard in engine.shards}
    factors = {name for name in dtypes if "lora_" in name}
    assert len(factors) == 8 and {name.split(".")[4] for name in factors} == {"q_proj"}
    assert {dtypes[name] for name in factors} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in factors} == {torch.bfloat16}
    assert engine.optimizer.moments.keys() == factors
    [record] = engine.save(tmp_path)
    assert record.size < 3 * 4 * 4 * 2 * 3 * 32 + 65536
    torch.distributed.destroy_process_group()


def test_a_state_continues_and_another_rank_is_refused(model, tmp_path):
    whole, broken = make_engine(model), make_engine(model)
    for step in (0, 1):
        whole.train_batch(plain_training.batch(step), compute_sequence_loss, 80.0, 1.0)
    broken.train_batch(plain_training.batch(0), compute_sequence_loss, 80.0, 1.0)
    broken.save(tmp_path)
    resumed = FSDPEngine(plain_training.config_of(model / "qwen2", **plain_lora.OPTIONS))
    resumed.initialize(plain_lora.NUM_STEPS, empty=True)
    resumed.load(tmp_path, 1)
    resumed.train_batch(plain_training.batch(1), compute_sequence_loss, 80.0, 1.0)
    for one, other in zip(resumed.shards, whole.shards, strict=True):
        assert torch.equal(one.local, other.local), one.name
    larger = make_engine(model, lora_path="", lora_rank=4)
    with pytest.raises(ValueError, match="belongs to another model"):
        larger.load(tmp_path, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"target_modules": ["q_proj", "query"], "lora_path": ""},
            "target_modules query: .* it has down_proj",
        ),
        ({"lora_rank": 33, "lora_path": ""}, r"lora_rank 33 exceeds the smallest width of model.layers.0"),
        ({"target_modules": ["q_proj"]}, "has .*down_proj.lora_A.weight, .* and 45 more tensors, which"),
    ],
)
def test_what_can_not_be_is_refused(model, options, words):
    with pytest.raises(ConfigError, match=words):
        make_engine(model, **options)


def test_a_truncated_adapter_is_a_mistake_in_the_configuration(model, tmp_path):
    """It is not retried."""
    shutil.copytree(model / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is cut off: it has"):
        make_engine(model, lora_path=str(tmp_path / "adapter"))
    file.write_bytes(b"xx")
    with pytest.raises(ConfigError, match="is damaged or cut off"):
        make_engine(model, lora_path=str(tmp_path / "adapter"))


def test_an_adapter_with_values_that_are_not_finite_is_refused(model, tmp_path):
    shutil.copytree(model / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(one for one in tensors if "layers.1.mlp.down_proj.lora_B" in one)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.lora_B.* that are not finite"):
        make_engine(model, lora_path=str(tmp_path / "adapter"))


def test_experts_can_not_have_adapters():
    sizes = {**plain_training.COMMON, "num_experts": 4, "moe_intermediate_size": 24}
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes))
    assert {name.rpartition(".")[2] for name in lora.find_targets(hf, [])} == set(plain_lora.ATTENTION)
    with pytest.raises(ConfigError, match="experts can't have adapters"):
        lora.find_targets(hf, ["up_proj"])


def test_full_rank_on_one_side_makes_the_full_step_of_a_linear_model():
    """With A = 1, the scale 1 and B = 0, the gradient of B is that of W, and so is a step of gradient descent."""
    torch.manual_seed(0)
    linear, plain = nn.Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False)
    plain.load_state_dict(linear.state_dict())
    lora.AdaptedLinear.adapt(linear, 5, 1.0)
    linear.weight.requires_grad_(False)
    with torch.no_grad():
        linear.lora_A.weight.copy_(torch.eye(5))
        linear.lora_B.weight.zero_()
    inputs, targets = torch.randn(7, 5), torch.randn(7, 3)
    for module, parameter in ((linear, linear.lora_B.weight), (plain, plain.weight)):
        ((module(inputs) - targets) ** 2).mean().backward()
        parameter.data -= 0.1 * parameter.grad
    torch.testing.assert_close(linear(inputs), plain(inputs))
    assert linear.weight.grad is None
    with lora.disable([linear]):
        torch.testing.assert_close(linear(inputs), inputs @ linear.weight.T)


def test_the_head_of_a_reward_model_is_trained_and_saved_as_peft_does(model, tmp_path):
    engine = make_engine(model, is_critic=True, lora_path="")
    rows = make_pairs([(row[:5], row[5:9]) for row in plain_training.batch(0).ids if len(row) > 9])
    before = {shard.name: shard.local.clone() for shard in engine.shards}
    engine.train_batch(rows, compute_pair_loss, 4.0, 1.0)
    after = {shard.name: shard.local for shard in engine.shards}
    changed = {name for name, one in after.items() if not torch.equal(one, before[name])}
    assert "score.weight" in changed and all("lora_" in name for name in changed - {"score.weight"})
    engine.export(tmp_path)
    base = AutoModelForSequenceClassification.from_pretrained(model / "qwen2", num_labels=1)
    base.config.pad_token_id = 0
    theirs = peft.PeftModel.from_pretrained(base, tmp_path)
    ids = torch.from_numpy(rows.ids[0].astype(np.int64))[None]
    with torch.no_grad():
        hidden = theirs.get_base_model().model(ids).last_hidden_state
        wanted = theirs.get_base_model().score(hidden)[0, -1, 0]
    assert engine.logprobs(rows, 1.0)[0][-1] == pytest.approx(float(wanted), abs=1e-5)


def test_an_adapter_becomes_a_state_and_the_state_an_adapter_or_a_whole_model(model, tmp_path):
    config = plain_training.config_of(model / "qwen2", **plain_lora.OPTIONS)
    (tmp_path / "state").mkdir()
    files, counters = import_weights(config, 1, model / "adapter", 5, tmp_path / "state")
    assert counters["updates"] == 5
    known = {file.name: file for file in files}
    export_state(config, 1, tmp_path / "state", 1, known, tmp_path / "out", None)
    export_state(config, 1, tmp_path / "state", 1, known, tmp_path / "whole", None, merge=True)
    start = load_file(model / "adapter" / "adapter_model.safetensors")
    for name, tensor in load_file(tmp_path / "out" / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, start[name], atol=0, rtol=0)
    wanted = plain_lora.load(model / "qwen2", model / "adapter").merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        torch.testing.assert_close(tensor, wanted[name])
    with pytest.raises(ConfigError, match=r"trains an adapter .* is a whole model"):
        import_weights(config, 1, model / "qwen2", 5, tmp_path / "state")
