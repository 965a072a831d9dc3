"""Converts recover state to and from Hugging Face checkpoints, without training, on the CPU."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hpc_rl.config.options.training import OptimizerConfig, TrainEngineConfig
from hpc_rl.core import adapters
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.errors import ConfigError
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared import (
    hf_io,
    model,
)
from hpc_rl.engines.shared.loading import format_some

IDLE_KEYS = {  # keys of config.json, at any depth, that do not change a forward or backward pass
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "initializer_range"),
    *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
    *("id2label", "label2id", "problem_type", "tokenizer_class", "task_specific_params"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
}
SHARED_KEYS = {"is_causal"}  # used by code of all models, though few classes declare them
MAX_NAMED = 8  # differences in one message


def make_cpu_config(config: TrainEngineConfig) -> TrainEngineConfig:
    """Return the configuration of the same model for a machine without a GPU."""
    fsdp = dataclasses.replace(config.fsdp, offload_params=False, offload_activations=False)
    return dataclasses.replace(
        config, attn_impl="sdpa", gradient_checkpointing=False, enable_torch_compile=False, fsdp=fsdp
    )


def export_state(
    config: TrainEngineConfig,
    seed: int,
    folder: Path,
    num_ranks: int,
    files: Mapping[str, FileRecord],
    out: Path,
    tokenizer: Path | None,
    name: str = "actor",
    merge: bool = False,
) -> None:
    """Write the weights of a model's saved state as a Hugging Face checkpoint, as the trainer exports them.

    With `merge`, an adapter is merged into the whole model.

    Raises Damaged, OSError, ConfigError, and ValueError for the state of another model.
    """
    engine = FSDPEngine(make_cpu_config(config), seed=seed, frozen=True, name=name)
    engine.initialize(0, empty=True)
    engine.local.load(folder, num_ranks, files, with_random_state=False)
    if merge:
        model.write_export(out, engine.config, engine.model.hf, engine.weights(), tokenizer, True)
    else:
        engine.export(out, tokenizer)


def import_weights(
    config: TrainEngineConfig, seed: int, source: Path, num_updates: int, folder: Path
) -> tuple[list[FileRecord], dict[str, int]]:
    """Write a state with the weights of a checkpoint, zero moments, and the schedule at `num_updates`.

    If an adapter is trained, `source` is an adapter of the trial's model. Returns the written files and the
    counters. Raises ConfigError for the weights of another model, OSError.
    """
    model.check(make_cpu_config(config), torch.device("cpu"))
    ours = Path(config.path)
    if config.use_lora != adapters.is_adapter(source):
        kinds = ("an adapter in peft's format", "a whole model")
        trained, given = kinds if config.use_lora else kinds[::-1]
        raise ConfigError(f"the trial trains {trained}, and {source} is {given}; import {trained}")
    if not config.use_lora:
        _check_architecture(source, ours)
    optimizer = dataclasses.replace(config.optimizer or OptimizerConfig(), offload=False)
    config = dataclasses.replace(
        make_cpu_config(config),
        path=config.path if config.use_lora else str(source),
        lora_path=str(source) if config.use_lora else "",
        init_from_scratch=False,
        dtype="float32",
        optimizer=optimizer,
    )
    engine = FSDPEngine(config, seed=seed)
    engine.initialize(max(1, num_updates))
    # some published models have tensors that transformers does not use; the trial's model may have them too
    unread = set(engine.model.unread)
    if unread and (surplus := sorted(unread - hf_io.list_tensor_names(ours))):
        raise _make_mismatch_error(
            source,
            ours,
            [f"it has tensors that the model does not use: {format_some(surplus, limit=MAX_NAMED)}"],
        )
    engine.pass_updates(num_updates)
    return engine.save(folder), engine.counters()


def _check_architecture(source: Path, ours: Path) -> None:
    """Raise ConfigError if a checkpoint has another architecture than the trial's model."""
    configs = [model.load_architecture(folder) for folder in (source, ours)]
    theirs, trials = (dict(_list_computation_keys(config.to_dict())) for config in configs)
    differ = sorted(name for name in theirs.keys() | trials.keys() if theirs.get(name) != trials.get(name))
    odd = [name for name in differ if any(_is_decisive(config, name.partition(".")[0]) for config in configs)]
    if odd:
        raise _make_mismatch_error(
            source, ours, [f"{name} is {theirs.get(name)}, not {trials.get(name)}" for name in odd]
        )


def _list_computation_keys(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value), as `rope_parameters.rope_theta`, for all keys that affect results."""
    for name, value in values.items():
        if name in IDLE_KEYS:
            continue
        if isinstance(value, Mapping):
            yield from _list_computation_keys(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def _is_decisive(config: Any, key: str) -> bool:
    """Return whether a top-level key of config.json can change the results of the model."""
    values = config.to_dict()
    # without use_sliding_window the class itself sets sliding_window to None
    if key == "max_window_layers" and values.get("use_sliding_window") is False:
        return False
    if key == "max_position_embeddings" and _is_rope_default(values):
        return False
    return key in SHARED_KEYS or key in type(config)().to_dict()


def _is_rope_default(values: Mapping[str, Any]) -> bool:
    """Return whether positions are rotary and not scaled to a maximum length."""
    rope = values.get("rope_parameters")
    if rope is None:  # transformers 4
        return "rope_theta" in values and values.get("rope_scaling") is None
    # one set of parameters, or one for each type of layer
    kinds = [rope, *(one for one in rope.values() if isinstance(one, Mapping))]
    return {kind["rope_type"] for kind in kinds if "rope_type" in kind} == {"default"}


def _make_mismatch_error(source: Path, ours: Path, differences: list[str]) -> ConfigError:
    listed = format_some(differences, "; ", MAX_NAMED)
    return ConfigError(
        f"{source} does not have the architecture of the trial's model, {ours}: {listed}. "
        "Import a checkpoint of that architecture, or start a new trial with this one as actor.path "
        "(or model.path)."
    )
