"""The rules about adapters, and the configuration that the trainer gets."""

import json
import math
from pathlib import Path

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import find_loaded_reference
from hpc_rl.config.rules import lora_rules
from hpc_rl.config.rules.check import check
from hpc_rl.core.adapters import AdapterSettings
from hpc_rl.core.errors import ConfigError

BASE = [
    *("experiment_name=e", "trial_name=t", "total_train_steps=3", "actor.ppo_n_minibatches=1"),
    "actor.use_lora=true",
]


def write_model(folder: Path, kind: str = "qwen3") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def write_tensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a file of float32 tensors of zeros."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


LAYERS = {"q_proj": [8, 4], "v_proj": [2, 4]}
HEAD = "base_model.model.score.weight"


def write_base(folder: Path, kind: str = "qwen3", prefix: str = "model.") -> Path:
    """Write a model with one layer of attention, whose smallest width is 2."""
    shapes = {f"{prefix}layers.0.self_attn.{name}.weight": shape for name, shape in LAYERS.items()}
    write_model(folder, kind)
    write_tensors(folder / "model.safetensors", {**shapes, f"{prefix}embed_tokens.weight": [9, 4]})
    return folder


def write_adapter(folder: Path, base: str, rank: int = 2, changes: dict | None = None) -> Path:
    """Write an adapter of `write_base` with other shapes of some tensors; None leaves one out."""
    shapes: dict[str, list[int] | None] = {}
    for name, (num_out, num_in) in LAYERS.items():
        layer = f"base_model.model.model.layers.0.self_attn.{name}"
        shapes |= {f"{layer}.lora_A.weight": [rank, num_in], f"{layer}.lora_B.weight": [num_out, rank]}
    shapes |= {
        f"base_model.model.{name}" if name != HEAD else name: one for name, one in (changes or {}).items()
    }
    folder.mkdir()
    write_tensors(folder / "adapter_model.safetensors", {n: one for n, one in shapes.items() if one})
    AdapterSettings(rank, 16, ("q_proj", "v_proj"), base).write(folder)
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
        (["actor.lora_path=/nowhere"], "qwen3", "actor.lora_path", "is not an adapter"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path, options, kind, option, words):
    assert words in list_refusals(tmp_path, *options, kind=kind)[option]


def test_an_adapter_to_start_from_must_have_the_trials_rank(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", "/base", rank=8)
    found = list_refusals(tmp_path, f"actor.lora_path={adapter}", "actor.lora_rank=4")
    assert "must be 8" in found["actor.lora_rank"] and "actor.lora_alpha" not in found
    content = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(content | {"use_dora": True}))
    again = tmp_path / "again"
    again.mkdir()
    assert "use_dora: True" in list_refusals(again, f"actor.lora_path={adapter}")["actor.lora_path"]


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_settings_of_an_adapter_that_are_no_json_object_are_named(tmp_path, text):
    adapter = write_adapter(tmp_path / "adapter", "/base", rank=8)
    (adapter / "adapter_config.json").write_text(text)
    found = list_refusals(tmp_path, f"actor.lora_path={adapter}")
    assert "adapter_config.json must be a JSON object" in found["actor.lora_path"]


def list_start_problems(tmp_path: Path, *options: str, kind: str = "qwen3", **adapter) -> dict[str, str]:
    """Return the refusals of the actor's adapter and its options."""
    model = write_base(tmp_path / "model", kind)
    if not (tmp_path / "adapter").exists():
        write_adapter(tmp_path / "adapter", str(model), **adapter)
    start = [f"actor.lora_path={tmp_path / 'adapter'}", "actor.lora_rank=2", *options]
    found = list_refusals(tmp_path, *start, kind=kind)
    return {name: text for name, text in found.items() if name.startswith(("actor.lora", "actor.target"))}


Q_A, V_B = "model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.v_proj.lora_B.weight"


def test_an_adapter_of_the_trials_layers_is_accepted(tmp_path):
    assert list_start_problems(tmp_path) == {}


