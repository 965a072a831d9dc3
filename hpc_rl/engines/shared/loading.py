"""Loads the tensors of a sharded model from the files of a Hugging Face checkpoint.

Each rank reads its own rectangles of tensors from safetensors files, a few rows at a time. If only
transformers can read a checkpoint (pytorch_model*.bin, renamed, merged or quantized tensors), rank 0 loads it
whole and sends it to the other ranks tensor by tensor.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from hpc_rl.core.errors import ConfigError
from hpc_rl.engines.base import sum_over_ranks
from hpc_rl.engines.shared import (
    expert_files,
    hf_io,
)
from hpc_rl.engines.shared.expert_files import Shapes
from hpc_rl.engines.shared.pieces import Piece

logger = logging.getLogger(__name__)
ROWS_BYTES = 32 << 20  # rows that are read at a time
OPEN_BYTES = 64 << 20  # read before the file is opened again: mapped pages count as memory of this process
MAX_NAMED = 5  # tensors in one message
# tensors in older checkpoints that transformers computes today
COMPUTED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")

Whole = tuple[dict[str, torch.Tensor], list[str]]


@dataclass
class Match:
    """The mapping from tensors of the model to tensors of a checkpoint."""

    sources: dict[str, list[str]]  # name in the model -> names in the files, more than one if it is tied
    unread: list[str]  # in the files only


def load(
    hf: Any,
    folder: Path,
    parts: Sequence[Piece],
    optional: Collection[str],
    whole: Callable[[], Whole],
    rank: int,
    shapes: Shapes | None = None,
) -> Match:
    """Load the parts from the checkpoint. Collective.

    Raises OSError, and ConfigError with the names of tensors that are missing or have another shape.

    Args:
        hf: The model.
        folder: The checkpoint.
        parts: This rank's parts of tensors.
        optional: Names of tensors that may be missing.
        whole: Loads the whole model with transformers; returns its tensors and the names of unused ones.
        rank: This rank.
        shapes: The shapes of the tensors of all ranks, if no rank has parts of all tensors.
    """
    files = hf_io.list_safetensors_files(folder)
    found = hf_io.list_tensors(files)
    shapes = expert_files.map_shapes_to_files(shapes or {part.name: part.shape for part in parts}, found)
    odd = found.keys() - shapes.keys()
    if not files or getattr(hf.config, "quantization_config", None) or hf_io.has_conversions(hf, odd):
        return _from_rank0(hf, parts, folder, whole, rank)
    parts = expert_files.map_to_files(parts, found)
    match = _match(hf, found, shapes)
    computed = _select_ignored(dict(hf.named_buffers()), hf._keys_to_ignore_on_load_missing)
    given = {*match.sources, *optional, *computed}
    _check(folder, shapes, match, found, [name for name in shapes if name not in given])
    unused = _select_ignored(match.unread, (*(hf._keys_to_ignore_on_load_unexpected or ()), *COMPUTED))
    match.unread = [name for name in match.unread if name not in unused]
    if match.unread and rank == 0:
        logger.warning(
            "the model does not use these tensors of %s, so they are ignored: %s",
            folder,
            format_some(match.unread),
        )
    wanted = [(name, part) for part in parts for name in match.sources.get(part.name, ())[:1]]
    for _, rows, read in _load_rows(wanted, found):
        rows.copy_(read.to(rows.device))  # first, so that it is converted there
    _check_tied(folder, parts, match, found)
    return match


def _match(hf: Any, found: Mapping[str, hf_io.OnDisk], shapes: Shapes) -> Match:
    """Match by name, with or without the prefix of the model's trunk, as transformers does."""
    first = {id(one): name for name, one in hf.named_parameters()}
    known = {name: name for name in shapes}
    known |= {name: first[id(one)] for name, one in hf.named_parameters(remove_duplicate=False)}
    prefix = f"{hf.base_model_prefix}."
    match = Match({}, [])
    for name in sorted(found):
        names = (name, name.removeprefix(prefix), prefix + name)
        if owner := next((known[one] for one in names if one in known), None):
            match.sources.setdefault(owner, []).append(name)
        else:
            match.unread.append(name)
    return match


