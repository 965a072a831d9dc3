"""The toy of the quickstart: the sum of three digits, and a model small enough to learn it on one CPU thread.

1,000 distinct prompts `a+b+c=`; 200 are held out, so that the curve shows generalization, not memory. The
tokenizer has one token per character. Nothing else in the package depends on this toy; `hints.py` has another
task for the same model.
"""

import json
import random
from pathlib import Path

ALPHABET = "0123456789+=;"
NUM_HELDOUT = 200
SPECIAL = ("<pad>", "<eos>", "<unk>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
INITIALIZER_RANGE = 0.1  # with the usual 0.02 such a small network collapses at these learning rates
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def make(folder: Path, seed: int) -> None:
    """Make task/ and base/, the random model."""
    make_task(folder / "task", seed)
    make_model(folder / "base", seed)


def make_task(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl (800 prompts) and heldout.jsonl (200, disjoint) with columns prompt, answer.

    Also writes sft.jsonl (prompt, completion) and preferences.jsonl (prompt, chosen, rejected: a right and a
    wrong sum) with the prompts of train.jsonl, and preferences-heldout.jsonl with the prompts of
    heldout.jsonl.
    """
    sums = [(f"{a}+{b}+{c}=", str(a + b + c)) for a in range(10) for b in range(10) for c in range(10)]
    random.Random(seed).shuffle(sums)
    heldout, train = sums[:NUM_HELDOUT], sums[NUM_HELDOUT:]
    files = {
        "train": [{"prompt": prompt, "answer": answer} for prompt, answer in train],
        "heldout": [{"prompt": prompt, "answer": answer} for prompt, answer in heldout],
        "sft": [{"prompt": prompt, "completion": answer} for prompt, answer in train],
    }
    for name, part in (("preferences", train), ("preferences-heldout", heldout)):
        draw = random.Random(f"{seed}/{name}")
        files[name] = [
            {"prompt": prompt, "chosen": answer, "rejected": _make_wrong(answer, draw)}
            for prompt, answer in part
        ]
    write_rows(folder, files)


def write_rows(folder: Path, files: dict[str, list[dict[str, str]]]) -> None:
    """Write `<name>.jsonl` for each name, one line a row."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_wrong(answer: str, draw: random.Random) -> str:
    """Return another sum that three digits can have."""
    return str((int(answer) + draw.randrange(1, 28)) % 28)


def make_model(folder: Path, seed: int = 0, alphabet: str = ALPHABET) -> None:
    """Write a random Qwen3 of 100k parameters with its tokenizer, in Hugging Face format.

    It needs neither torch nor transformers, whose import takes longer than everything else here.
    """
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = len(SPECIAL) + len(alphabet)
    draw = np.random.default_rng(seed)
    shapes = list_shapes(vocab_size)
    weights = {
        name: np.ones(shape) if name.endswith("norm.weight") else draw.normal(0.0, INITIALIZER_RANGE, shape)
        for name, shape in shapes.items()
    }
    as_float32 = {name: value.astype(np.float32) for name, value in weights.items()}
    save_file(as_float32, folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"eos_token_id": SPECIAL.index("<eos>"), "pad_token_id": SPECIAL.index("<pad>")}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        **SIZES,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": None,
        **ends,
    }
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    files = {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **names},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _build_tokenizer(alphabet).save(str(folder / "tokenizer.json"))


def list_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's weights by name; the embedding is also the output layer."""
    hidden, middle, size = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * size, SIZES["num_key_value_heads"] * size
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    layers = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(SIZES["num_hidden_layers"])
        for name, shape in of_layer.items()
    }
    return {"model.embed_tokens.weight": (vocab_size, hidden), **layers, "model.norm.weight": (hidden,)}


def make_tokenizer(alphabet: str = ALPHABET):
    """Return the model's tokenizer as one of transformers: one token per character.

    Its chat template joins the contents of the messages.
    """
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=_build_tokenizer(alphabet), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _build_tokenizer(alphabet: str):
    """Return a tokenizer with the tokens of SPECIAL, then the alphabet."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
