"""Chat: the checkpoint's template in a sandbox, OpenAI requests to native ones and back."""

import json

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from hpc_rl.core.errors import ConfigError, RequestRefused
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.servers.chat import convert_answers, convert_request

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture
def folder(tmp_path):
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"abcdeu:;"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<eos>"}, "chat_template": TEMPLATE})
    )
    return tmp_path


def answer(ids, matched=None):
    reason = {"type": "length", "length": len(ids)}
    if matched is not None:
        reason = {"type": "stop", "matched": matched}
    meta = {
        "finish_reason": reason,
        "prompt_tokens": 4,
        "completion_tokens": len(ids),
        "weight_version": "0.1",
        "weight_versions": [],
    }
    return {"output_ids": ids, "meta_info": meta}


def test_messages_become_ids_by_the_template(folder):
    tokenizer = Tokenizer(folder)
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.chat(messages) == "u:ab;a:"
    request, stops = convert_request(
        {"messages": messages, "max_tokens": 5, "seed": 3, "n": 2}, tokenizer, 64
    )
    assert tokenizer.decode(request["input_ids"]) == "u:ab;a:"
    assert request["sampling_params"] == {"max_new_tokens": 5, "sampling_seed": 3, "n": 2} and stops == []


def test_without_max_tokens_the_context_is_the_bound(folder):
    request, _ = convert_request({"messages": [{"role": "user", "content": "ab"}]}, Tokenizer(folder), 64)
    assert request["sampling_params"]["max_new_tokens"] == 64 - 7


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": ["hi"]}, "list of at least one object"),
        ({"messages": [{"role": "user", "content": "a"}], "stop": 5}, "stop must be"),
        ({"messages": [{"role": "user", "content": "a"}], "stream": True}, "stream"),
        ({"messages": [{"role": "user", "content": "a"}], "frobnicate": 1}, "unknown chat key 'frobnicate'"),
    ],
)
def test_refusals_name_the_key(folder, body, words):
    with pytest.raises(RequestRefused, match=words):
        convert_request(body, Tokenizer(folder), 64)


def test_completion_drops_the_stop_token_and_cuts_at_stop_strings(folder):
    tokenizer = Tokenizer(folder)
    made = [answer([2, 3, 1], matched=1), answer([2, 7, 4])]
    choices = convert_answers({}, made, tokenizer, [])["choices"]
    told = [(c["message"]["content"], c["finish_reason"], c["matched_stop"]) for c in choices]
    assert told == [("ab", "stop", 1), ("auc", "length", None)]
    cut = convert_answers({}, made, tokenizer, ["u"])["choices"][1]
    assert (cut["message"]["content"], cut["finish_reason"], cut["matched_stop"]) == ("a", "stop", "u")


def test_template_file_wins_and_can_refuse(folder):
    (folder / "chat_template.jinja").write_text(
        "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}x"
    )
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == "x"
    with pytest.raises(ConfigError, match="one only"):
        tokenizer.chat([{}, {}])
    with pytest.raises(RequestRefused, match="one only"):
        convert_request({"messages": [{}, {}]}, tokenizer, 64)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses the messages"),  # no way to Python
        ("{% for m in messages %}", "is not valid.*line 1"),
        ("{{ messages[0]['content'] + 1 }}", "refuses the messages"),
    ],
)
def test_a_template_that_fails_is_named(folder, template, words):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=words):
        Tokenizer(folder).chat([{"role": "user", "content": "a"}])


def test_a_template_that_marks_the_assistants_text_is_taken(folder):
    marked = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ eos_token }}"
    )
    (folder / "chat_template.jinja").write_text(marked)
    assert Tokenizer(folder).chat([{"role": "assistant", "content": "a"}]) == "a<eos>"
