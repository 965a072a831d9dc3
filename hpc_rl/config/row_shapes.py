"""Rows of a dataset: what each kind needs, columns by other names, and the first rows of a file.

Submission looks at the first rows by the same functions with which the job reads all of them.
"""

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import ConfigError
from hpc_rl.trial import read_json

NUM_FIRST = 64
Row = dict[str, Any]
_PROMPTS = ("prompt", "messages")


@dataclass(frozen=True)
class Shape:
    """Columns by which a known data set is recognized, and what its rows need in their place.

    `prompt` is the column that is asked; `columns` are further ones, by the names that are needed.
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
    Shape("sft", ("question", "answer"), "question", {"completion": "answer"}),
    Shape("sft", ("problem", "solution"), "problem", {"completion": "solution"}),
)


def shape_of(row: Row, kind: str) -> Shape | None:
    """Return the known shape of a row that lacks what its kind needs; None where it lacks nothing."""
    if row.keys() & {*_PROMPTS, "completion"}:
        return None
    return next((one for one in SHAPES if one.kind == kind and row.keys() >= {*one.known_by}), None)


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with `columns` (the name that is needed: the one in the file) beside its own.

    A text in place of `messages` becomes one turn of a user. Raises ConfigError for a column that is absent.
    """
    if not columns:
        return row
    made = {
        name: value for name, value in row.items() if name not in _PROMPTS or not columns.keys() & {*_PROMPTS}
    }
    for name, column in columns.items():
        if column not in row:
            raise _lacks(row, f"columns: {name} is to be the column {column}, which the row lacks")
        is_turn = name == "messages" and isinstance(row[column], str)
        made[name] = [{"role": "user", "content": row[column]}] if is_turn else row[column]
    return made


def check_row(row: Row, kind: str) -> None:
    """Raise ConfigError for a row without what its kind (rl, sft, rw) needs.

    What a chat template refuses is seen later.
    """
    has_prompt = isinstance(row.get("prompt"), str) or messages_of(row) is not None
    if kind == "rw":
        for name in ("chosen", "rejected"):
            if not isinstance(row.get(name), str) and (has_prompt or not isinstance(row.get(name), list)):
                either = "(text, or without a prompt lists of messages)"
                raise _lacks(row, f"an rw row needs `chosen` and `rejected` {either}")
        return
    if kind == "sft" and not isinstance(row.get("completion"), str):
        raise _lacks(row, "an sft row needs a `completion` (text)")
    if not has_prompt:
        raise _lacks(row, "a row needs a `prompt` (text) or `messages` (a list)")
    if not all(isinstance(message, dict) for message in messages_of(row) or []):
        raise ConfigError("the messages of a row must be objects, such as {role: user, content: a text}.")


def messages_of(row: Row) -> list[Row] | None:
    """Return the chat of a row, `messages` or a `prompt` that is a list; None where it is a text."""
    return next((row[name] for name in ("messages", "prompt") if isinstance(row.get(name), list)), None)


def _lacks(row: Row, needed: str) -> ConfigError:
    there = (f"{name!r} (null)" if value is None else repr(name) for name, value in row.items())
    return ConfigError(f"{needed}; this one has {', '.join(there) or 'nothing'}.")


def jsonl_rows(path: Path) -> Iterator[tuple[bytes, Row]]:
    """Yield (line, row) of the lines that hold something. Raises ConfigError for other lines than objects."""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not (line := raw.strip()):
                continue
            try:
                row = json.loads(line.decode())
            except ValueError as error:
                raise ConfigError(f"dataset {path} line {number} is not valid JSON: {error}") from None
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise ConfigError(f"dataset {path} line {number} must be a JSON object, got {kind}.")
            yield line, row


def first_rows(path: str | Path) -> list[Row]:
    """Return the first rows of a dataset, as the file has them.

    [] where only the job can read them: the path is not here, or pyarrow is not. Raises ConfigError for lines
    and files that are damaged.
    """
    path = Path(path)
    try:
        stat = path.stat()
        return _first_rows(path, stat.st_mtime_ns, stat.st_size)
    except (ImportError, OSError):
        return []


@functools.lru_cache(maxsize=8)
def _first_rows(path: Path, changed_ns: int, size: int) -> list[Row]:
    if path.suffix == ".jsonl" and path.is_file():
        return [row for _, (_, row) in zip(range(NUM_FIRST), jsonl_rows(path), strict=False)]
    if path.is_dir():
        state = read_json(path / "state.json")
        files = [one["filename"] for one in state.get("_data_files", ())] if isinstance(state, dict) else []
        return _first_of_table(path / files[0]) if files else []
    return _first_of_table(path) if path.suffix == ".parquet" else []


def _first_of_table(path: Path) -> list[Row]:
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


def named_rows(path: str | Path, columns: Mapping[str, str]) -> list[Row]:
    """Return the first rows by the names that are needed.

    [] where they can't be read; rules/dataset_rules.py refuses what is wrong with them.
    """
    try:
        return [renamed(row, columns) for row in first_rows(path)]
    except ConfigError:
        return []


def columns_in(rows: Collection[Row]) -> list[str]:
    """Return the columns that some row has, in their order."""
    return list(dict.fromkeys(name for row in rows for name in row))
