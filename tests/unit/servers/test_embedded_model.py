"""The embedded engine's model: both decoders against plain forward passes, and weights replaced all or
nothing.
"""

import copy
import json
import subprocess
import sys

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hpc_rl.core.errors import ConfigError
from hpc_rl.servers.embedded.decode_batch import Sequence
from hpc_rl.servers.embedded.decoder import FusedDecoder
from hpc_rl.servers.embedded.engine import EmbeddedEngine
from hpc_rl.servers.embedded.given_tokens import compute_logprobs
from hpc_rl.servers.embedded.hf_decoder import HFDecoder
from hpc_rl.servers.embedded.model import Model
from hpc_rl.servers.embedded.plain_model import PlainModel
from hpc_rl.servers.wire import GivenTokens, SamplingParams

KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
}


def make(folder, kind="qwen3", seed=0, tie=False, **more):
    config_class, model_class = KINDS[kind]
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 4
    sizes |= {
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": tie,
    }
    tokens = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    torch.manual_seed(seed)
    model = model_class(config_class(**{**sizes, **tokens, **more}))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # the usual ones and zeros would hide what is left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return model


def decode_all(model, prompts, num_tokens=12, **options):
    """Greedy continuations with their logprobs, by an engine that is driven to its end."""
    made = []
    engine = EmbeddedEngine(model, "0.0", deliver=made.extend, **options)
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    sequences = [Sequence(prompt, params, 0, str(i)) for i, prompt in enumerate(prompts)]
    engine.submit(sequences)
    with torch.inference_mode():
        while engine._step():
            pass
    assert len(made) == len(prompts)
    return sequences


def check(module, sequences):
    for sequence in sequences:
        with torch.no_grad():
            logits = module(torch.tensor([sequence.ids + sequence.tokens])).logits[
                0, len(sequence.ids) - 1 : -1
            ]
        assert logits.argmax(-1).tolist() == sequence.tokens
        wanted = torch.log_softmax(logits, -1).max(-1).values
        assert (wanted - torch.tensor(sequence.logprobs)).abs().max() < 1e-4


PROMPTS = [[5, 6, 7], [9], [5, 6, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11], [2, 3]]


def edit(file, **options):
    """Change options of a JSON file; None removes one."""
    old = json.loads(file.read_text())
    file.write_text(json.dumps({name: one for name, one in (old | options).items() if one is not None}))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
def test_fused_decoder_equals_a_forward_pass(tmp_path, kind, tie, is_plain):
    module = make(tmp_path, kind, tie=tie)
    if not is_plain:
        edit(tmp_path / "config.json", an_option_of_the_future=1)
    model = Model(str(tmp_path), "float32")
    assert isinstance(model.decoder, FusedDecoder)
    assert isinstance(model.module, PlainModel) == is_plain
    check(module, decode_all(model, PROMPTS))
    given = [GivenTokens([5, 6, 7, 8], 1), GivenTokens([9, 3], 1), GivenTokens([3, 4, 5, 6, 7, 8], 4)]
    for asked, answer in zip(given, compute_logprobs(model, given, 0), strict=True):
        with torch.no_grad():
            logprobs = torch.log_softmax(module(torch.tensor([asked.ids])).logits[0], -1)
        wanted = [logprobs[at - 1, asked.ids[at]].item() for at in range(asked.start, len(asked.ids))]
        assert answer["logprobs"] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
        {"rope_parameters": None, "rope_theta": 300.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 0.5},
        {"rms_norm_eps": None},
        {"tie_word_embeddings": None},
        {"use_sliding_window": None, "layer_types": None},
        {"head_dim": None},
        {"dtype": "bfloat16", "initializer_range": 0.5},
    ],
    ids=str,
)
def test_options_of_a_model_have_the_effect_that_they_have_in_transformers(tmp_path, kind, options):
    make(tmp_path, kind, head_dim=128 if kind == "qwen3" else 8)
    edit(tmp_path / "config.json", **options)
    module = KINDS[kind][1].from_pretrained(tmp_path, dtype=torch.float32).eval()
    check(module, decode_all(Model(str(tmp_path), "float32"), PROMPTS))


def test_the_end_of_sequence_comes_from_the_generation_config(tmp_path):
    make(tmp_path)
    assert Model(str(tmp_path), "float32").eos_ids == (1,)
    edit(tmp_path / "generation_config.json", eos_token_id=[3, 1])
    assert Model(str(tmp_path), "float32").eos_ids == (3, 1)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path / "config.json", eos_token_id=2)
    assert Model(str(tmp_path), "float32").eos_ids == (2,)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"[1]", b"\x10\0\0\0"])
