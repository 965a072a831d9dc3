"""Encodes rows as tokens: prompts (rl), sequences with a loss mask (sft), pairs of sequences (rw, dpo)."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.row_shapes import check_row, get_messages
from hpc_rl.config.text_templates import make_text
from hpc_rl.core.errors import ConfigError
from hpc_rl.datasets.order import locate
from hpc_rl.datasets.rows import Rows, load_rows, name_in_errors
from hpc_rl.datasets.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
Encoded = tuple[np.ndarray, ...]


def encode_prompt(tokenizer: Tokenizer, row: dict[str, Any]) -> list[int]:
    """Return the tokens of `prompt` (text or chat) or `messages` (chat). Raises ConfigError."""
    check_row(row, "rl")
    if (messages := get_messages(row)) is not None:
        return tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False)
    return tokenizer.encode(row["prompt"])


def find_question(row: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the question of a row and the turns before it. In a chat, the question is the last user turn.

    Raises ConfigError for a chat without a user turn.
    """
    messages = get_messages(row)
    if messages is None:
        return make_text(row.get("prompt")), []
    asked = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    if not asked:
        raise ConfigError("a chat needs a message of role user, which is the question.")
    return make_text(messages[asked[-1]].get("content")), messages[: asked[-1]]


def encode_sequence(tokenizer: Tokenizer, row: dict[str, Any]) -> Encoded:
    """Return ids [L] of prompt, completion and end of sequence, and loss_mask [L], false for the prompt."""
    row = check_row(row, "sft")
    prompt = encode_prompt(tokenizer, row)
    made = tokenizer.encode(row["completion"], add_special_tokens=False)
    if tokenizer.eos_token_id is not None:
        made.append(tokenizer.eos_token_id)
    mask = np.zeros(len(prompt) + len(made), bool)
    mask[len(prompt) :] = True
    return np.array(prompt + made, np.int32), mask


@dataclass(frozen=True)
class Prompt:
    """One task input. `row` is its position in the file, `columns` the row with renamed columns.

    `epoch` tells repeated visits to a row apart.
    """

    epoch: int
    row: int
    columns: dict[str, Any]
    input_ids: list[int]


class Prompts:
    """The prompts of a dataset in their order over epochs. Prompts above `max_length` are dropped or cut.

    Without a dataset there are no prompts; the trial then trains on environments only.
    """

    def __init__(self, dataset: DatasetConfig | None, tokenizer: Tokenizer, seed: int) -> None:
        self.path = dataset.path if dataset else ""
        self.rows = load_rows(dataset.path, dataset.columns) if dataset else Rows[dict[str, Any]]([], {})
        self.tokenizer = tokenizer
        self.seed = seed
        self.shuffle = dataset is not None and dataset.shuffle
        self.kept = list(range(len(self.rows)))  # rows that are not dropped
        self._last_tokens = 0  # keep this many last tokens of a prompt, 0 for all
        self._ids: list[np.ndarray] = []  # of all rows, if they are tokenized in advance
        if dataset is None:
            return
        # check the form of all rows at the start, not when they are used
        encode_all(partial(check_row, kind="rl"), self.rows, 0, dataset.path)
        self.in_file_order(0)
        if dataset.num_workers:
            self._ids = encode_all(self._ids_of, self.rows, dataset.num_workers, dataset.path)
        if dataset.max_length is not None and dataset.too_long == "truncate_left":
            self._last_tokens = dataset.max_length
        elif dataset.max_length is not None:
            lengths = [len(ids) for ids in self._ids] or encode_all(
                lambda row: len(self._ids_of(row)), self.rows, 0, dataset.path
            )
            self.kept = [i for i in self.kept if lengths[i] <= dataset.max_length]
            numbers = (len(self.kept), len(self.rows), dataset.max_length)
            form = "dataset %s: %d of %d prompts are used; the others have more than max_length = %d tokens"
            logger.info(form, dataset.path, *numbers)
        if not self.kept:
            raise _make_empty_error(dataset, "prompt")

    def __len__(self) -> int:
        """Return the number of prompts in one epoch."""
        return len(self.kept)

    def at(self, index: int) -> Prompt:
        """Return the prompt with this index, counted over all epochs from 0."""
        return self.get(*self.locate(index))

    def locate(self, index: int) -> tuple[int, int]:
        """Return epoch and row of the index-th visit, counted over all epochs from 0."""
        epoch, position = locate(index, self.seed, len(self), self.shuffle)
        return epoch, self.kept[position]

    def get(self, epoch: int, row: int) -> Prompt:
        """Return the prompt of a row of the file."""
        columns = self.rows[row]
        with name_in_errors(self.path, row):
            ids = self._ids[row] if self._ids else self._ids_of(columns)
        return Prompt(epoch, row, columns, ids[-self._last_tokens :].tolist())

    def in_file_order(self, position: int) -> Prompt:
        """Return the prompt at a position in file order, for evaluations."""
        return self.get(0, self.kept[position])

    def columns(self, position: int) -> dict[str, Any]:
        """Return the columns of the prompt at a position in file order."""
        return self.rows[self.kept[position]]

    def _ids_of(self, row: dict[str, Any]) -> np.ndarray:
        return np.array(encode_prompt(self.tokenizer, row), np.int32)


