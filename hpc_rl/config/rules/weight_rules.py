"""Rules about the weights of a checkpoint: its files must be complete, by their sizes and headers."""

import json
from pathlib import Path

from hpc_rl.core.trial import load_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8  # size of the number at the start of a file, the length of its header
_GIT_LFS = b"version "  # start of a Git LFS pointer


def find_weights_problem(folder: Path) -> str:
    """Return why the weights of a checkpoint can't be read, or ''. Checks only files that the loader uses."""
    if (folder / SINGLE).is_file():
        return _find_file_problem(folder / SINGLE)
    index = load_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    for name in sorted({str(one) for one in names.values()}) if isinstance(names, dict) else ():
        if not (folder / name).is_file():
            return f"{name}, which {INDEX} names, is not there"
        if problem := _find_file_problem(folder / name):
            return problem
    return ""


def _find_file_problem(path: Path) -> str:
    """Return why a weight file is incomplete, or '' if it is complete or this account can't read it."""
    try:
        with path.open("rb") as file:
            size, start = path.stat().st_size, file.read(_LENGTH_BYTES)
            if start == _GIT_LFS:
                return f"{path.name} is a Git LFS pointer instead of the weights: run `git lfs pull` there"
            length = int.from_bytes(start, "little")
            if len(start) < _LENGTH_BYTES or _LENGTH_BYTES + length > size:
                return f"{path.name} is damaged or cut off: its {size} bytes are less than its header"
            header = json.loads(file.read(length))
        tensors = (tensor for name, tensor in header.items() if name != "__metadata__")
        whole = _LENGTH_BYTES + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except OSError:
        return ""
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"{path.name} is damaged: its header is no table of tensors"
    return f"{path.name} is cut off: it has {size} of {whole} bytes" if size < whole else ""
