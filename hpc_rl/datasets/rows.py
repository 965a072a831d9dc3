"""Rows of a dataset: dicts from a .jsonl or .parquet file, or from a saved Hugging Face dataset.

All rows are in memory; streaming is not supported. encode.py interprets the columns. A fingerprint is taken
during loading: the order of training depends on the number and order of rows, so a resumed trial needs the
same rows.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from hpc_rl.config.row_shapes import JSONL, load_jsonl_rows, rename_columns
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

T = TypeVar("T")
# largest dataset that a command reads before it submits a trial that continues with it
IN_PASSING_BYTES = 64 << 20


RowKey = tuple[int, int]  # data set, row of its file


@dataclass(frozen=True, slots=True)
class Draw:
    """The row of a prompt index. `visit` counts the visits to rows of its data set, over all epochs."""

    part: int  # data set
    row: int
    visit: int

    @property
    def key(self) -> RowKey:
        return self.part, self.row


class Rows(list[T]):
    """Rows, raw or encoded, with their fingerprint: {"rows": number, "xxh3": hex digits}."""

    def __init__(self, rows: Iterable[T], fingerprint: Mapping[str, Any]) -> None:
        super().__init__(rows)
        self.fingerprint = dict(fingerprint)


def check_same_rows(path: str | Path, before: Mapping[str, Any], now: Mapping[str, Any], when: str) -> None:
    """Raise ConfigError if two fingerprints differ. Empty or damaged fingerprints are ignored."""
    if not {"rows", "xxh3"} <= before.keys() or not now or before == now:
        return
    there = f"{now['rows']} rows" if before["rows"] != now["rows"] else "the same number with other content"
    why = f"had {before['rows']} rows when {when}, and has {there} now. Resuming would repeat some rows"
    raise ConfigError(
        Refusal(
            option="train_dataset.path",
            value=path,
            kind=Kind.FILE,
            why=f"{why} and skip others",
            use="restore the original file, or give another trial_name (`hpc-rl checkpoint export` makes a "
            "model of this trial's state)",
            related=("trial_name",),
        )
    )


def compute_fingerprint(*paths: str | Path) -> dict[str, Any]:
    """Return the fingerprint of `load_rows` for .jsonl files of up to IN_PASSING_BYTES, combined.

    Returns {} for other files and if a file can't be read; the trainer reports the reason.
    """
    return combine_fingerprints([_fingerprint_file(Path(path).expanduser()) for path in paths])


def _fingerprint_file(path: Path) -> dict[str, Any]:
    try:
        if path.suffix not in JSONL or not path.is_file() or path.stat().st_size > IN_PASSING_BYTES:
            return {}
        with path.open("rb") as lines:
            return _compute_fingerprint(line for raw in lines if (line := raw.strip()))
    except OSError:
        return {}


def combine_fingerprints(fingerprints: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fingerprint of several datasets in this order; {} if one is unknown."""
    if len(fingerprints) == 1 or not all(fingerprints):
        return dict(fingerprints[0]) if len(fingerprints) == 1 else {}
    digests = " ".join(one["xxh3"] for one in fingerprints)
    num_rows = sum(one["rows"] for one in fingerprints)
    return {"rows": num_rows, "xxh3": xxhash.xxh3_64_hexdigest(digests.encode())}


def count_rows(path: str | Path, at_most: int) -> int | None:
    """Count the rows of a .jsonl or .parquet file, up to `at_most`.

    Returns None for other files and if the file can't be read.
    """
    path = Path(path).expanduser()
    try:
        if path.suffix in JSONL and path.is_file():
            with path.open("rb") as lines:
                return sum(1 for _ in islice((line for line in lines if line.strip()), at_most))
        if path.suffix == ".parquet" and path.is_file():
            import pyarrow.parquet

            return min(at_most, pyarrow.parquet.ParquetFile(path).metadata.num_rows)
    except (OSError, ImportError, ValueError):  # pyarrow's errors are ValueErrors
        return None
    return None


def load_rows(path: str | Path, columns: Mapping[str, str] | None = None) -> Rows[dict[str, Any]]:
    """Load all rows, in file order, renaming `columns` as `config.row_shapes.rename_columns` does.

    Raises ConfigError for a path, format, line or row that can't be read.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigError(
            f"dataset {path} does not exist. "
            "Give a .jsonl or .parquet file, or a directory with a saved dataset."
        )
    if path.is_dir():
        rows = _load_saved(path)
    elif path.suffix in JSONL:
        rows = Rows[dict[str, Any]]([], {})
        rows.fingerprint = _compute_fingerprint(_collect_rows(path, rows))
    elif path.suffix == ".parquet":
        rows = _load_parquet(path)
    else:
        allowed = ".jsonl, .parquet, or a directory with a saved dataset"
        raise ConfigError(f"dataset {path} has an unknown format {path.suffix!r}. Allowed: {allowed}.")
    if not rows:
        raise ConfigError(f"dataset {path} has no rows.")
    for number, row in enumerate(rows if columns else ()):
        with name_in_errors(path, number):
            rows[number] = rename_columns(row, columns or {})
    return rows


@contextmanager
def name_in_errors(path: str | Path, row: int) -> Iterator[None]:
    """Add the row's number, counted from 1, to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"dataset {path} row {row + 1}: {error}") from None


def _collect_rows(path: Path, rows: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the lines of a file; append the row of each line to `rows` first."""
    for line, row in load_jsonl_rows(path):
        rows.append(row)
        yield line


def _make_rows(rows: list[dict[str, Any]]) -> Rows[dict[str, Any]]:
    return Rows(
        rows, _compute_fingerprint(json.dumps(row, sort_keys=True, default=str).encode() for row in rows)
    )


def _compute_fingerprint(rows: Iterable[bytes]) -> dict[str, Any]:
    digest, num_rows = xxhash.xxh3_64(), 0
    for row in rows:
        digest.update(row + b"\n")
        num_rows += 1
    return {"rows": num_rows, "xxh3": digest.hexdigest()}


def _load_parquet(path: Path) -> Rows[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"dataset {path}: .parquet needs pyarrow. Install hpc-rl[data], or give a .jsonl file."
        ) from None
    try:
        return _make_rows(pyarrow.parquet.read_table(path).to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"dataset {path} is damaged, or not a parquet file: {error}") from None


def _load_saved(path: Path) -> Rows[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        remedy = "Install hpc-rl[data], or give a .jsonl file"
        raise ConfigError(f"dataset {path}: a saved dataset needs the datasets library. {remedy}.") from None
    try:
        loaded = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(
            f"dataset {path} is damaged, or not written by Dataset.save_to_disk: {error}"
        ) from None
    if isinstance(loaded, dict):
        raise ConfigError(
            f"dataset {path} has the splits {', '.join(sorted(loaded))}: give the path of one of them."
        )
    return _make_rows(loaded.to_list())
