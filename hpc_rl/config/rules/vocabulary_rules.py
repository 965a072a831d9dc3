"""Rules about vocabularies: a token id means the same to tokenizer, trained model and reference model.

Models of other pools read and write text, each by its own tokenizer, so theirs may differ.
"""

import filecmp
from collections.abc import Collection, Iterator
from pathlib import Path

from hpc_rl.config.options.experiment import Config
from hpc_rl.config.rules.container_rules import is_trusted
from hpc_rl.config.rules.training_rules import models, trained
from hpc_rl.core.trial import read_json

MAX_EXAMPLES = 3
SMALL_BYTES = 1 << 20
MAX_PADDING = 0.02  # by which sizes of models of one family differ
_USE = "The KL term compares probabilities token by token: use a reference model of the same family"


def vocabularies(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """Yield that a model has no output for tokens of the tokenizer, or gives their ids other meanings."""
    section, engine = trained(config)
    option = "tokenizer_path" if config.tokenizer_path else f"{section}.path"
    own = Path(config.tokenizer_path or engine.path)
    others = [
        (name, Path(model.path)) for name, model in models(config) if not is_trusted(config, model.path)
    ]
    others = [(name, folder) for name, folder in others if folder != own or _is_small(own)]
    if is_trusted(config, str(own)) or not others:
        return
    vocabulary = _vocabulary(own)
    for name, folder in others:
        size, actor_size = _size(folder), _size(Path(engine.path))
        came = f"{name}.path {folder} has a vocabulary of {size} tokens (vocab_size)"
        if size is not None and vocabulary and (last := max(vocabulary.values())) >= size:
            ids = f"the tokenizer of {option} {own} has ids up to {last}"
            yield f"{came}, but {ids}; use a model and a tokenizer that belong together."
        elif name == "ref" and (examples := _differences(own, vocabulary, folder)):
            yield f"{name}.path {folder} has another vocabulary than {section}.path: {examples}. {_USE}."
        elif name == "ref" and _is_of_another_family(folder, size, actor_size):
            yield f"{came}, and {section}.path {engine.path} has {actor_size}. {_USE}."


def _is_of_another_family(folder: Path, size: int | None, actor_size: int | None) -> bool:
    """Return whether the sizes differ by more than padding, and no tokenizer says what the tokens are."""
    if not size or not actor_size or (folder / "tokenizer.json").is_file():
        return False
    return abs(size - actor_size) > MAX_PADDING * actor_size


def _is_small(folder: Path) -> bool:
    """Return whether a tokenizer may have been made by hand; a large one belongs to the model beside it."""
    file = folder / "tokenizer.json"
    return file.is_file() and file.stat().st_size < SMALL_BYTES


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return token -> id, without added tokens; empty if this kind of tokenizer has no such table."""
    found = read_json(folder / "tokenizer.json")
    table = found.get("model", {}).get("vocab") if isinstance(found, dict) else None
    if isinstance(table, list):  # of a unigram model: [token, score]
        return {str(row[0]): number for number, row in enumerate(table) if isinstance(row, list) and row}
    return table if isinstance(table, dict) and all(isinstance(one, int) for one in table.values()) else {}


def _size(folder: Path) -> int | None:
    found = read_json(folder / "config.json")
    size = found.get("vocab_size") if isinstance(found, dict) else None
    return size if isinstance(size, int) else None


def _differences(own: Path, vocabulary: dict[str, int], other: Path) -> str:
    """Return some tokens that have another id with the tokenizer of another folder, if that has one."""
    files = [folder / "tokenizer.json" for folder in (own, other)]
    if not all(file.is_file() for file in files) or filecmp.cmp(files[0], files[1], shallow=False):
        return ""
    theirs = _vocabulary(other)
    wrong = [(token, number) for token, number in vocabulary.items() if theirs.get(token) != number]
    if not theirs or not wrong:
        return ""
    shown = (
        f"the token {token!r} has the id {number}, and there {theirs.get(token, 'none')}"
        for token, number in wrong[:MAX_EXAMPLES]
    )
    return "; ".join(shown)


RULES = [vocabularies]
