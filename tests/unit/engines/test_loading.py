"""What is read from a checkpoint, and in which words one is refused.

Several ranks are in tests/integration/test_loading.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_engines import config_of
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import Trial
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared import loading, model
from hpc_rl.trainers import start
from hpc_rl.trainers.ranks import Ranks

SIZES = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make(folder: Path, kind: str = "llama", **changes) -> Path:
    config = AutoConfig.for_model(kind, **{**SIZES, "tie_word_embeddings": True, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
    model.save_pretrained(folder)
    return folder


def engine_of(path: Path, empty: bool = False, **changes) -> FSDPEngine:
    engine = FSDPEngine(config_of(path, **changes))
    engine.initialize(4, empty)
    return engine


def rewrite(folder: Path, change) -> None:
    """Let a function change the tensors of a checkpoint of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def assert_as_transformers(engine: FSDPEngine, path: Path) -> None:
    want = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    got = dict(engine.model.hf.named_parameters())
    assert got.keys() == dict(want.named_parameters()).keys()
    for name, tensor in (*want.named_parameters(), *want.named_buffers()):
        ours = engine.model.hf.get_parameter_or_buffer(name)
        assert torch.equal(tensor, ours), name


@pytest.fixture
def path(tmp_path) -> Path:
    return make(tmp_path / "model")


def test_all_that_does_not_fit_is_named(path):
    def change(tensors):
        tensors["model.layers.0.mlp.up_poj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
        tensors["model.norm.weight"] = torch.zeros(25)
        del tensors["model.layers.1.input_layernorm.weight"]

    rewrite(path, change)
    with pytest.raises(ConfigError) as refusal:
        engine_of(path)
    for words in (
        "lack model.layers.0.mlp.up_proj.weight, model.layers.1.input_layernorm.weight",
        "model.norm.weight has the shape [25], and [24] in the model",
        "does not use model.layers.0.mlp.up_poj.weight",
        str(path),
    ):
        assert words in str(refusal.value)


def test_tensors_that_the_model_does_not_use_are_noted_and_not_refused(path, caplog):
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(path, lambda tensors: tensors.update({"mtp.weight": torch.zeros(3), old: torch.zeros(3)}))
    assert engine_of(path).model.unread == ["mtp.weight"]
    assert f"the model does not use these tensors of {path}" in caplog.text


def test_tied_tensors_may_be_in_the_files_twice_but_not_with_two_values(path):
    def write(name, tensor):
        rewrite(path, lambda tensors: tensors.update({name: tensor.clone()}))

    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    write("lm_head.weight", embedding)
    assert_as_transformers(engine_of(path), path)
    write("lm_head.weight", embedding + (torch.arange(32) == 31)[:, None])
    with pytest.raises(ConfigError, match=r"ties lm_head\.weight and model\.embed_tokens\.weight, but"):
        engine_of(path)
    rewrite(path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert_as_transformers(engine_of(path), path)


def test_names_without_the_prefix_of_the_trunk_are_known(path):
    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(path, change)
    assert_as_transformers(engine_of(path), path)


def test_tensors_are_read_in_pieces_and_files_opened_again(path, monkeypatch):
    monkeypatch.setattr(loading, "ROWS_BYTES", 500)
    monkeypatch.setattr(loading, "OPEN_BYTES", 3000)
    assert_as_transformers(engine_of(path), path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "model-1.safetensors"}}, "names files that do not exist: model-1.safetensors"),
        ({"weight_map": {}}, "lists no files"),
        (None, "has neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_files_that_are_missing_are_named(path, index, words):
    (path / "model.safetensors").unlink()
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=words):
        engine_of(path)


def test_nothing_is_read_where_a_saved_state_follows(path, tmp_path):
    engine = engine_of(path)
    (tmp_path / "state").mkdir()
    engine.save(tmp_path / "state")
    (path / "model.safetensors").unlink()
    again = engine_of(path, empty=True)
    again.load(tmp_path / "state", 1)
    for one, other in zip(engine.shards, again.shards, strict=True):
        assert torch.equal(one.local, other.local)
    assert again.model.hf.lm_head.weight is again.model.hf.model.embed_tokens.weight


def test_a_fresh_start_after_damage_reads_the_checkpoint(path, tmp_path, monkeypatch):
    engine, trial = engine_of(path, empty=True), Trial(tmp_path / "trial")
    trial.generation(3).mkdir(parents=True)
    fresh = {"lineage": 1, "step": 0, "manifest": None}
    monkeypatch.setattr(start, "_walk_back", lambda *_: fresh)
    given = SimpleNamespace(trial=trial, ranks=Ranks())
    damaged = {"lineage": 0, "step": 3, "manifest": {"num_ranks": 1, "files": []}}
    assert start.load_state(given, damaged, [engine]) == fresh
    assert_as_transformers(engine, path)


def test_a_generation_without_a_critic_leaves_it_as_it_is_before_training(path, tmp_path):
    trial, given = Trial(tmp_path / "trial"), SimpleNamespace(ranks=Ranks())
    given.trial = trial
    trial.generation(3).mkdir(parents=True)
    saved = engine_of(path)
    saved.pass_updates(4)
    files = [vars(file) for file in saved.save(trial.generation(3))]
    engines = [engine_of(path, empty=True), engine_of(path, empty=True)]
    engines[1].name = "critic"
    manifest = {"num_ranks": 1, "files": files, "counters": saved.counters()}
    begun = {"lineage": 0, "step": 3, "manifest": manifest}
    assert start.load_state(given, begun, engines) is begun
    assert_as_transformers(engines[1], path)
    found = start.list_counters(engines)
    assert (found["updates"], found["critic_updates"]) == (4, 0)


def test_buffers_that_no_saved_state_has_are_read_in_any_case(tmp_path):
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    experts |= {"first_k_dense_replace": 1, "moe_intermediate_size": 16}
    heads = {"kv_lora_rank": 8, "q_lora_rank": 8} | dict.fromkeys(
        ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 6
    )
    path = make(tmp_path / "model", "deepseek_v3", **experts, **heads)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = engine_of(path, empty=True).model.hf.get_buffer(name)
    assert torch.equal(bias, load_file(path / "model.safetensors")[name].float())


EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_read_one_by_one_and_not_merged_by_transformers(tmp_path, monkeypatch, kind):
    path = make(tmp_path / "model", kind, **EXPERTS[kind])
    assert any(".experts.3." in name for name in load_file(path / "model.safetensors"))
    monkeypatch.setattr(model, "_load_whole", lambda *_: pytest.fail("loaded the whole model"))
    assert_as_transformers(engine_of(path), path)


def test_an_expert_that_is_missing_is_named(tmp_path):
    path = make(tmp_path / "model", "qwen3_moe", **EXPERTS["qwen3_moe"])
    rewrite(path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight\."):
        engine_of(path)
