"""Recover state on disk: one safetensors file per rank, readable at any number of ranks.

`rank-00000.safetensors` has this rank's rows of `model/<name>`, `exp_avg/<name>` and `exp_avg_sq/<name>`, and `rng/cpu`
(`rng/cuda`). Its header's metadata has `state`, JSON: {"format", "rank", "num_ranks", "counters": {…}, "shards": {name:
{"shape": global shape, "offset": first row}}}. Whoever loads reads the slices that it needs from whichever files have them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hpc_rl.engines.hf_io import fsync_file
from hpc_rl.engines.optimizer import Optimizer, Shard
from hpc_rl.trial import fsync_dir

FORMAT = 1
KINDS = ("model", "exp_avg", "exp_avg_sq")


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def save(
    folder: Path, rank: int, num_ranks: int, shards: list[Shard], optimizer: Optimizer, counters: dict[str, Any]
) -> list[str]:
    """Write this rank's file, durably; returns its name. Raises OSError."""
    tensors = {f"rng/{kind}": state for kind, state in _rng_states().items()}
    for shard in shards:
        for kind, tensor in zip(KINDS, (shard.local, *optimizer.moments[shard.name]), strict=True):
            tensors[f"{kind}/{shard.name}"] = tensor.detach().cpu().contiguous()
    state = {
        "format": FORMAT,
        "rank": rank,
        "num_ranks": num_ranks,
        "counters": {**counters, "adam_steps": optimizer.num_steps},
        "shards": {shard.name: {"shape": shard.global_shape, "offset": shard.offset} for shard in shards},
    }
    path = folder / file_name(rank)
    try:
        save_file(tensors, path, metadata={"state": json.dumps(state)})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    fsync_file(path)
    fsync_dir(folder)
    return [path.name]


def load(
    folder: Path, saved_num_ranks: int, rank: int, num_ranks: int, shards: list[Shard], optimizer: Optimizer
) -> dict[str, Any]:
    """Fill this rank's shards, moments and (at the same number of ranks) random states; returns the counters.

    Raises OSError, ValueError: a file that is missing or torn, another model, rows that no file has.
    """
    missing = {(kind, shard.name): len(shard.local) for shard in shards for kind in KINDS}
    counters: dict[str, Any] = {}
    for saved_rank in range(saved_num_ranks):
        path = folder / file_name(saved_rank)
        try:
            with safe_open(path, "pt") as file:
                state = _checked(json.loads((file.metadata() or {})["state"]), path, saved_rank, saved_num_ranks, shards)
                counters = state["counters"]
                _fill(file, state["shards"], shards, optimizer, missing)
                if saved_rank == rank and saved_num_ranks == num_ranks:
                    _restore_rng(file)
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} is not a whole shard of a recover state: {error}") from error
    lacking = [f"{kind}/{name}" for (kind, name), rows in missing.items() if rows]
    if lacking:
        raise ValueError(f"{folder} lacks rows of {', '.join(lacking[:5])}")
    optimizer.set_num_steps(counters["adam_steps"])
    return counters


def _fill(
    file: Any, saved_shards: dict[str, Any], shards: list[Shard], optimizer: Optimizer, missing: dict[tuple[str, str], int]
) -> None:
    """Copy what one file has of this rank's rows; `missing` counts down."""
    for shard in shards:
        offset = saved_shards[shard.name]["offset"]
        for kind, target in zip(KINDS, (shard.local, *optimizer.moments[shard.name]), strict=True):
            missing[kind, shard.name] -= _copy_rows(file.get_slice(f"{kind}/{shard.name}"), offset, target, shard.offset)


def _checked(state: dict[str, Any], path: Path, rank: int, num_ranks: int, shards: list[Shard]) -> dict[str, Any]:
    if (state["format"], state["rank"], state["num_ranks"]) != (FORMAT, rank, num_ranks):
        found = f"rank {state['rank']} of {state['num_ranks']} in format {state['format']}"
        raise ValueError(f"{path} is {found}, expected rank {rank} of {num_ranks} in format {FORMAT}")
    ours = {shard.name: list(shard.global_shape) for shard in shards}
    theirs = {name: shard["shape"] for name, shard in state["shards"].items()}
    if ours != theirs:
        odd = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise ValueError(
            f"{path} is of another model: {odd[0]} has shape {theirs.get(odd[0])}, the model's is {ours.get(odd[0])}"
        )
    return state


def _copy_rows(saved: Any, saved_offset: int, target: torch.Tensor, offset: int) -> int:
    """Copy the rows that both have; returns their number."""
    start = max(saved_offset, offset)
    end = min(saved_offset + saved.get_shape()[0], offset + len(target))
    if end <= start:
        return 0
    target[start - offset : end - offset].copy_(saved[start - saved_offset : end - saved_offset])
    return end - start


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(file: Any) -> None:
    torch.set_rng_state(file.get_tensor("rng/cpu"))
    if "cuda" in _rng_states() and "rng/cuda" in set(file.keys()):
        torch.cuda.set_rng_state(file.get_tensor("rng/cuda"))
