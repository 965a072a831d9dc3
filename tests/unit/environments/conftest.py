"""The toy's tokenizer with a chat template, in a folder."""

import pytest

from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.examples.toy import make_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return Tokenizer(folder)