def test_a_base_without_the_prefix_of_its_names_is_the_same_base(tmp_path):
    write_base(tmp_path / "model", prefix="")
    write_adapter(tmp_path / "adapter", str(tmp_path / "model"))
    found = list_refusals(tmp_path, f"actor.lora_path={tmp_path / 'adapter'}", "actor.lora_rank=2")
    assert "actor.lora_path" not in found


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({V_B: [3, 2]}, [], f"has {V_B} with the shape [3, 2], but the trial needs [2, 2]"),
        ({Q_A: None}, [], f"lacks {Q_A}"),
        ({"model.layers.1.self_attn.q_proj.lora_A.weight": [2, 4]}, [], "which the trial would not train"),
        ({}, ["actor.target_modules=[q_proj]"], "has model.layers.0.self_attn.v_proj.lora_A.weight"),
        ({HEAD: [1, 4]}, [], "the head of a reward model or critic, which this model does not have"),
    ],
)
def test_other_layers_and_shapes_are_refused_before_submission(tmp_path, changes, options, words):
    found = list_start_problems(tmp_path, *options, changes=changes)
    assert words in found["actor.lora_path"]


def test_layers_of_an_unknown_model_are_compared_by_their_names(tmp_path):
    found = list_start_problems(tmp_path, "actor.target_modules=[q_proj]", kind="novel")
    assert "has the layers q_proj, v_proj, and target_modules has q_proj" in found["actor.lora_path"]


def test_a_critic_starts_from_an_adapter_with_a_head(tmp_path):
    write_base(tmp_path / "model")
    write_adapter(tmp_path / "adapter", str(tmp_path / "model"))
    critic = [f"critic.path={tmp_path / 'model'}", "critic.use_lora=true", "critic.lora_rank=2"]
    given = [*critic, f"critic.lora_path={tmp_path / 'adapter'}", "actor.algorithm=ppo"]
    assert "lacks score.weight, the head" in list_refusals(tmp_path, *given)["critic.lora_path"]


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(-1, "is cut off: it has"), (9, "its 9 bytes are less than")]
)
def test_a_truncated_adapter_is_refused(tmp_path, num_bytes, words):
    file = write_adapter(tmp_path / "adapter", "/base") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert words in list_start_problems(tmp_path)["actor.lora_path"]


def test_modules_that_are_saved_whole_are_refused(tmp_path):
    config = write_adapter(tmp_path / "adapter", "/base") / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": ["lm_head"]}))
    assert "modules_to_save: ['lm_head']" in list_start_problems(tmp_path)["actor.lora_path"]


def test_a_rank_above_the_smallest_width_is_refused(tmp_path):
    write_base(tmp_path / "model")
    found = list_refusals(tmp_path, "actor.lora_rank=3")["actor.lora_rank"]
    assert "v_proj has [2, 4]" in found and "use at most 2" in found
    fits = list_refusals(tmp_path, "actor.lora_rank=3", "actor.target_modules=[q_proj]")
    assert "actor.lora_rank" not in fits


@pytest.mark.parametrize(
    ("base", "is_other"),
    [("model", False), ("copy", False), ("Org/model", False), ("/a/models--Org--model/snapshots/1", False),
     ("other", True), ("Org/Another-7B", True), ("", False)],
)  # fmt: skip
def test_an_adapter_of_another_base_is_noted(tmp_path, base, is_other):
    for name in ("model", "copy", "other"):
        write_base(tmp_path / name)
    (tmp_path / "other" / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 9}')
    named = str(tmp_path / base) if base in ("model", "copy", "other") else base
    write_adapter(tmp_path / "adapter", named)
    given = [*BASE, f"actor.path={tmp_path / 'model'}", "train_dataset.path=/d.jsonl"]
    config = load([], [*given, f"actor.lora_path={tmp_path / 'adapter'}"], profiles=[]).config
    notes = [str(one) for one in lora_rules.list_file_notes(config)]
    assert len(notes) == is_other and all(f"with the base {named}" in one for one in notes)


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
