"""Hugging Face checkpoints on disk: safetensors files, config.json, tokenizer files.

Nothing here knows about ranks: the rank that writes hands over full tensors.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hpc_rl.errors import ConfigError
from hpc_rl.trial import fsync_dir

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # transformers 4 has models in memory as they are on disk
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


def on_disk_names(hf: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model in memory with the names and shapes that its checkpoints have on disk."""
    return tensors if revert_weight_conversion is None else revert_weight_conversion(hf, tensors)


def tensor_names(folder: Path) -> set[str]:
    """Return the names in the safetensors files of a checkpoint.

    Raises ConfigError if one is damaged, OSError.
    """
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                names.update(opened.keys())
        except SafetensorError as error:
            raise ConfigError(
                f"{path} is damaged, or was not copied whole: {error}. Copy or download it again."
            ) from error
    return names


def refuse_damage(folder: Path) -> None:
    """Raise ConfigError that names the file if one of a checkpoint is damaged; OSError."""
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}. Copy or download it again.") from error
    tensor_names(folder)


def write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], config_json: str, others: Iterable[Path], durable: bool
) -> None:
    """Write all files of a checkpoint into `folder`, made if missing; fsynced if durable. Raises OSError.

    `others` are files to copy; those that do not exist are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # not by save_torch_state_dict, which refuses a tensor that is a part of a larger piece of memory
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=MAX_FILE_BYTES)
    for file, names in split.filename_to_tensors.items():
        _save({name: tensors[name] for name in names}, folder / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(config_json)
    for source in filter(Path.is_file, others):
        shutil.copyfile(source, folder / source.name)
    if durable:
        for path in folder.iterdir():
            fsync_file(path)
        fsync_dir(folder)


def fsync_file(path: Path) -> None:
    """Make a file durable that a library has written."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    # safetensors wraps errors of the file system: they are raised as the OSError that they were
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if code := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
        raise
