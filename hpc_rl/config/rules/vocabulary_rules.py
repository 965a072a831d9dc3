"""Rules about vocabularies: the tokenizer and all models in the trainer must agree on the token ids.

Models of other pools exchange text and use their own tokenizers, so their vocabularies may differ.
"""

import filecmp
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from hpc_rl.config.options.experiment import Config
from hpc_rl.config.rules.container_rules import is_trusted
from hpc_rl.config.rules.training_rules import find_trained_model, list_models
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import load_json

MAX_EXAMPLES = 3
SMALL_BYTES = 1 << 20
MAX_PADDING = 0.02  # largest share by which vocabulary sizes differ within a family
_USE = {
    "ref": "Probabilities are compared token by token: use a reference model of the same family",
    "critic": "The critic reads the tokens of the policy: use a model of the same family",
}


def check_vocabularies(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse a model that lacks token ids of the tokenizer, or uses them for other tokens."""
    section, engine = find_trained_model(config)
    option = "tokenizer_path" if config.tokenizer_path else f"{section}.path"
    own = Path(config.tokenizer_path or engine.path)
    others = [
        (name, Path(model.path)) for name, model in list_models(config) if not is_trusted(config, model.path)
    ]
    others = [(name, folder) for name, folder in others if folder != own or _is_small(own)]
    if is_trusted(config, str(own)) or not others:
        return
    vocabulary = _load_vocabulary(own)
    for name, folder in others:
        size, actor_size = load_vocabulary_size(folder), load_vocabulary_size(Path(engine.path))
        refuse = partial(Refusal, option=f"{name}.path", value=folder, kind=Kind.FILE)
        trained, came = f"{section}.path", f"has a vocabulary of {size} tokens (vocab_size)"
        if size is not None and vocabulary and (last := max(vocabulary.values())) >= size:
            yield refuse(
                why=f"{came}, but the tokenizer of {option} {own} has ids up to {last}",
                use="use a model and a tokenizer that belong together",
                related=(option,) if option != f"{name}.path" else (),
            )
        elif name in _USE and (examples := _describe_differences(own, vocabulary, folder)):
            why = f"has another vocabulary than {trained}: {examples}. {_USE[name]}"
            yield refuse(why=why, related=(trained,))
        elif name in _USE and _is_of_another_family(folder, size, actor_size):
            why = f"{came}, and {trained} {engine.path} has {actor_size}. {_USE[name]}"
            yield refuse(why=why, related=(trained,))


def _is_of_another_family(folder: Path, size: int | None, actor_size: int | None) -> bool:
    """Return whether the sizes differ by more than padding, and no tokenizer tells the tokens."""
    if not size or not actor_size or (folder / "tokenizer.json").is_file():
        return False
    return abs(size - actor_size) > MAX_PADDING * actor_size


def _is_small(folder: Path) -> bool:
    """Return whether a tokenizer may be handmade; a large one belongs to the model in its directory."""
    file = folder / "tokenizer.json"
    return file.is_file() and file.stat().st_size < SMALL_BYTES


def _load_vocabulary(folder: Path) -> dict[str, int]:
    """Return token -> id, without added tokens; empty if the tokenizer has no such table."""
    found = load_json(folder / "tokenizer.json")
    table = found.get("model", {}).get("vocab") if isinstance(found, dict) else None
    if isinstance(table, list):  # of a unigram model: [token, score]
        return {str(row[0]): number for number, row in enumerate(table) if isinstance(row, list) and row}
    return table if isinstance(table, dict) and all(isinstance(one, int) for one in table.values()) else {}


def load_vocabulary_size(folder: Path) -> int | None:
    """Return the number of tokens of a model; None if its config.json does not have it."""
    found = load_json(folder / "config.json")
    size = found.get("vocab_size") if isinstance(found, dict) else None
    return size if isinstance(size, int) else None


def _describe_differences(own: Path, vocabulary: dict[str, int], other: Path) -> str:
    """Describe some tokens that have another id in the tokenizer of another folder, if it has one."""
    files = [folder / "tokenizer.json" for folder in (own, other)]
    if not all(file.is_file() for file in files) or filecmp.cmp(files[0], files[1], shallow=False):
        return ""
    theirs = _load_vocabulary(other)
    wrong = [(token, number) for token, number in vocabulary.items() if theirs.get(token) != number]
    if not theirs or not wrong:
        return ""
    shown = (
        f"the token {token!r} has the id {theirs[token]} instead of {number}"
        if token in theirs
        else f"the token {token!r} (id {number}) is missing"
        for token, number in wrong[:MAX_EXAMPLES]
    )
    return "; ".join(shown)


RULES = [check_vocabularies]
