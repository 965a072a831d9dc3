"""What a trial takes as a generation of its own, and in which words another model is refused."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_engines import config_of

from hpc_rl.core.errors import ConfigError, ExitCode, FailureClass
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared.offline import import_weights


def export(path: Path, to: Path, **options) -> Path:
    engine = FSDPEngine(config_of(path, **options))
    engine.initialize(1)
    engine.export(to)
    return to


@pytest.fixture
def ours(model_dir: Path, tmp_path: Path) -> Path:
    """The trial's model, with weights."""
    return export(model_dir, tmp_path / "ours", init_from_scratch=True)


def variant(ours: Path, **keys) -> Path:
    """A copy of the model whose config.json says something else; `keys` that are None are left out of it."""
    folder = Path(shutil.copytree(ours, ours.with_name("variant")))
    written = json.loads((ours / "config.json").read_text()) | keys
    kept = {name: value for name, value in written.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def taken(source: Path, ours: Path, **options) -> Path:
    folder = ours.with_name("state")
    folder.mkdir()
    files, counters = import_weights(config_of(ours, **options), 1, source, 6, folder)
    assert [file.name for file in files] == ["actor-rank-00000.safetensors"] and counters["updates"] == 6
    return folder


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_theta": 500.0}, "rope_parameters.rope_theta is 500.0, not 10000.0"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001, not 1e-06"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "model_type is llama, not qwen3"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, not 2"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, not True"),
        # no key of its class, and read by what all models share
        ({"is_causal": False}, "is_causal is False, not None"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        (
            {"max_position_embeddings": 256, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "max_position_embeddings is 256, not 128; rope_parameters.factor is 2.0, not None",
        ),
    ],
)
def test_another_architecture_is_refused_and_each_difference_named(ours, keys, words):
    with pytest.raises(ConfigError, match="does not have the architecture of the trial's model") as refusal:
        taken(variant(ours, **keys), ours)
    assert words in str(refusal.value) and str(ours) in str(refusal.value)


def test_what_computes_the_same_is_taken(ours):
    keys = {"torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": False}
    same = variant(ours, eos_token_id=3, rms_norm_eps=None, **keys)
    state = load_file(taken(same, ours) / "actor-rank-00000.safetensors")
    for name, tensor in load_file(ours / "model.safetensors").items():
        torch.testing.assert_close(state[f"model/{name}"], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    "keys",
    [
        {"unsloth_fixed": True, "unsloth_version": "2025.3", "quickstart": {"made": "today"}},
        {"max_window_layers": 2, "sliding_window": 32, "use_sliding_window": False},
        {"max_position_embeddings": 40960, "rope_theta": 10000.0},
    ],
)
def test_keys_that_nothing_reads_are_no_other_architecture(ours, keys):
    taken(variant(ours, **keys), ours)


def test_keys_count_as_soon_as_they_are_read(ours):
    """The window's first layer where there is a window, the length where positions are scaled to it."""
    written = json.loads((ours / "config.json").read_text())
    scaled = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    (ours / "config.json").write_text(json.dumps(written | scaled | windows))
    with pytest.raises(ConfigError) as refusal:
        taken(variant(ours, max_position_embeddings=256, max_window_layers=2), ours)
    told = str(refusal.value)
    assert "layer_types is" in told and "max_position_embeddings is 256, not 128" in told
    assert "max_window_layers is 2, not 1" in told


def test_unused_tensors_are_refused_unless_the_trials_model_has_them_too(ours):
    odd = variant(ours)
    tensors = load_file(odd / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)
    save_file(tensors, odd / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"does not use: model\.layers\.2\.mlp\.up_proj\.weight"):
        taken(odd, ours)
    shutil.rmtree(ours.with_name("state"))
    shutil.copyfile(odd / "model.safetensors", ours / "model.safetensors")
    taken(odd, ours)


def test_an_export_of_a_reward_model_goes_back_into_its_trial(model_dir, tmp_path):
    written = json.loads((model_dir / "config.json").read_text()) | {"tie_word_embeddings": False}
    (model_dir / "config.json").write_text(json.dumps(written))
    ours = export(model_dir, tmp_path / "ours", init_from_scratch=True)
    scorer = export(ours, tmp_path / "scorer", is_critic=True)
    assert "score.weight" in load_file(scorer / "model.safetensors")
    taken(scorer, ours, is_critic=True)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("share", [0.9, 0.4, 0.0])
def test_a_file_that_was_not_copied_whole_is_named_and_not_tried_again(ours, name, share):
    """As a checkpoint to import, and as the model that a trainer starts from."""
    if "index" in name:
        (ours / "model.safetensors").rename(ours / "model-00001-of-00001.safetensors")
        (ours / name).write_text('{"metadata": {}, "weight_map": {}}')
    cut = variant(ours) / name
    os.truncate(cut, int(cut.stat().st_size * share))
    for start in (lambda: taken(cut.parent, ours), lambda: FSDPEngine(config_of(cut.parent)).initialize(1)):
        with pytest.raises(ConfigError, match=re.escape(str(cut)) + " is damaged") as refusal:
            start()
        assert (refusal.value.exit_code, refusal.value.failure) == (ExitCode.REFUSED, FailureClass.USER)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2},
            r"can't be read as an architecture: .* \(3\) must be equal",
        ),
        ({"hidden_size": "x"}, "can't be read as an architecture: .* expected int, got str"),
        ({"torch_dtype": "bogus", "dtype": None}, "can't be read as an architecture: .*'bogus'"),
        ({"hidden_act": "nope"}, "does not describe a model that can be built: KeyError: 'nope'"),
    ],
)
def test_a_contradictory_config_json_is_named_and_not_tried_again(ours, keys, words):
    """As a checkpoint to import, as the model of the trial that it is imported into, and as one that a
    trainer starts from.
    """
    odd = variant(ours, **keys)
    starts = [
        lambda: FSDPEngine(config_of(odd)).initialize(1),
        lambda: FSDPEngine(config_of(odd, init_from_scratch=True)).initialize(1),
    ]
    if "built" not in words:  # else another architecture is what an import says first
        starts += [
            lambda: taken(odd, ours),
            lambda: import_weights(config_of(odd), 1, ours, 6, ours.with_name("state")),
        ]
    for start in starts:
        with pytest.raises(ConfigError, match=re.escape(f"{odd}/config.json ") + words) as refusal:
            start()
        assert (refusal.value.exit_code, refusal.value.failure) == (ExitCode.REFUSED, FailureClass.USER)
