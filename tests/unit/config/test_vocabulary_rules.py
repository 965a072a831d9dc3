"""Models and tokenizers that belong together, by the ids of their tokens."""

import json
from pathlib import Path

import pytest

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.vocabulary_rules import check_vocabularies
from hpc_rl.core.refusal import Kind, Refusal

NUMBERS = {"<unk>": 0, "1": 1, "2": 2}


def write_checkpoint(
    folder: Path, vocabulary: dict[str, int] | None, size: int | None = 3, **more: object
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": size} if size else {}))
    if vocabulary is not None:
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
        (folder / "tokenizer.json").write_text(json.dumps({"model": model, **more}))
    return folder


def collect_refusals(actor: Path, *options: str) -> list[Refusal]:
    given = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", f"actor.path={actor}", *options]
    loaded = load([], [*given, "launcher.type=local"])
    return list(check_vocabularies(loaded.config, loaded.explicit))


ADDED = {"added_tokens": [{"id": 3, "content": "<pad>"}]}
REFERENCES = {  # vocabulary and size of the reference model, what else its tokenizer has -> words
    "the same": (NUMBERS, 3, {}, ""),
    "the same, padded to another size": (NUMBERS, 8, {}, ""),
    "the same beside added tokens": (NUMBERS, 4, ADDED, ""),
    "no tokenizer of its own": (None, 3, {}, ""),
    "other tokens": ({"<unk>": 0, "1": 2, "2": 1}, 3, {}, "the token '1' has the id 2 instead of 1"),
    "a part of the tokens": ({"<unk>": 0, "1": 1}, 3, {}, "the token '2' (id 2) is missing"),
    "no output for a token": (NUMBERS, 2, {}, "vocabulary of 2 tokens (vocab_size), but the tokenizer of actor.path"),
    "another family, and no tokenizer": (None, 128_256, {}, "vocabulary of 128256 tokens (vocab_size), and actor.path"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_model_has_the_tokens_of_the_trained_one(tmp_path, name):
    vocabulary, size, more, words = REFERENCES[name]
    reference = write_checkpoint(tmp_path / "ref", vocabulary, size, **more)
    found = collect_refusals(write_checkpoint(tmp_path / "actor", NUMBERS), f"ref.path={reference}")
    about = [(one.option, one.value, one.kind, one.related) for one in found]
    assert about == ([("ref.path", reference, Kind.FILE, ("actor.path",))] if words else [])
    assert not words or words in found[0].why


def test_a_tokenizer_of_ids_that_the_model_lacks(tmp_path):
    large = write_checkpoint(tmp_path / "large", NUMBERS | {"3": 3})
    found = collect_refusals(write_checkpoint(tmp_path / "actor", NUMBERS), f"tokenizer_path={large}")
    assert [(one.option, one.related) for one in found] == [("actor.path", ("tokenizer_path",))]
    assert f"tokenizer of tokenizer_path {large} has ids up to 3" in found[0].why
    assert collect_refusals(write_checkpoint(tmp_path / "unknown", NUMBERS, size=None)) == []