def test_damaged_files_are_refused(tmp_path, name, content):
    make(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((OSError, ValueError)):
        Model(str(tmp_path), "float32")


def test_a_served_model_does_not_change_with_its_file(tmp_path):
    module = make(tmp_path, tie=True)
    model = Model(str(tmp_path), "float32")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    check(module, decode_all(model, PROMPTS))


def test_a_server_of_a_known_architecture_does_without_transformers(tmp_path):
    make(tmp_path)
    code = (
        "import sys; import hpc_rl.servers.embedded.backend; from hpc_rl.servers.embedded.model import Model\n"
        f"Model({str(tmp_path)!r}, 'bfloat16'); print('transformers' in sys.modules)"
    )
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout == ("False\n")


@pytest.mark.parametrize("kind", ["qwen3", "phi3"])
def test_any_causal_model_goes_through_its_own_forward(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("hpc_rl.servers.embedded.model.load_plain", lambda *_: None)
    monkeypatch.setattr("hpc_rl.servers.embedded.hf_decoder.FUSED_TYPES", ())
    module = make(tmp_path, kind)
    model = Model(str(tmp_path), "float32")
    assert isinstance(model.decoder, HFDecoder)
    check(module, decode_all(model, PROMPTS))


def test_rows_come_and_go_while_others_run(tmp_path):
    module = make(tmp_path)
    model = Model(str(tmp_path), "float32")
    made = []
    engine = EmbeddedEngine(model, "0.0", max_running=4, deliver=made.extend)
    waves = [
        [
            Sequence(
                PROMPTS[i % 5],
                SamplingParams(max_new_tokens=1 + (7 * i) % 13, temperature=0.0, ignore_eos=True),
                0,
                str(i),
            )
            for i in range(wave, wave + 6)
        ]
        for wave in range(0, 30, 6)
    ]
    with torch.inference_mode():
        for wave in waves:
            engine.submit(wave)
            for _ in range(3):
                engine._step()
        while engine._step():
            assert engine.load()["running"] <= 4
    assert len(made) == 30
    check(module, made)


def test_batch_invariant_rows_are_decoded_alone(tmp_path):
    module = make(tmp_path)
    model = Model(str(tmp_path), "float32")
    check(module, decode_all(model, PROMPTS, batch_invariant=True))


def test_sharded_and_untied_checkpoints_replace_the_weights(tmp_path):
    make(tmp_path / "a")
    new = make(tmp_path / "b", seed=1)
    new.save_pretrained(tmp_path / "c", max_shard_size="10KB")
    for name in ("b", "c"):
        model = Model(str(tmp_path / "a"), "float32")
        with torch.inference_mode():
            model.load(str(tmp_path / name))
        assert isinstance(model.decoder, FusedDecoder)
        check(new, decode_all(model, PROMPTS))


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    old = make(tmp_path / "a")
    make(tmp_path / "b", seed=1)
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"\x10\0\0\0")
    model = Model(str(tmp_path / "a"), "float32")
    for name, error in (("b", ValueError), ("torn", ValueError), ("nowhere", OSError)):
        with pytest.raises(error):
            model.load(str(tmp_path / name))
        check(old, decode_all(model, PROMPTS))


def test_sliding_windows_are_refused(tmp_path):
    make(tmp_path, "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ConfigError, match="sliding_attention"):
        Model(str(tmp_path), "float32")


def test_adapters_replace_each_other_and_a_whole_model_replaces_them(tmp_path):
    """The second adapter has other layers: those of the first one get their base values back."""
    base = make(tmp_path / "a")
    model = Model(str(tmp_path / "a"), "float32")
    for seed, layers in ((1, ["q_proj", "down_proj"]), (2, ["o_proj", "up_proj"]), (3, ["o_proj"])):
        torch.manual_seed(seed)
        settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=layers, init_lora_weights=False)
        theirs = peft.get_peft_model(copy.deepcopy(base), settings)
        theirs.save_pretrained(tmp_path / f"adapter-{seed}")
        with torch.inference_mode():
            model.load(str(tmp_path / f"adapter-{seed}"))
        check(theirs.merge_and_unload(), decode_all(model, PROMPTS))
    other = make(tmp_path / "b", seed=1)
    with torch.inference_mode():
        model.load(str(tmp_path / "b"))
    check(other, decode_all(model, PROMPTS))


def test_an_adapter_of_another_model_changes_nothing(tmp_path):
    base = make(tmp_path / "a")
    settings = peft.LoraConfig(r=2, target_modules=["fc1"], init_lora_weights=False)
    other = peft.get_peft_model(torch.nn.ModuleDict({"fc1": torch.nn.Linear(4, 4)}), settings)
    other.save_pretrained(tmp_path / "adapter")
    model = Model(str(tmp_path / "a"), "float32")
    with pytest.raises(ValueError, match=r"changes .*fc1\.weight, which the model does not have"):
        model.load(str(tmp_path / "adapter"))
    check(base, decode_all(model, PROMPTS))
