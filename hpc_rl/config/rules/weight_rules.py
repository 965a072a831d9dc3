"""Rules about the weights of a checkpoint: its files must be complete, by their sizes and headers."""

from collections.abc import Iterator
from pathlib import Path

from hpc_rl.core.tensor_files import IncompleteFile, Shape, find_file_problem, load_shapes
from hpc_rl.core.trial import load_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def find_weights_problem(folder: Path) -> str:
    """Return why the weights of a checkpoint can't be read, or ''. Checks only files that the loader uses."""
    for path in _list_files(folder):
        if not path.is_file():
            return f"{path.name}, which {INDEX} names, is not there"
        if problem := find_file_problem(path):
            return problem
    return ""


def load_weight_shapes(folder: Path) -> dict[str, Shape]:
    """Return the shapes of a checkpoint's tensors, by name; {} if its files can't be read here."""
    found: dict[str, Shape] = {}
    try:
        for path in _list_files(folder):
            found |= load_shapes(path)
    except (IncompleteFile, OSError):  # file_rules refuse them
        return {}
    return found


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the safetensors files that the loader uses."""
    if (folder / SINGLE).is_file():
        yield folder / SINGLE
        return
    index = load_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if isinstance(names, dict):
        yield from (folder / name for name in sorted({str(one) for one in names.values()}))
