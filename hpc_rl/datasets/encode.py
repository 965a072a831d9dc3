"""Rows to tokens: prompts (rl), whole sequences with their loss mask (sft), pairs of sequences (rw)."""

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hpc_rl.config.sections.dataset import DatasetConfig
from hpc_rl.config.text_templates import as_text
from hpc_rl.datasets.order import locate
from hpc_rl.datasets.rows import Rows, load_rows
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Encoded = tuple[np.ndarray, np.ndarray]


def encode_prompt(tokenizer: Tokenizer, row: dict[str, Any]) -> list[int]:
    """Tokens of `prompt` (text or chat) or `messages` (chat). Raises ConfigError for a row with neither."""
    check_prompt(row)
    if (messages := messages_of(row)) is not None:
        return tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False)
    return tokenizer.encode(row["prompt"])


def check_prompt(row: dict[str, Any]) -> None:
    """Raise ConfigError for a row whose columns ask nothing; what a chat template refuses is seen later."""
    messages = messages_of(row)
    if messages is None and not isinstance(row.get("prompt"), str):
        raise _lacks(row, "a row needs a `prompt` (text) or `messages` (a list)")
    if not all(isinstance(message, dict) for message in messages or []):
        raise ConfigError("the messages of a row must be objects, such as {role: user, content: a text}.")


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the chat of a row, `messages` or a `prompt` that is a list; None where it is a text."""
    return next((row[name] for name in ("messages", "prompt") if isinstance(row.get(name), list)), None)


def question_of(row: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return what a row asks, of a chat its last turn of a user, and the turns before that.

    Raises ConfigError for a chat without a turn of a user.
    """
    messages = messages_of(row)
    if messages is None:
        return as_text(row.get("prompt")), []
    asked = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    if not asked:
        raise ConfigError("a chat without a turn of role user has no question.")
    return as_text(messages[asked[-1]].get("content")), messages[: asked[-1]]


def _lacks(row: dict[str, Any], needed: str) -> ConfigError:
    there = (f"{name!r} (null)" if value is None else repr(name) for name, value in row.items())
    return ConfigError(f"{needed}; this one has {', '.join(there) or 'nothing'}.")


def encode_sequence(tokenizer: Tokenizer, row: dict[str, Any]) -> Encoded:
    """Return ids [L] of prompt, completion and end of sequence, and loss_mask [L], false for the prompt."""
    completion = row.get("completion")
    if not isinstance(completion, str):
        raise _lacks(row, "an sft row needs a `completion` (text)")
    prompt = encode_prompt(tokenizer, row)
    made = tokenizer.encode(completion, add_special_tokens=False)
    if tokenizer.eos_token_id is not None:
        made.append(tokenizer.eos_token_id)
    mask = np.zeros(len(prompt) + len(made), bool)
    mask[len(prompt) :] = True
    return np.array(prompt + made, np.int32), mask


@dataclass(frozen=True)
class Prompt:
    """One task input: `row` is its place in the file, `columns` is the row as it stands there."""

    epoch: int
    row: int
    columns: dict[str, Any]
    input_ids: list[int]


class Prompts:
    """The prompts of a dataset in their order over epochs; those above `max_length` are left out or cut.

    Without a dataset there are none: a trial on environments alone.
    """

    def __init__(self, dataset: DatasetConfig | None, tokenizer: Tokenizer, seed: int) -> None:
        self.path = dataset.path if dataset else ""
        self.rows: Rows[dict[str, Any]] = load_rows(dataset.path) if dataset else Rows([], {})
        self.tokenizer = tokenizer
        self.seed = seed
        self.shuffle = dataset is not None and dataset.shuffle
        self._kept = list(range(len(self.rows)))
        self._last_tokens = 0  # of a prompt, 0 for all
        self._ids: list[np.ndarray] = []  # of all rows, where they are tokenized ahead
        if dataset is None:
            return
        # rows of the wrong kind are refused at the start, not when their turn comes
        encode_all(check_prompt, self.rows, 0, dataset.path)
        self.in_file_order(0)
        if dataset.num_workers:
            self._ids = encode_all(self._ids_of, self.rows, dataset.num_workers, dataset.path)
        if dataset.max_length is not None and dataset.too_long == "truncate_left":
            self._last_tokens = dataset.max_length
        elif dataset.max_length is not None:
            lengths = [len(ids) for ids in self._ids] or encode_all(
                lambda row: len(self._ids_of(row)), self.rows, 0, dataset.path
            )
            self._kept = [i for i in self._kept if lengths[i] <= dataset.max_length]
            numbers = (len(self._kept), len(self.rows), dataset.max_length)
            logger.info("%s: %d of %d prompts have at most %d tokens", dataset.path, *numbers)
        if not self._kept:
            raise _none_left(dataset, "prompt")

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._kept)

    def at(self, index: int) -> Prompt:
        """The prompt with this index, which counts over all epochs from 0."""
        epoch, position = locate(index, self.seed, len(self), self.shuffle)
        return self._prompt(epoch, position)

    def in_file_order(self, position: int) -> Prompt:
        """The position-th prompt as the file has them; for evaluations."""
        return self._prompt(0, position)

    def _prompt(self, epoch: int, position: int) -> Prompt:
        row = self._kept[position]
        columns = self.rows[row]
        with _named(self.path, row):
            ids = self._ids[row] if self._ids else self._ids_of(columns)
        return Prompt(epoch, row, columns, ids[-self._last_tokens :].tolist())

    def _ids_of(self, row: dict[str, Any]) -> np.ndarray:
        return np.array(encode_prompt(self.tokenizer, row), np.int32)


