"""Tiny models, their training by transformers and torch alone, and its comparison with an engine's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from engine_weights import whole_weights
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.config.options.training import OptimizerConfig, TrainEngineConfig
from hpc_rl.core.checked_file import record
from hpc_rl.engines.base import Engine, Sequences
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared.packing import balance
from hpc_rl.trainers.supervised import compute_sequence_loss

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {
    "qwen2": {**COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "tied": {
        **COMMON,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "pad_token_id": 3,
    },
    "qwen3": {
        **COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 12,
        "pad_token_id": 3,
    },
    "llama": {**COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
}
LENGTHS = (9, 3, 30, 4, 12, 2, 28, 17)
NUM_STEPS = 10
TEMPERATURE = 0.9
OPTIMIZER = {
    "lr": 1e-3,
    "weight_decay": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "gradient_clipping": 1.0,
}


def write_model(folder: Path, architecture: dict) -> None:
    """Write a checkpoint with random weights, biases and norms that are not all 1."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(architecture))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def batch(step: int, data_rank: int = 0, num_data_ranks: int = 1) -> Sequences:
    """Return the rows of a data rank; in steps 2 and 7 there is one row for all of them."""
    random = np.random.default_rng(step)
    lengths = LENGTHS[:1] if step in (2, 7) else LENGTHS
    ids = [random.integers(0, 96, size=length).astype(np.int32) for length in lengths]
    masks = [np.arange(len(row)) >= 2 for row in ids]
    mine = balance([len(row) for row in ids], num_data_ranks)[data_rank]
    return Sequences([ids[i] for i in mine], {"loss_mask": [masks[i] for i in mine]})


def weight(rows: Sequences) -> float:
    return float(sum(int(mask.sum()) for mask in rows.columns["loss_mask"]))


@dataclass
class Trained:
    """What a training gave: losses and norms of each step, and by name the gradient of the first."""

    logprobs: list[np.ndarray]
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def plain(folder: Path) -> Trained:
    """Train by transformers and torch, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    model.train()
    result = Trained([], [], [], {}, {})
    for row in batch(0).ids:
        result.logprobs.append(logprobs_of(model, row).detach().numpy())
    for step in range(NUM_STEPS):
        rows, total = batch(step), 0.0
        for ids, mask in zip(rows.ids, rows.columns["loss_mask"], strict=True):
            loss = -(logprobs_of(model, ids) * torch.from_numpy(mask)).sum() / weight(rows)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e30)
        if step == 0:
            grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
            result.gradients = {name: grad.clone() for name, grad in grads.items()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        result.losses.append(total)
        result.grad_norms.append(norm.item())
    result.weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    return result


def logprobs_of(model: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    """Return log p of each token given the earlier ones, [L]; 0 for the first."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = model(tokens[None, :-1] if len(ids) > 1 else tokens[None]).logits[0]
    log_softmax = torch.log_softmax(logits[: len(ids) - 1] / TEMPERATURE, dim=-1)
    found = log_softmax.gather(1, tokens[1:, None]).squeeze(1)
    return torch.cat([torch.zeros(1), found])


def config_of(folder: Path, eps: float = 1e-8, **options: object) -> TrainEngineConfig:
    defaults = {"attn_impl": "sdpa", "dtype": "float32", "gradient_checkpointing": False}
    optimizer = OptimizerConfig(
        **OPTIMIZER, eps=eps, lr_scheduler_type="constant", warmup_steps_proportion=0.0
    )
    return TrainEngineConfig(path=str(folder), optimizer=optimizer, **{**defaults, **options})


def train(engine: Engine, out: Path) -> None:
    """Do with an engine what `plain` does; all ranks write what they have got to `out`. Collective."""
    mesh = engine.mesh
    out.mkdir(exist_ok=True)
    first = batch(0, mesh.data_rank, mesh.num_data_ranks)
    rows = {"logprobs": [row.tolist() for row in engine.logprobs(first, TEMPERATURE)]}
    numbers = []
    for step in range(NUM_STEPS):
        share = batch(step, mesh.data_rank, mesh.num_data_ranks)
        numbers.append(engine.train_batch(share, compute_sequence_loss, weight(batch(step)), TEMPERATURE))
        if step == 0:
            engine.snapshot(copied=False).write(out)
    (out / f"rank-{mesh.rank}.json").write_text(json.dumps({**rows, "numbers": numbers}))
    engine.export(out / "exported")


def check(trained: Trained, model: Path, out: Path, num_ranks: int, num_data_ranks: int) -> None:
    """Compare what `train` wrote with what `plain` returned. Raises AssertionError."""
    answers = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    assert all(one["numbers"] == answers[0]["numbers"] for one in answers), "ranks disagree"
    masked = {"loss_mask": batch(0).columns["loss_mask"]}
    expected = [row * mask for row, mask in zip(trained.logprobs, masked["loss_mask"], strict=True)]
    shares = balance([len(row) for row in batch(0).ids], num_data_ranks)
    for one in answers:
        share = next(
            rows for rows in shares if [len(expected[i]) for i in rows] == list(map(len, one["logprobs"]))
        )
        for i, row in zip(share, one["logprobs"], strict=True):
            np.testing.assert_allclose(row, expected[i], atol=1e-5, rtol=0)
    for name, values in (("loss", trained.losses), ("grad_norm", trained.grad_norms)):
        found = [numbers[name] for numbers in answers[0]["numbers"]]
        np.testing.assert_allclose(found[0], values[0], rtol=1e-5)
        np.testing.assert_allclose(found, values, atol=1e-4, rtol=1e-4)
    single = FSDPEngine(config_of(model))
    single.initialize(NUM_STEPS, empty=True)
    files = {path.name: record(path) for path in out.glob("*.safetensors")}
    single.load(out, num_ranks, files)
    clip = min(1.0, 1.0 / (trained.grad_norms[0] + 1e-6))
    for shard in single.shards:
        gradient = single.optimizer.moments[shard.name][0] / (1 - 0.9) / clip
        torch.testing.assert_close(gradient, trained.gradients[shard.name], atol=1e-5, rtol=1e-4)
    exported = load_file(out / "exported" / "model.safetensors")
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, trained.weights[name], atol=3e-4, rtol=0)
    assert exported.keys() == whole_weights(single).keys()
