"""The rules about adapters, and the configuration that the trainer gets."""

import json
from pathlib import Path

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import find_loaded_reference
from hpc_rl.config.rules.check import check
from hpc_rl.core.adapters import AdapterSettings
from hpc_rl.core.errors import ConfigError

BASE = [
    *("experiment_name=e", "trial_name=t", "total_train_steps=3", "actor.ppo_n_minibatches=1"),
    "actor.use_lora=true",
]


def write_model(folder: Path, kind: str = "qwen3") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def check_config(tmp_path: Path, *options: str, kind: str = "qwen3"):
    model = write_model(tmp_path / "model", kind)
    given = [*BASE, f"actor.path={model}", "train_dataset.path=/d.jsonl", *options]
    return check(load([], given, profiles=[]), files=True)


def list_refusals(tmp_path: Path, *options: str, kind: str = "qwen3") -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check_config(tmp_path, *options, kind=kind)
    return {one.option: f"{one.why} {one.use}" for one in caught.value.refusals}


@pytest.mark.parametrize(
    ("options", "kind", "option", "words"),
    [
        (["actor.target_modules=[q_proj,qkv]"], "qwen3", "actor.target_modules", "no such layers"),
        (["actor.target_modules=[up_proj]"], "qwen3_moe", "actor.target_modules", "experts can't have"),
        (["actor.init_from_scratch=true"], "qwen3", "actor.init_from_scratch", "the base"),
        (["ref.path=/m", "ref.use_lora=true"], "qwen3", "ref.use_lora", "not trained"),
        (
            ["actor.weight_update_mode=xccl", "actor.lora_publish=adapter"],
            "qwen3",
            "actor.lora_publish",
            "use merged",
        ),
        (
            ["allocation_mode=vllm:d1+fsdp:d1", "actor.lora_rank=1024", "actor.lora_publish=adapter"],
            "qwen3",
            "actor.lora_publish",
            "up to rank 512",
        ),
        (["actor.lora_path=/nowhere"], "qwen3", "actor.lora_path", "no adapter"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path, options, kind, option, words):
    assert words in list_refusals(tmp_path, *options, kind=kind)[option]


def test_an_adapter_to_start_from_must_have_the_trials_rank(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    AdapterSettings(8, 16, ("q_proj",), "/base").write(adapter)
    found = list_refusals(tmp_path, f"actor.lora_path={adapter}", "actor.lora_rank=4")
    assert "must be 8" in found["actor.lora_rank"] and "actor.lora_alpha" not in found
    content = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(content | {"use_dora": True}))
    again = tmp_path / "again"
    again.mkdir()
    assert "use_dora: True" in list_refusals(again, f"actor.lora_path={adapter}")["actor.lora_path"]


@pytest.mark.parametrize(
    ("section", "options"),
    [("actor", ["actor.beta=0.1"]), ("model", ["trainer=dpo", "train_dataset.max_length=64"])],
)
def test_the_base_is_the_reference_model_unless_another_is_named(section, options):
    own = [one for one in BASE if not one.startswith("actor.") or section == "actor"]

    def load_reference(*more: str):
        given = [*own, f"{section}.path=/m", f"{section}.use_lora=true", "train_dataset.path=/d.jsonl"]
        checked = check(load([], [*given, *options, *more], profiles=[]), files=False)
        return find_loaded_reference(checked.config), [one.option for one in checked.notes]

    assert load_reference()[0] is None
    reference, notes = load_reference("ref.path=/m")
    assert reference is None and "ref" in notes
    reference, notes = load_reference("ref.path=/other")
    assert reference is not None and reference.path == "/other" and "ref" not in notes
    reference, _ = load_reference(f"{section}.use_lora=false", "ref.path=/m")
    assert reference is not None and reference.path == "/m"


def test_layers_of_a_critic_are_checked(tmp_path):
    found = list_refusals(
        tmp_path,
        *(f"critic.path={tmp_path / 'model'}", "actor.algorithm=ppo", "critic.use_lora=true"),
        "critic.target_modules=[query]",
    )
    assert "no such layers" in found["critic.target_modules"]


@pytest.mark.parametrize(
    ("options", "publish"),
    [
        (["actor.weight_update_mode=xccl"], "merged"),
        (["allocation_mode=sglang:d1+fsdp:d1", "cluster.n_gpus_per_node=0"], "merged"),
        (["allocation_mode=sglang:d1+fsdp:d1", "cluster.n_gpus_per_node=2"], "adapter"),
        (["allocation_mode=vllm:d1+fsdp:d1", "actor.lora_rank=1024"], "merged"),
        (["allocation_mode=embedded:d1+fsdp:d1", "cluster.n_gpus_per_node=0"], "adapter"),
    ],
)
def test_servers_that_can_not_load_an_adapter_get_merged_models(options, publish):
    given = [*BASE, "actor.path=/m", "train_dataset.path=/d.jsonl", *options]
    assert check(load([], given, profiles=[]), files=False).config.actor.lora_publish == publish


def test_options_without_use_lora_are_noted(tmp_path):
    given = [*BASE[:-1], "actor.path=/m", "train_dataset.path=/d.jsonl", "actor.lora_rank=4"]
    notes = check(load([], given, profiles=[]), files=False).notes
    assert any("actor.lora_rank" in str(one) and "use_lora is false" in str(one) for one in notes)