@contextmanager
def _named(path: str, row: int) -> Iterator[None]:
    """Name the row, counted from 1, in what refuses it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"dataset {path} row {row + 1}: {error}") from None


def encode_all(
    encode: Callable[[dict[str, Any]], T], rows: list[dict[str, Any]], num_workers: int, path: str
) -> list[T]:
    """Return `encode` of each row, in order, by threads: the tokenizer releases Python's lock.

    Raises ConfigError that names the row of the file at `path`.
    """

    def one(number: int) -> T:
        with _named(path, number):
            return encode(rows[number])

    if not num_workers:
        return [one(number) for number in range(len(rows))]
    with ThreadPoolExecutor(num_workers, thread_name_prefix="tokenize") as pool:
        return list(pool.map(one, range(len(rows)), chunksize=64))


def load_sequences(dataset: DatasetConfig, tokenizer: Tokenizer) -> Rows[Encoded]:
    """Return encode_sequence of every row that `max_length` allows. Raises ConfigError if none is left."""
    return _load(dataset, "sequence", partial(encode_sequence, tokenizer))


def load_pairs(dataset: DatasetConfig, tokenizer: Tokenizer) -> Rows[Encoded]:
    """Return encode_pair of every row that `max_length` allows. Raises ConfigError if none is left."""
    return _load(dataset, "pair", partial(encode_pair, tokenizer))


def _load(dataset: DatasetConfig, what: str, encode: Callable[[dict[str, Any]], Encoded]) -> Rows[Encoded]:
    read = load_rows(dataset.path)
    rows = encode_all(encode, read, dataset.num_workers, dataset.path)
    if dataset.max_length is not None:
        rows = [row for row in rows if max(map(len, row)) <= dataset.max_length]
    if not rows:
        raise _none_left(dataset, what)
    return Rows(rows, read.fingerprint)


def save_encoded(path: Path, rows: Rows[Encoded]) -> None:
    """Write rows of load_sequences or load_pairs as a file for `read_encoded`. Raises OSError."""
    columns: dict[str, Any] = {}
    for number, arrays in enumerate(zip(*rows, strict=True)):
        columns[f"values{number}"] = np.concatenate(arrays)
        columns[f"ends{number}"] = np.cumsum([len(one) for one in arrays])
    np.savez(path, fingerprint=np.array(json.dumps(rows.fingerprint)), **columns)


def read_encoded(path: Path) -> Rows[Encoded]:
    """Return what `save_encoded` wrote. Raises OSError."""
    with np.load(path) as read:
        columns = [np.split(read[f"values{number}"], read[f"ends{number}"][:-1]) for number in (0, 1)]
        return Rows(zip(*columns, strict=True), json.loads(str(read["fingerprint"])))


def _none_left(dataset: DatasetConfig, what: str) -> ConfigError:
    each = " each" if what == "pair" else ""
    return ConfigError(
        f"dataset {dataset.path}: no {what} has at most max_length = {dataset.max_length} tokens{each}."
    )


def encode_pair(tokenizer: Tokenizer, row: dict[str, Any]) -> Encoded:
    """(ids of chosen, ids of rejected), int32, each with the end-of-sequence token.

    `chosen` and `rejected` are completions of `prompt` (or of `messages`), or, without one, whole texts or
    lists of messages.
    """
    chosen, rejected = (_scored(tokenizer, row, row.get(column)) for column in ("chosen", "rejected"))
    return chosen, rejected


def _scored(tokenizer: Tokenizer, row: dict[str, Any], text: Any) -> np.ndarray:
    has_prompt = isinstance(row.get("prompt"), str) or messages_of(row) is not None
    if isinstance(text, list) and not has_prompt:
        chat = tokenizer.chat(text, add_generation_prompt=False)
        ids = tokenizer.encode(chat, add_special_tokens=False)
    elif isinstance(text, str):
        ids = encode_prompt(tokenizer, row) if has_prompt else []
        ids = ids + tokenizer.encode(text, add_special_tokens=not has_prompt)
    else:
        needed = "an rw row needs `chosen` and `rejected` (text, or without a prompt lists of messages)"
        raise _lacks(row, needed)
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ConfigError("an rw row has an empty text, and the tokenizer has no end-of-sequence token.")
    return np.array(ids, np.int32)
