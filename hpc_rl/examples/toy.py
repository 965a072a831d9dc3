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
    """Write a random Qwen3 of 131k parameters with its tokenizer, in Hugging Face format. Imports torch."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(alphabet)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.1,  # with the usual 0.02 such a small network collapses at these learning rates
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(alphabet: str = ALPHABET):
    """Return a tokenizer with one token per character: pad 0, eos 1, unk 2, then the alphabet.

    Its chat template joins the contents of the messages.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast
