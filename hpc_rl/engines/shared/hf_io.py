"""Hugging Face checkpoints on disk: safetensors files, config.json, tokenizer files.

This module does not know ranks: the writing rank passes whole tensors.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import fsync_dir

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # transformers 4 uses the same names in memory and on disk
    get_model_conversion_mapping = None  # type: ignore[assignment]
    revert_weight_conversion = None  # type: ignore[assignment]

MAX_FILE_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def convert_to_disk_names(hf: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model in memory with their names and shapes on disk."""
    return tensors if revert_weight_conversion is None else revert_weight_conversion(hf, tensors)


def has_conversions(hf: Any, names: Collection[str]) -> bool:
    """Return whether transformers renames or merges some of these tensors when it loads the model."""
    if get_model_conversion_mapping is None:
        return False
    conversions = get_model_conversion_mapping(hf)
    return any(one.rename_source_key(name)[1] is not None for one in conversions for name in names)


class OnDisk(NamedTuple):
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]


def list_safetensors_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint, as transformers chooses them; [] if it has only pytorch_model*.bin.

    Raises ConfigError if files are missing or the index is damaged, OSError.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = json.loads(index.read_bytes()).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ConfigError(f"{index} lists no files (weight_map). Copy or download it again.")
        paths = sorted({folder / name for name in names.values()})
        if gone := [path.name for path in paths if not path.is_file()]:
            raise ConfigError(
                f"{index} names files that do not exist: {', '.join(gone[:5])} ({len(gone)} in all). "
                "Copy or download these files."
            )
        return paths
    if any(folder.glob("pytorch_model*.bin")):
        return []
    raise ConfigError(
        f"{folder} has neither {single.name} nor {index.name}. Copy or download the checkpoint."
    )


def list_tensors(paths: Iterable[Path]) -> dict[str, OnDisk]:
    """Return the tensors in safetensors files by name. Raises ConfigError for a damaged file, OSError."""
    found: dict[str, OnDisk] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    found[name] = OnDisk(path, tuple(opened.get_slice(name).get_shape()))
        except SafetensorError as error:
            raise ConfigError(
                f"{path} is damaged, or was not copied whole: {error}. Copy or download it again."
            ) from error
    return found


def list_tensor_names(folder: Path) -> set[str]:
    """Return the names in the safetensors files of a checkpoint.

    Raises ConfigError for a damaged file, OSError.
    """
    return set(list_tensors(sorted(folder.glob("*.safetensors"))))


def refuse_damage(folder: Path) -> None:
    """Raise ConfigError with the name of the first damaged file of a checkpoint, if any; OSError."""
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}. Copy or download it again.") from error
    list_tensor_names(folder)


class CheckpointWriter:
    """Writes the files of a checkpoint from a stream of tensors. Needs memory for one file (5 GB)."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if it is missing. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._size_bytes = 0
        self._files: list[list[str]] = []  # names of tensors in each file so far
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a whole tensor in CPU memory, which must not change. Raises OSError."""
        if self._waiting and self._size_bytes + tensor.nbytes > MAX_FILE_BYTES:
            self._write()
        self._waiting[name] = tensor
        self._size_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the remaining tensors and the index. Raises OSError."""
        self._write()
        num_files = len(self._files)
        finals = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
        if num_files == 1:
            finals = ["model.safetensors"]
        for i, final in enumerate(finals):
            os.rename(self.folder / _make_temporary_name(i), self.folder / final)
        if num_files > 1:
            owners = {name: final for final, names in zip(finals, self._files, strict=True) for name in names}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": owners}
            text = json.dumps(index, indent=2, sort_keys=True)
            (self.folder / "model.safetensors.index.json").write_text(text + "\n")

    def _write(self) -> None:
        _save(self._waiting, self.folder / _make_temporary_name(len(self._files)))
        self._files.append(list(self._waiting))
        self._total_bytes += self._size_bytes
        self._waiting, self._size_bytes = {}, 0


def _make_temporary_name(index: int) -> str:
    return f"part-{index:05d}.safetensors"


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer that exist. Raises OSError."""
    for path in filter(Path.is_file, (source / name for name in TOKENIZER_FILES)):
        shutil.copyfile(path, target / path.name)


def fsync_folder(folder: Path) -> None:
    """Fsync a folder and its files."""
    for path in folder.iterdir():
        fsync_file(path)
    fsync_dir(folder)


def fsync_file(path: Path) -> None:
    """Fsync a file that a library has written."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    # safetensors wraps errors of the file system; unwrap them to OSError
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if code := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        raise
