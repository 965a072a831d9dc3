"""What is done with recover state outside of training, on the CPU by one process: to a Hugging Face checkpoint and from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hpc_rl.checked_file import FileRecord
from hpc_rl.config.sections.training import OptimizerConfig, TrainEngineConfig
from hpc_rl.engines import hf_io, model, state
from hpc_rl.engines.fsdp import FSDPEngine
from hpc_rl.errors import ConfigError

IDLE_KEYS = {  # of a config.json, at any depth: what changes no number of a forward or backward pass
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "initializer_range"),
    *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
    *("id2label", "label2id", "problem_type", "tokenizer_class", "task_specific_params"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
}
SHARED_KEYS = {"is_causal"}  # what all models share reads these, though few classes know them
MAX_NAMED = 8  # differences in one message


def on_cpu(config: TrainEngineConfig) -> TrainEngineConfig:
    """The same model where there is no GPU."""
    return dataclasses.replace(config, attn_impl="sdpa", gradient_checkpointing=False)


def export_state(
    config: TrainEngineConfig,
    seed: int,
    folder: Path,
    num_ranks: int,
    files: Mapping[str, FileRecord],
    out: Path,
    tokenizer: Path | None,
) -> None:
    """Write the weights of a saved state as a Hugging Face checkpoint, as the trainer's own export has them.

    Raises Damaged, OSError, ConfigError, ValueError (the state of another model).
    """
    config = on_cpu(config)
    model.check(config, torch.device("cpu"))
    built = model.build(config, seed, frozen=True)
    parameters = {name: parameter.detach() for name, parameter in built.hf.named_parameters()}
    state.load_model(folder, num_ranks, parameters, files)
    dtype, saved = model.DTYPES[config.dtype], set(built.hf.state_dict())
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in parameters.items()}
    tensors |= {name: buffer for name, buffer in built.hf.named_buffers() if name in saved}
    source = Path(config.path)
    others = [source / "generation_config.json", *(hf_io.tokenizer_files(tokenizer) if tokenizer else [])]
    config_json = model.exported_config(source, built.hf, config)
    hf_io.write_checkpoint(out, hf_io.on_disk_names(built.hf, tensors), config_json, others, durable=True)


def import_weights(
    config: TrainEngineConfig, seed: int, source: Path, num_updates: int, folder: Path
) -> tuple[list[FileRecord], dict[str, int]]:
    """Write a state with the weights of a Hugging Face checkpoint, moments of zero and the schedule after `num_updates`.

    Returns the written files and the counters. Raises ConfigError for another model's weights, OSError.
    """
    model.check(on_cpu(config), torch.device("cpu"))
    ours = Path(config.path)
    _check_architecture(source, ours)
    optimizer = dataclasses.replace(config.optimizer or OptimizerConfig(), offload=False)
    config = dataclasses.replace(
        on_cpu(config), path=str(source), init_from_scratch=False, dtype="float32", optimizer=optimizer
    )
    engine = FSDPEngine(config, seed=seed)
    engine.initialize(max(1, num_updates))
    unread = set(engine.model.unread)
    if unread and (
        surplus := sorted(unread - hf_io.tensor_names(ours))
    ):  # some models come with tensors that nobody reads
        raise _other_model(
            source, ours, [f"it has tensors that the model has no place for: {_some(surplus)}"]
        )
    engine.pass_updates(num_updates)
    return engine.save(folder), engine.counters()


def _check_architecture(source: Path, ours: Path) -> None:
    """Raises ConfigError where a checkpoint computes otherwise than the trial's model does."""
    configs = [model.architecture(folder) for folder in (source, ours)]
    theirs, trials = (dict(_computation(config.to_dict())) for config in configs)
    differ = sorted(name for name in theirs.keys() | trials.keys() if theirs.get(name) != trials.get(name))
    odd = [name for name in differ if any(_decides(config, name.partition(".")[0]) for config in configs)]
    if odd:
        raise _other_model(
            source, ours, [f"{name} is {theirs.get(name)}, not {trials.get(name)}" for name in odd]
        )


def _computation(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that decides what is computed, as `rope_parameters.rope_theta`, with its value."""
    for name, value in values.items():
        if name in IDLE_KEYS:
            continue
        if isinstance(value, Mapping):
            yield from _computation(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def _decides(config: Any, key: str) -> bool:
    """Whether a key at the top of a config.json can change a number of that model: its class knows it, and other keys leave it
    a meaning."""
    values = config.to_dict()
    if (
        key == "max_window_layers" and values.get("use_sliding_window") is False
    ):  # sliding_window is None by its class then
        return False
    if key == "max_position_embeddings" and _rope_is_default(values):
        return False
    return key in SHARED_KEYS or key in type(config)().to_dict()


def _rope_is_default(values: Mapping[str, Any]) -> bool:
    """Whether positions are rotary and not scaled to a length."""
    rope = values.get("rope_parameters")
    if rope is None:  # transformers 4
        return "rope_theta" in values and values.get("rope_scaling") is None
    kinds = [
        rope,
        *(one for one in rope.values() if isinstance(one, Mapping)),
    ]  # one, or one for each type of layer
    return {kind["rope_type"] for kind in kinds if "rope_type" in kind} == {"default"}


def _other_model(source: Path, ours: Path, differences: list[str]) -> ConfigError:
    return ConfigError(
        f"{source} is not of the architecture of the trial's model, {ours}: {_some(differences, '; ')}. "
        "Import a checkpoint of that architecture, or start a new trial with actor.path (or model.path) of this one."
    )


def _some(names: list[str], between: str = ", ") -> str:
    more = f"{between}… ({len(names)} in all)" if len(names) > MAX_NAMED else ""
    return between.join(names[:MAX_NAMED]) + more
