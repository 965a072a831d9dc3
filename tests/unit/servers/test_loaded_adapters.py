"""The versions of an adapter in a server: which are unloaded, and which layers SGLang prepares."""

import json

from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.servers.loaded_adapters import LoadedAdapters, gets_adapters, list_layers
from hpc_rl.servers.vllm import make_adapter_settings


def test_a_version_is_unloaded_when_no_request_uses_it_and_two_are_newer():
    loaded = LoadedAdapters()
    for label in ("0.1", "0.2"):
        loaded.add(label)
        assert loaded.take_unused() == []
    with loaded.use("0.1"), loaded.use("0.1"):
        loaded.add("0.3")
        assert loaded.take_unused() == [] and loaded.has("0.1")
        loaded.add("0.4")
        assert loaded.take_unused() == ["0.2"]
    assert loaded.take_unused() == ["0.1"]
    assert [label for label in ("0.1", "0.2", "0.3", "0.4") if loaded.has(label)] == ["0.3", "0.4"]
    assert not loaded.has(None)


def test_layers_are_those_of_the_model(tmp_path):
    def list_of(kind: str, *targets: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        return list_layers(PPOActorConfig(path=str(tmp_path), use_lora=True, target_modules=[*targets]))

    assert list_of("qwen3_moe") == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert list_of("qwen3", "all-linear")[-1] == "up_proj" and len(list_of("qwen3")) == 7
    assert list_of("qwen3", "q_proj") == ["q_proj"]
    assert list_of("phi3") == ["all"]


def test_vllm_reserves_the_next_rank_that_it_knows():
    assert [make_adapter_settings(rank)["max_lora_rank"] for rank in (1, 3, 64, 65)] == [1, 8, 64, 128]


def test_merged_models_need_no_adapters():
    actor = PPOActorConfig(path="/m", use_lora=True)
    assert gets_adapters(actor)
    assert not gets_adapters(PPOActorConfig(path="/m", use_lora=True, lora_publish="merged"))
    assert not gets_adapters(PPOActorConfig(path="/m"))
