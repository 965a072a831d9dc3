"""Tokenizers with a chat template, as fixtures: a conftest imports them."""

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hpc_rl.datasets.tokenizer
from hpc_rl.examples.toy import make_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory) -> hpc_rl.datasets.tokenizer.Tokenizer:
    """One token per character, and ChatML."""
    special = ["<|im_end|>", "<|im_start|>", "<unk>"]
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*special, *characters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", unk_token="<unk>")
    fast.chat_template = CHATML
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return hpc_rl.datasets.tokenizer.Tokenizer(folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """The toy's, with a template that ends in `=`."""
    folder = tmp_path_factory.mktemp("toy-tokenizer")
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return hpc_rl.datasets.tokenizer.Tokenizer(folder)
