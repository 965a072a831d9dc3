"""The toy is written without torch and transformers, which load it as one of their own."""

import subprocess
import sys

import numpy as np
import pytest

from hpc_rl.examples import toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("toy")
    toy.make(made, 1)
    return made


def test_transformers_loads_the_model_with_all_its_weights(folder):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder / "base", output_loading_info=True)
    assert not any(report.values()), report
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.num_parameters() == 99_712
    weights = model.state_dict()
    assert weights["lm_head.weight"].equal(weights["model.embed_tokens.weight"])
    shapes = {name: tuple(value.shape) for name, value in weights.items() if name != "lm_head.weight"}
    assert shapes == toy.list_shapes(16)
    matrix = weights["model.layers.1.mlp.up_proj.weight"].numpy()
    assert abs(matrix.std() - 0.1) < 0.005 and abs(matrix.mean()) < 0.005
    assert (weights["model.layers.0.self_attn.q_norm.weight"] == 1).all()
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)


def test_the_tokenizer_has_one_token_per_character(folder):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder / "base")
    for tokenizer in (loaded, toy.make_tokenizer()):
        assert tokenizer.encode("3+4=x") == [6, 13, 7, 14, 2]
        assert tokenizer.decode([6, 13, 7, 14, 10, 1], skip_special_tokens=True) == "3+4=7"
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
        chat = [{"role": "user", "content": "1+"}, {"role": "user", "content": "2="}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "1+2="


def test_a_seed_gives_the_same_files(folder, tmp_path):
    toy.make(tmp_path, 1)
    for path in folder.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / path.relative_to(folder)).read_bytes()
    toy.make_model(tmp_path / "other", 2)
    from safetensors.numpy import load_file

    weights = [load_file(one / "model.safetensors") for one in (folder / "base", tmp_path / "other")]
    assert not np.array_equal(*(one["model.embed_tokens.weight"] for one in weights))


def test_it_imports_neither_torch_nor_transformers(tmp_path):
    code = (
        "import sys; from pathlib import Path; from hpc_rl.examples import toy; "
        f"toy.make(Path({str(tmp_path)!r}), 0); print({{'torch', 'transformers'}} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
