"""Headers of safetensors files, read without torch: the shapes of tensors, and whether a file is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8  # size of the number at the start of a file, the length of its header
_GIT_LFS = b"version "  # start of a Git LFS pointer

Shape = tuple[int, ...]


class IncompleteFile(ValueError):
    """A file of tensors is damaged or cut off; the message names it without its folder."""


def load_shapes(path: Path) -> dict[str, Shape]:
    """Return the shapes of the tensors of a file, by name. Raises IncompleteFile, OSError."""
    return {name: tuple(one["shape"]) for name, one in _load_header(path).items()}


def find_file_problem(path: Path) -> str:
    """Return why a file is incomplete, or '' if it is complete or this account can't read it."""
    try:
        _load_header(path)
    except OSError:
        return ""
    except IncompleteFile as error:
        return str(error)
    return ""


def _load_header(path: Path) -> dict[str, dict[str, Any]]:
    with path.open("rb") as file:
        size, start = path.stat().st_size, file.read(_LENGTH_BYTES)
        if start == _GIT_LFS:
            raise IncompleteFile(
                f"{path.name} is a Git LFS pointer instead of the weights: run `git lfs pull` there"
            )
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or _LENGTH_BYTES + length > size:
            raise IncompleteFile(
                f"{path.name} is damaged or cut off: its {size} bytes are less than its header"
            )
        text = file.read(length)
    try:
        tensors = {name: one for name, one in json.loads(text).items() if name != "__metadata__"}
        ends = [one["data_offsets"][1] for one in tensors.values() if one["shape"] is not None]
        whole = _LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise IncompleteFile(f"{path.name} is damaged: its header is not a table of tensors") from error
    if size < whole:
        raise IncompleteFile(f"{path.name} is cut off: it has {size} of {whole} bytes")
    return tensors
