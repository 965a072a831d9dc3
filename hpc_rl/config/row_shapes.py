"""Rows of a dataset: the columns that each kind needs, renamed columns, and the first rows of a file.

Submission checks the first rows with the functions that the job uses for all rows.
"""

import functools
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import load_json

NUM_FIRST = 64
JSONL = (".jsonl", ".json", ".ndjson")
Row = dict[str, Any]
_PROMPTS = ("prompt", "messages")
PAIRS = ("rw", "dpo")  # kinds of rows with two answers, `chosen` and `rejected`


@dataclass(frozen=True)
class Shape:
    """The columns that identify a known data set, and the names that hpc-rl needs for them.

    `prompt` is the column with the question, or empty if it is called `prompt` already. `columns` maps other
    needed names to columns.
    """

    kind: str  # rl or sft
    known_by: tuple[str, ...]
    prompt: str
    columns: Mapping[str, str]
    is_maths: bool = False


SHAPES = (
    Shape("rl", ("question", "answer"), "question", {}),  # GSM8K
    Shape("rl", ("problem", "answer"), "problem", {}, is_maths=True),  # MATH-500, AIME, DeepScaleR
    Shape("rl", ("problem", "solution"), "problem", {"answer": "solution"}, is_maths=True),  # MATH
    Shape(
        "rl", ("prompt", "reward_model"), "", {"answer": "reward_model.ground_truth"}, is_maths=True
    ),  # verl
    Shape("rl", ("prompt", "solutions"), "", {"answer": "solutions.0"}, is_maths=True),  # AReaL-boba
    Shape("sft", ("question", "answer"), "question", {"completion": "answer"}),
    Shape("sft", ("problem", "solution"), "problem", {"completion": "solution"}),
)