def encode_all(
    encode: Callable[[dict[str, Any]], T], rows: list[dict[str, Any]], num_workers: int, path: str
) -> list[T]:
    """Encode each row, in order, with threads (the tokenizer releases the GIL).

    Raises ConfigError with the row's number in the file at `path`.
    """

    def one(number: int) -> T:
        with name_in_errors(path, number):
            return encode(rows[number])

    if not num_workers:
        return [one(number) for number in range(len(rows))]
    with ThreadPoolExecutor(num_workers, thread_name_prefix="tokenize") as pool:
        return list(pool.map(one, range(len(rows)), chunksize=64))


def load_sequences(dataset: DatasetConfig, tokenizer: Tokenizer) -> Rows[Encoded]:
    """Load and encode all sequences of at most `max_length`. Raises ConfigError if none is left."""
    return _load(dataset, "sequence", partial(encode_sequence, tokenizer))


def load_pairs(dataset: DatasetConfig, tokenizer: Tokenizer) -> Rows[Encoded]:
    """Load and encode all pairs of at most `max_length`. Raises ConfigError if none is left."""
    return _load(dataset, "pair", partial(encode_pair, tokenizer))


def load_preferences(dataset: DatasetConfig, tokenizer: Tokenizer) -> Rows[Encoded]:
    """Load and encode all pairs of at most `max_length`, with masks. Raises ConfigError if none is left."""
    return _load(dataset, "pair", partial(encode_preference, tokenizer))


def _load(dataset: DatasetConfig, what: str, encode: Callable[[dict[str, Any]], Encoded]) -> Rows[Encoded]:
    read = load_rows(dataset.path, dataset.columns)
    rows = encode_all(encode, read, dataset.num_workers, dataset.path)
    if dataset.max_length is not None:
        rows = [row for row in rows if max(map(len, row)) <= dataset.max_length]
    if not rows:
        raise _make_empty_error(dataset, what)
    return Rows(rows, read.fingerprint)


def save_encoded(path: Path, rows: Rows[Encoded]) -> None:
    """Write rows of one of the functions above as a file for `load_encoded`. Raises OSError."""
    columns: dict[str, Any] = {}
    for number, arrays in enumerate(zip(*rows, strict=True)):
        columns[f"values{number}"] = np.concatenate(arrays)
        columns[f"ends{number}"] = np.cumsum([len(one) for one in arrays])
    np.savez(path, fingerprint=np.array(json.dumps(rows.fingerprint)), **columns)


def load_encoded(path: Path) -> Rows[Encoded]:
    """Return what `save_encoded` wrote. Raises OSError."""
    with np.load(path) as read:
        columns = [
            np.split(read[f"values{number}"], read[f"ends{number}"][:-1])
            for number in range(len(read.files) // 2)
        ]
        return Rows(zip(*columns, strict=True), json.loads(str(read["fingerprint"])))


def _make_empty_error(dataset: DatasetConfig, what: str) -> ConfigError:
    each = " for each text" if what == "pair" else ""
    return ConfigError(
        f"dataset {dataset.path}: every {what} is longer than max_length = {dataset.max_length} tokens{each}."
    )


def encode_pair(tokenizer: Tokenizer, row: dict[str, Any]) -> Encoded:
    """Return (ids of chosen, ids of rejected), int32, each with the end-of-sequence token.

    `chosen` and `rejected` are completions of `prompt` or `messages`. Without a prompt, they are whole texts
    or lists of messages.
    """
    row = check_row(row, "rw")
    chosen, rejected = (encode_scored(tokenizer, row, row.get(column)) for column in ("chosen", "rejected"))
    return chosen, rejected


def encode_preference(tokenizer: Tokenizer, row: dict[str, Any]) -> Encoded:
    """Return ids of chosen and rejected as `encode_pair` does, and their loss masks, bool.

    The masks leave out the prompt, or without a prompt the first tokens that both have: the ratios of their
    probabilities are the same for both, and cancel in the loss.
    """
    row = check_row(row, "dpo")
    (chosen, start), (rejected, _) = (
        _encode_answer(tokenizer, row, row.get(column)) for column in ("chosen", "rejected")
    )
    if not start:
        shortest = min(len(chosen), len(rejected))
        differs = np.flatnonzero(chosen[:shortest] != rejected[:shortest])
        start = int(differs[0]) if len(differs) else shortest
    return chosen, rejected, *(np.arange(len(ids)) >= start for ids in (chosen, rejected))


def encode_scored(tokenizer: Tokenizer, row: dict[str, Any], text: Any) -> np.ndarray:
    """Return the tokens, int32, that a reward model scores: `text` after the prompt of `row`, if any.

    Raises ConfigError if there are no tokens.
    """
    return _encode_answer(tokenizer, row, text)[0]


def _encode_answer(tokenizer: Tokenizer, row: dict[str, Any], text: Any) -> tuple[np.ndarray, int]:
    """Return the tokens of prompt and text, int32, and the number of tokens of the prompt."""
    num_prompt = 0
    has_prompt = isinstance(row.get("prompt"), str) or get_messages(row) is not None
    if isinstance(text, list) and not has_prompt:
        chat = tokenizer.chat(text, add_generation_prompt=False)
        ids = tokenizer.encode(chat, add_special_tokens=False)
    else:
        ids = encode_prompt(tokenizer, row) if has_prompt else []
        num_prompt = len(ids)
        ids = ids + tokenizer.encode(text, add_special_tokens=not has_prompt)
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError(
            "a row has an empty text, and the tokenizer has no end-of-sequence token: remove the row."
        )
    return np.array(ids, np.int32), num_prompt
