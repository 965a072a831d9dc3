"""Rules about what must exist on disk: models, datasets, templates, and directories that all nodes share."""

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hpc_rl.config.pool_view import as_pool
from hpc_rl.config.rules.consistency import context_option
from hpc_rl.config.rules.container_rules import is_trusted
from hpc_rl.config.rules.training_rules import models
from hpc_rl.config.sections.experiment import Config, GRPOConfig, has_own_prompts, value_of
from hpc_rl.config.sections.training import TrainEngineConfig
from hpc_rl.config.snapshot import snapshot_files
from hpc_rl.errors import ConfigError
from hpc_rl.files import appears, mount_of
from hpc_rl.trial import read_json

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
_DISK_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay")


def model_files(config: Config, explicit: Collection[str]) -> Iterator[str]:
    for section, engine in models(config):
        if not is_trusted(config, engine.path):
            yield from _model(config, section, engine)


def _model(config: Config, section: str, engine: TrainEngineConfig) -> Iterator[str]:
    name = f"{section}.path"
    scratch = f"; {section}.init_from_scratch true starts from random ones"
    yield from checkpoint(name, engine.path, "" if engine.init_from_scratch else scratch)
    if section == "ref" or (found := _settings_of(engine.path)) is None:
        return
    if not is_trusted(config, config.tokenizer_path or engine.path):
        yield from tokenizer(name, engine.path, "tokenizer_path", config.tokenizer_path)
    if isinstance(config, GRPOConfig):
        g = config.gconfig
        yield from context("gconfig.max_new_tokens", g.max_new_tokens, found, config.train_dataset.max_length)


def checkpoint(name: str, folder: str, without_weights: str = ".") -> Iterator[str]:
    """Yield why a directory can't be used as a Hugging Face checkpoint.

    `without_weights` ends the refusal of one without weights; empty accepts it.
    """
    path = Path(folder)
    if not path.is_dir():
        hint = "download it first (a hub name is not enough); relative paths start at the working directory"
        if "quickstart" in path.parts:
            hint = "`hpc-rl quickstart` makes the models of the shipped examples"
        needed = "it must be a Hugging Face checkpoint that all nodes see"
        yield f"{name} {path} is not a directory: {needed}; {hint}."
    elif _settings_of(folder) is None:
        yield f"{name} {path} has no readable config.json: it must be a Hugging Face checkpoint."
    elif without_weights and not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        yield f"{name} {path} contains no weights (*.safetensors){without_weights.rstrip('.')}."


def _settings_of(folder: str) -> dict[str, Any] | None:
    found = read_json(Path(folder) / "config.json")
    return found if isinstance(found, dict) else None


def tokenizer(name: str, folder: str, option: str, own: str) -> Iterator[str]:
    """Yield that a model has no tokenizer: in its directory, or in the one that `option` names."""
    if not (Path(own or folder) / "tokenizer.json").is_file():
        came = f"{option if own else name} {own or folder}"
        yield f"{came} has no tokenizer.json: set {option} to a directory that has one."


def context(option: str, new: int, model: dict[str, Any], prompt: int | None = None) -> Iterator[str]:
    """Yield that `new` tokens, and the longest prompt, are more than the context of a model."""
    limit = model.get("max_position_embeddings")
    if not isinstance(limit, int):
        return
    of_model = f"the model's context (max_position_embeddings) is {limit}"
    if new >= limit:
        yield f"{option} {new} leaves no room for a prompt: {of_model}."
    elif prompt is not None and prompt + new > limit:
        both = f"train_dataset.max_length {prompt} and {option} {new}"
        yield f"{both} make {prompt + new} tokens, but {of_model}."


def pool_files(config: Config, explicit: Collection[str]) -> Iterator[str]:
    for name, pool in config.pools.items() if isinstance(config, GRPOConfig) else ():
        if not pool.path or is_trusted(config, pool.path):
            continue
        option = f"pools.{name}"
        yield from checkpoint(f"{option}.path", pool.path)
        if (found := _settings_of(pool.path)) is not None:
            yield from tokenizer(f"{option}.path", pool.path, f"{option}.tokenizer_path", pool.tokenizer_path)
            yield from context(f"{option}.max_new_tokens", pool.max_new_tokens, found)