def find_shape(row: Row, kind: str) -> Shape | None:
    """Return the known shape of a row that lacks needed columns; None if it has them or matches no shape."""
    there = row.keys() & {*_PROMPTS, "completion"}
    for one in SHAPES:
        has_needed = there if one.prompt else "answer" in row
        if one.kind == kind and row.keys() >= {*one.known_by} and not has_needed:
            return one
    return None


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with its own columns and the mapped `columns` under their needed names.

    `columns` is needed name -> column of the file; `a.b` is a part of a column, `a.0` an element of a list. A
    text for `messages` becomes one turn of a user. Raises ConfigError for a missing column.
    """
    if not columns:
        return row
    made = {
        name: value for name, value in row.items() if name not in _PROMPTS or not columns.keys() & {*_PROMPTS}
    }
    for name, column in columns.items():
        try:
            value = row[column] if column in row else functools.reduce(_get_part, column.split("."), row)
        except (LookupError, TypeError, ValueError):
            lacks = f"the option columns takes {name} from the column {column}, which the row lacks"
            raise _make_error(row, lacks) from None
        is_turn = name == "messages" and isinstance(value, str)
        made[name] = [{"role": "user", "content": value}] if is_turn else value
    return made


def _get_part(value: Any, name: str) -> Any:
    return value[int(name) if isinstance(value, list) else name]


def check_row(row: Row, kind: str) -> Row:
    """Return a row with its answers as texts, as `extract_answers` does.

    Raises ConfigError if columns that its kind (rl, sft, rw, dpo) needs are missing or wrong. Errors of the
    chat template come later.
    """
    row = extract_answers(row, kind)
    has_prompt = isinstance(row.get("prompt"), str) or get_messages(row) is not None
    if kind in PAIRS:
        for name in ("chosen", "rejected"):
            if not isinstance(row.get(name), str) and (has_prompt or not isinstance(row.get(name), list)):
                either = "(text, or lists of messages that end with the assistant's)"
                raise _make_error(row, f"a row of type {kind} needs `chosen` and `rejected` {either}")
        if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
            raise ConfigError("`chosen` and `rejected` of a row must both be texts, or both be whole chats.")
        return row
    if kind == "sft" and not isinstance(row.get("completion"), str):
        raise _make_error(
            row, "an sft row needs a `completion` (text), or `messages` that end with the assistant's"
        )
    if not has_prompt:
        raise _make_error(row, "a row needs a `prompt` (text) or `messages` (a list)")
    chat = get_messages(row) or []
    if not all(isinstance(message, dict) for message in chat):
        raise ConfigError("the messages of a row must be objects, such as {role: user, content: a text}.")
    if any(isinstance(one.get("content"), list) for one in chat):
        raise ConfigError(
            "the content of a message must be a text, or parts of type text: images and sound can't be "
            "trained on yet."
        )
    if chat and chat[-1].get("role") == "assistant":
        raise ConfigError(
            "the chat of a row must end with the question, but its last message is the assistant's."
        )
    return row


def extract_answers(row: Row, kind: str) -> Row:
    """Return a row whose answers are texts: a chat is replaced by the text of its last message.

    In an sft row this is `completion`, which may also be the last of the `messages`. In rows of type rw or
    dpo it is `chosen` and `rejected`. If these chats differ only in their last messages, the others become
    the prompt.
    """
    if kind in PAIRS and not row.keys() & {*_PROMPTS} and (asked := _find_shared_prompt(row)):
        row = row | {"messages": asked}
    has_prompt = isinstance(row.get("prompt"), str) or get_messages(row) is not None
    names: tuple[str, ...] = ("completion",) if kind == "sft" else ()
    if kind in PAIRS and has_prompt:
        names = ("chosen", "rejected")
    texts = {name: text for name in names if (text := _find_answer(row.get(name))) is not None}
    chat = get_messages(row)
    if kind == "sft" and chat and "completion" not in row and (text := _find_answer(chat)) is not None:
        texts = {"completion": text}
        row = {name: value for name, value in row.items() if name != "prompt"} | {"messages": chat[:-1]}
    return row | texts if texts else row


def _find_shared_prompt(row: Row) -> list[Row]:
    """Return the messages before the answers of `chosen` and `rejected` if they are the same; else []."""
    chosen: Any = row.get("chosen")
    rejected: Any = row.get("rejected")
    if _find_answer(chosen) is None or _find_answer(rejected) is None or chosen[:-1] != rejected[:-1]:
        return []
    return [] if _find_answer(chosen[:-1]) is not None else list(chosen[:-1])


def _find_answer(chat: Any) -> str | None:
    """Return the text of a chat's last message if it is the assistant's; else None."""
    last = chat[-1] if isinstance(chat, list) and chat else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return None
    text = last.get("content")
    return text if isinstance(text, str) else None


def get_messages(row: Row) -> list[Row] | None:
    """Return the chat of a row: `messages`, or a `prompt` that is a list. None if the prompt is a text.

    A content in parts becomes one text.
    """
    chat = next((row[name] for name in ("messages", "prompt") if isinstance(row.get(name), list)), None)
    return None if chat is None else [_join_parts(one) for one in chat]


def _join_parts(message: Any) -> Any:
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not all(isinstance(one, dict) and "text" in one for one in parts):
        return message
    return message | {"content": "".join(str(one["text"]) for one in parts)}


def find_weight(row: Row, column: str) -> float:
    """Return the weight of a row. Raises ConfigError unless it is a number of at least 0."""
    value = row.get(column)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"its column {column} must be a number of at least 0, got {value!r:.80}.")
    return float(value)


def _make_error(row: Row, needed: str) -> ConfigError:
    there = (f"{name!r} (null)" if value is None else repr(name) for name, value in row.items())
    return ConfigError(f"{needed}; this one has {', '.join(there) or 'nothing'}.")


def load_jsonl_rows(path: Path) -> Iterator[tuple[bytes, Row]]:
    """Yield (line, row) of each line that is not blank. Raises ConfigError for lines that are not objects."""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not (line := raw.strip()):
                continue
            try:
                row = json.loads(line.decode())
            except ValueError as error:
                raise ConfigError(f"dataset {path} line {number} is not valid JSON: {error}") from None
            except RecursionError:
                raise ConfigError(f"dataset {path} line {number} is nested too deeply.") from None
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise ConfigError(f"dataset {path} line {number} must be a JSON object, got {kind}.")
            yield line, row


def load_first_rows(path: str | Path) -> list[Row]:
    """Return the first rows of a dataset, unchanged.

    Returns [] if only the job can read them, because this machine lacks the path or pyarrow. Raises
    ConfigError for damaged lines and files.
    """
    path = Path(path)
    try:
        stat = path.stat()
        return _load_first_rows(path, stat.st_mtime_ns, stat.st_size)
    except (ImportError, OSError):
        return []


@functools.lru_cache(maxsize=8)
def _load_first_rows(path: Path, changed_ns: int, size: int) -> list[Row]:
    if path.suffix in JSONL and path.is_file():
        return [row for _, (_, row) in zip(range(NUM_FIRST), load_jsonl_rows(path), strict=False)]
    if path.is_dir():
        state = load_json(path / "state.json")
        files = [one["filename"] for one in state.get("_data_files", ())] if isinstance(state, dict) else []
        return _load_first_of_table(path / files[0]) if files else []
    return _load_first_of_table(path) if path.suffix == ".parquet" else []


def _load_first_of_table(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=NUM_FIRST)
        else:
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
        return next((batch.slice(0, NUM_FIRST).to_pylist() for batch in batches if batch.num_rows), [])
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"dataset {path} is damaged, or of another format: {error}") from None


def load_named_rows(path: str | Path, columns: Mapping[str, str]) -> list[Row]:
    """Return the first rows with renamed columns.

    Returns [] if they can't be read; rules/dataset_rules.py then reports the error.
    """
    try:
        return [rename_columns(row, columns) for row in load_first_rows(path)]
    except ConfigError:
        return []


def list_columns(rows: Collection[Row]) -> list[str]:
    """Return the columns of all rows, in order."""
    return list(dict.fromkeys(name for row in rows for name in row))