def _check(
    folder: Path,
    shapes: Shapes,
    match: Match,
    found: Mapping[str, hf_io.OnDisk],
    lacking: Sequence[str],
) -> None:
    """Raise ConfigError with the names of tensors that are missing or have another shape."""
    odd = [
        f"{name} has the shape {list(found[name].shape)}, and {list(shape)} in the model"
        for owner, shape in shapes.items()
        for name in match.sources.get(owner, ())
        if tuple(found[name].shape) != tuple(shape)
    ]
    problems = [f"they lack {format_some(lacking)}"] if lacking else []
    problems += [format_some(odd, "; ")] if odd else []
    if problems and match.unread:
        problems.append(f"the model does not use {format_some(match.unread)}")
    if lacking or odd:
        raise ConfigError(
            f"the weights at {folder} do not match the config.json there: "
            f"{'; '.join(problems)}. Copy or download the checkpoint again, or correct its config.json."
        )


def _load_rows(
    wanted: Sequence[tuple[str, Piece]], found: Mapping[str, hf_io.OnDisk]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name in the file, some rows of a piece, their values in the file)."""
    for path in sorted({found[name].path for name, _ in wanted}):
        todo = [(name, part) for name, part in wanted if found[name].path == path and part.local.numel()]
        while todo:
            num_bytes = 0
            with safe_open(path, framework="pt") as opened:
                while todo and num_bytes < OPEN_BYTES:
                    name, part = todo.pop(0)
                    if not part.shape:
                        yield name, part.local.detach(), opened.get_tensor(name)
                        continue
                    tensor = opened.get_slice(name)
                    first, *columns = part.slices()
                    num_rows = max(1, ROWS_BYTES // (part.local[0].numel() * 4))
                    for start in range(0, len(part.local), num_rows):
                        rows = part.local.detach()[start : start + num_rows]
                        at = first.start + start
                        read = tensor[(slice(at, at + len(rows)), *columns)]
                        yield name, rows, read
                        num_bytes += read.nbytes


def _check_tied(
    folder: Path, parts: Sequence[Piece], match: Match, found: Mapping[str, hf_io.OnDisk]
) -> None:
    """Raise ConfigError on every rank if files have several values for tensors that the model ties."""
    if all(len(names) == 1 for names in match.sources.values()):  # on every rank
        return
    again = [(name, part) for part in parts for name in match.sources.get(part.name, ())[1:]]
    differ = set()
    for name, rows, read in _load_rows(again, found):
        if not torch.equal(read.to(rows.device, rows.dtype), rows):
            differ.add(name)
    if sum_over_ranks([float(len(differ))])[0]:
        pairs = [" and ".join(names) for names in match.sources.values() if len(names) > 1]
        raise ConfigError(
            f"{folder / 'config.json'} ties {format_some(pairs)}, but the files have different values for "
            "them: set tie_word_embeddings to false there, or remove one of these tensors from the files."
        )


def _from_rank0(
    hf: Any, parts: Sequence[Piece], folder: Path, whole: Callable[[], Whole], rank: int
) -> Match:
    """Load the model on rank 0 and send each tensor to the parts of all ranks. Collective."""
    tensors: dict[str, torch.Tensor] = {}
    unread: list[str] = []
    problem: Exception | None = None
    if rank == 0:
        try:
            tensors, unread = whole()
            match = Match({name: [name] for name in tensors}, unread)
            shapes = {name: hf_io.OnDisk(folder, tuple(one.shape)) for name, one in tensors.items()}
            wanted = {one.name: one.shape for one in parts}
            _check(folder, wanted, match, shapes, [name for name in wanted if name not in tensors])
        except Exception as error:  # the other ranks wait
            problem = error
    if sum_over_ranks([float(problem is not None)])[0]:
        raise problem or ConfigError(f"trainer rank 0 can't load {folder}; its log has the reason")
    # the tensors that any rank wants, in the same order on every rank
    saved = hf.state_dict()
    known = dict(hf.named_parameters())
    known |= {name: one for name, one in hf.named_buffers() if name in saved}
    for name, like in known.items():
        tensor = tensors.pop(name, None)
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            tensor = torch.empty(like.shape, dtype=like.dtype) if tensor is None else tensor
            tensor = tensor.to(device, like.dtype).contiguous()
            dist.broadcast(tensor, 0)
        assert tensor is not None
        for part in parts:
            if part.name == name:
                part.local.detach().copy_(tensor[part.slices()])
    return Match({name: [name] for name in known}, unread)


def _select_ignored(names: Iterable[str], patterns: Collection[str] | None) -> set[str]:
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns or ())}


def format_some(names: Sequence[str], between: str = ", ", limit: int = MAX_NAMED) -> str:
    """Return the first `limit` names as text, and the total number if there are more."""
    more = f"{between}… ({len(names)} in all)" if len(names) > limit else ""
    return between.join(names[:limit]) + more
