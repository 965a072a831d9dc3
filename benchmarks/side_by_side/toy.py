"""The task on which both sides train: a digit and a colon, to be answered by as many of that digit as possible.

Both sides get the same model folder, the same rows and the same reward function. Needs torch and transformers
only, because it also runs in the peer's environment.
"""

import json
import random
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

NUM_PROMPTS, NUM_SAMPLES = 8, 8  # of a step
MAX_NEW_TOKENS = 32
NUM_IDS = 512
LETTERS = "0123456789" + "+-*/=:;,.?! " + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LETTERS += "()[]{}<>|&^%$#@_~'\"`\n"
SUPERVISED_STEPS = 20


def score_digits(completion: str, answer: str) -> float:
    """Return the share of tokens that are the answer. The end of a completion counts as a token."""
    tokens = re.findall(r"<x\d+>|[\s\S]", completion)
    num_tokens = len(tokens) + (len(tokens) < MAX_NEW_TOKENS)
    return tokens.count(answer) / num_tokens


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character: pad 0, eos 1, unk 2, then LETTERS."""
    known = ["<pad>", "<eos>", "<unk>", *LETTERS]
    known += [f"<x{number}>" for number in range(len(known), NUM_IDS)]
    vocabulary = {token: number for number, token in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def make_rows(seed: int, num_rows: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    digits = [str(draw.randrange(10)) for _ in range(num_rows)]
    return [{"prompt": f"{digit}:", "answer": digit} for digit in digits]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_models(folder: Path) -> None:
    """Write `cold`, a random model of 853,376 parameters, and `warm`, after some supervised steps."""
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=NUM_IDS,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    for name in ("cold", "warm"):
        if name == "warm":
            _train_supervised(model, tokenizer)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _train_supervised(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train on 32 rows a step: the answer once, and the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = make_rows(1, 32 * SUPERVISED_STEPS)
    for start in range(0, len(rows), 32):
        texts = [row["prompt"] + row["answer"] for row in rows[start : start + 32]]
        ids = torch.tensor([[*tokenizer(text)["input_ids"], 1] for text in texts])
        labels = ids.clone()
        labels[:, :2] = -100  # all prompts have two tokens
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()


def count_parameters(folder: Path) -> int:
    return AutoModelForCausalLM.from_pretrained(folder).num_parameters()
