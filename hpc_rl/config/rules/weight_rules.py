"""Rules about the weights of a checkpoint: that its files are whole, by their sizes and headers alone."""

import json
from pathlib import Path

from hpc_rl.core.trial import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8  # of the number at the start of a file: the length of its header
_GIT_LFS = b"version "  # with which a pointer of Git LFS begins


def weights_problem(folder: Path) -> str:
    """Return why the weights of a checkpoint can't be read, or ''. Only files that the loader reads count."""
    if (folder / SINGLE).is_file():
        return _file_problem(folder / SINGLE)
    index = read_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    for name in sorted({str(one) for one in names.values()}) if isinstance(names, dict) else ():
        if not (folder / name).is_file():
            return f"{name}, which {INDEX} names, is not there"
        if problem := _file_problem(folder / name):
            return problem
    return ""


def _file_problem(path: Path) -> str:
    """Return why a file of weights is not whole, or ''; '' too if this account can't read it."""
    try:
        with path.open("rb") as file:
            size, start = path.stat().st_size, file.read(_LENGTH_BYTES)
            if start == _GIT_LFS:
                return (
                    f"{path.name} is a pointer of Git LFS in place of the weights: run `git lfs pull` there"
                )
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