def context_of(config: GRPOConfig, pool: str = "") -> int | None:
    """Return the largest number of tokens of prompt and completion; None if nothing limits it.

    Of the model that is trained, or of that of a pool.
    """
    view = as_pool(config, pool)
    found = _settings_of(view.actor.path) or {}
    limits = [found.get("max_position_embeddings"), value_of(view, context_option(config, pool))]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def dataset_files(config: Config, explicit: Collection[str]) -> Iterator[str]:
    for section in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, section)
        if dataset is None:
            continue
        name, path = f"{section}.path", Path(dataset.path)
        if not dataset.path:
            if section == "valid_dataset" or has_own_prompts(config):
                yield f"{name} is empty; only a trial on environments alone needs no training data."
        elif is_trusted(config, dataset.path):
            continue
        elif not path.exists():
            yield f"{name} {path} does not exist{_relative_hint(name, explicit)}."
        elif path.is_dir():
            yield from _saved_dataset(name, path)
        elif path.suffix not in (".jsonl", ".parquet"):
            allowed = "a .jsonl or .parquet file, or a directory with a saved dataset"
            yield f"{name} {path} can't be read; allowed: {allowed}."
        elif not path.stat().st_size:
            yield f"{name} {path} is empty."


def _saved_dataset(name: str, path: Path) -> Iterator[str]:
    # Dataset.save_to_disk writes state.json beside the data; DatasetDict writes one directory for each split.
    if (path / "state.json").is_file():
        return
    splits = sorted(one.parent.name for one in path.glob("*/state.json"))
    if splits:
        one = f"use the path of one, such as {path / splits[0]}"
        yield f"{name} {path} has the splits {', '.join(splits)}: {one}."
        return
    files = sorted(one for pattern in ("*.jsonl", "*.parquet") for one in path.glob(pattern))
    hint = f"; did you mean {files[0]}?" if files else "."
    yield f"{name} {path} is a directory without a saved Hugging Face dataset (it has no state.json){hint}"


def _relative_hint(name: str, explicit: Collection[str]) -> str:
    return "; relative paths start at the working directory" if name in explicit else ""


def templates_dir(config: Config, explicit: Collection[str]) -> Iterator[str]:
    name, folder = "launcher.templates_dir", config.launcher.templates_dir
    if folder and not Path(folder).is_dir():
        yield f"{name} {folder} is not a directory{_relative_hint(name, explicit)}."


def snapshot(config: Config, explicit: Collection[str]) -> Iterator[str]:
    try:
        snapshot_files(config, Path.cwd())
    except ConfigError as error:
        yield str(error)


def shared_places(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if ":" in config.cluster.fileroot:
        folder = config.cluster.fileroot
        yield f"cluster.fileroot {folder} can't be used: PYTHONPATH can't contain a path with a colon."
    for name, place, kind in _places(config):
        if kind in _MEMORY_FILE_SYSTEMS:
            nodes = config.cluster.n_nodes
            yield f"{name} {place} is on {kind}, which only this node sees, but the trial has {nodes} nodes."


RULES = [dataset_files, templates_dir, shared_places, snapshot, model_files, pool_files]


def inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield option and path of each model and dataset that is read."""
    for section, engine in models(config):
        yield f"{section}.path", engine.path
    for name, pool in config.pools.items() if isinstance(config, GRPOConfig) else ():
        yield f"pools.{name}.path", pool.path
    yield "tokenizer_path", config.tokenizer_path
    for section in ("train_dataset", "valid_dataset"):
        if dataset := getattr(config, section):
            yield f"{section}.path", dataset.path


def check_on_node(config: Config, node: str, wait_s: float = 0.0) -> None:
    """Raise ConfigError for models and datasets that a node of the job does not see within `wait_s`."""
    until = time.monotonic() + wait_s
    gone = [f"{name} {path}" for name, path in inputs(config) if path and not appears(Path(path), until)]
    if gone:
        raise ConfigError(
            f"{'; '.join(gone)}: not on node {node}, where the job runs. Correct the path, or put it there."
        )


def notes(config: Config) -> Iterator[str]:
    if copied := snapshot_files(config, Path.cwd()):
        yield f"launcher.snapshot: {len(copied)} files are copied as they are now, and imported from there."
    for name, path in inputs(config):
        if path and is_trusted(config, path):
            yield f"{name} {path}: nothing of it is on this machine; only the job checks it, on its nodes."
    # A local disk may be exported to all nodes; only they can tell.
    for name, place, kind in _places(config):
        if kind in _DISK_FILE_SYSTEMS:
            ask = "make sure that all nodes see it (`hpc-rl doctor --allocation` checks this)"
            yield f"{name} {place} is on {kind}, a disk of this machine: {ask}."


def _places(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield option, directory and file system of what all nodes share; nothing for one node."""
    for name in ("cluster.fileroot", "cluster.name_resolve.nfs_record_root"):
        place = value_of(config, name)
        if place and config.cluster.n_nodes > 1:
            yield name, place, mount_of(Path(place))[0]
