"""Rows of a dataset: dicts from a .jsonl or .parquet file or from a directory with a saved Hugging Face dataset.

Whole in memory; streaming is left out. What the columns mean is encode.py's business.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_rl.errors import ConfigError


def load_rows(path: str | Path) -> list[dict[str, Any]]:
    """All rows, in file order. Raises ConfigError for a path, format or line that can't be read."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigError(f"dataset {path} does not exist. Give a .jsonl or .parquet file, or a directory with a saved dataset.")
    if path.is_dir():
        rows = _saved(path)
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        rows = _jsonl(path)
    elif path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        allowed = ".jsonl, .parquet, or a directory with a saved dataset"
        raise ConfigError(f"dataset {path} has an unknown format {path.suffix!r}. Allowed: {allowed}.")
    if not rows:
        raise ConfigError(f"dataset {path} has no rows.")
    return rows


def _jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"dataset {path} line {number} is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"dataset {path} line {number} must be a JSON object, got {type(row).__name__}.")
            rows.append(row)
    return rows


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"dataset {path}: .parquet needs pyarrow. Install hpc-rl[data], or give a .jsonl file.") from None
    return pyarrow.parquet.read_table(path).to_pylist()


def _saved(path: Path) -> list[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        remedy = "Install hpc-rl[data], or give a .jsonl file"
        raise ConfigError(f"dataset {path}: a saved dataset needs the datasets library. {remedy}.") from None
    try:
        loaded = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"dataset {path} is no saved dataset: {error}") from None
    if isinstance(loaded, dict):
        raise ConfigError(f"dataset {path} has the splits {', '.join(sorted(loaded))}: give the path of one of them.")
    return loaded.to_list()
