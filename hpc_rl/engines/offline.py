"""What is done with recover state outside of training, on the CPU by one process: to a Hugging Face checkpoint and from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from hpc_rl.blocks import FileRecord
from hpc_rl.config.train import OptimizerConfig, TrainEngineConfig
from hpc_rl.engines import hf_io, model, state
from hpc_rl.engines.fsdp import FSDPEngine


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
    policy = model.build(config, seed, frozen=True)
    parameters = {name: parameter.detach() for name, parameter in policy.hf.named_parameters()}
    state.load_model(folder, num_ranks, parameters, files)
    dtype, saved = model.DTYPES[config.dtype], set(policy.hf.state_dict())
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in parameters.items()}
    tensors |= {name: buffer for name, buffer in policy.hf.named_buffers() if name in saved}
    source = Path(config.path)
    others = [source / "generation_config.json", *(hf_io.tokenizer_files(tokenizer) if tokenizer else [])]
    config_json = model.exported_config(source, policy.hf, config)
    hf_io.write_checkpoint(out, hf_io.on_disk_names(policy.hf, tensors), config_json, others, durable=True)


def import_weights(
    config: TrainEngineConfig, seed: int, source: Path, num_updates: int, folder: Path
) -> tuple[list[FileRecord], dict[str, int]]:
    """Write a state with the weights of a Hugging Face checkpoint, moments of zero and the schedule after `num_updates`.

    Returns the written files and the counters. Raises ConfigError for another model's weights, OSError.
    """
    optimizer = dataclasses.replace(config.optimizer or OptimizerConfig(), offload=False)
    config = dataclasses.replace(on_cpu(config), path=str(source), init_from_scratch=False, dtype="float32", optimizer=optimizer)
    engine = FSDPEngine(config, seed=seed)
    engine.initialize(max(1, num_updates))
    engine.pass_updates(num_updates)
    return engine.save(folder), engine.counters()
