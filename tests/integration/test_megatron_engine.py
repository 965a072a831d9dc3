"""The engine on Megatron-core against plain transformers: layouts of 2 and 4 gloo ranks, state, exports."""

import sys
from pathlib import Path
from typing import Any

import gloo_ranks
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.engines.base import MicroBatch
from hpc_rl.engines.optimizer import learning_rate
from hpc_rl.trainers.supervised import sequence_loss
from hpc_rl.trial import read_json, write_json

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import megatron_rank  # noqa: E402

pytestmark = pytest.mark.timeout(240)
SIZES = {
    "vocab_size": megatron_rank.VOCABULARY,  # odd: it is padded for tensor ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "llama": {"model_type": "llama", "rope_parameters": SCALED},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"name": "d2", "kind": "qwen2"},
        {"name": "d2-whole-optimizer", "kind": "llama", "ddp": {"use_distributed_optimizer": False}},
        {
            "name": "d2-overlap",
            "kind": "tied",
            "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True},
        },
        {"name": "t2", "kind": "qwen3", "tensor": 2, "config": {"gradient_checkpointing": True}},
        {"name": "t2-tied", "kind": "tied", "tensor": 2},
        {"name": "t2-experts", "kind": "qwen3_moe", "tensor": 2},
        {"name": "p2", "kind": "qwen2", "pipeline": 2},
        {"name": "p2-tied", "kind": "tied", "pipeline": 2},
        {"name": "p2v2", "kind": "llama", "pipeline": 2, "megatron": {"virtual_pipeline_size": 2}},
        {"name": "c2", "kind": "qwen3", "context": 2},
        {"name": "e2", "kind": "qwen3_moe", "experts": 2},
        {"name": "t2e2", "kind": "mixtral", "tensor": 2, "experts": 2},
    ],
    4: [
        {"name": "t2p2", "kind": "tied", "tensor": 2, "pipeline": 2},
        {"name": "t4", "kind": "qwen3", "tensor": 4},
        {"name": "t2c2", "kind": "qwen2", "tensor": 2, "context": 2},
        {"name": "d2p2", "kind": "llama", "pipeline": 2},
        {"name": "p2c2", "kind": "qwen3", "pipeline": 2, "context": 2},
        {"name": "d2t2e2", "kind": "mixtral", "tensor": 2, "experts": 2, "expert_tensor": 2},
    ],
}


def make(folder: Path, kind: str) -> None:
    """Write a random model whose norms and biases matter."""
    options = {**SIZES, "tie_word_embeddings": False, **MODELS[kind]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.2).add_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder / kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron")
    torch.manual_seed(1)
    for kind in MODELS:
        make(path, kind)
    return path


class Plain:
    """What a model of transformers and AdamW of PyTorch do with the same batches, a row at a time."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.logprobs = [one.tolist() for one in self.forward(0)]
        self.gradients: dict[str, torch.Tensor] = {}
        self.steps = self.train()

    def forward(self, step: int) -> list[torch.Tensor]:
        rows = megatron_rank.batch(step)
        found = []
        for ids, mask in zip(rows.ids, rows.columns["loss_mask"], strict=True):
            ids_T = torch.from_numpy(ids).long()
            logits = self.model(ids_T[None]).logits[0, :-1] / megatron_rank.TEMPERATURE
            logprobs = torch.log_softmax(logits, 1).gather(1, ids_T[1:, None]).squeeze(1)
            found.append(torch.cat([torch.zeros(1), logprobs]) * torch.from_numpy(mask))
        return found

    def train(self) -> list[dict[str, float]]:
        config, out = megatron_rank.OPTIMIZER, []
        adam = torch.optim.AdamW(
            self.model.parameters(),
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        for step in range(megatron_rank.NUM_STEPS):
            logprobs_T = torch.cat(self.forward(step))
            masks = np.concatenate(megatron_rank.batch(step).columns["loss_mask"])
            columns = {"loss_mask": torch.from_numpy(masks)}
            seen = MicroBatch(
                logprobs_T, torch.zeros_like(logprobs_T), columns, torch.zeros_like(logprobs_T).long()
            )
            loss = sequence_loss(seen)[0] / megatron_rank.WEIGHT
            adam.zero_grad()
            loss.backward()
            grads = {name: one.grad for name, one in self.model.named_parameters()}
            norm = torch.stack([one.norm() for one in grads.values()]).norm().item()
            if step == 0:
                self.gradients = {name: one.clone() for name, one in grads.items()}
            adam.param_groups[0]["lr"] = learning_rate(config, step, megatron_rank.NUM_STEPS)
            adam.step()
            out.append({"loss": loss.item(), "grad_norm": norm})
        return out


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Plain]:
    return {kind: Plain(folder / kind) for kind in MODELS}


def run(folder: Path, num_ranks: int) -> None:
    write_json(folder / f"layouts-{num_ranks}.json", LAYOUTS[num_ranks])
    gloo_ranks.run(HERE / "megatron_rank.py", "layouts", num_ranks, folder)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> None:
    run(folder, 2)


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> None:
    run(folder, 4)


def saved(folder: Path, num_ranks: int, kind: str) -> dict[str, torch.Tensor]:
    """Whole tensors of one kind from the state of all ranks; each number must be there once."""
    import json

    from safetensors import safe_open

    wholes: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    for rank in range(num_ranks):
        with safe_open(folder / f"actor-rank-{rank:05d}.safetensors", framework="pt") as opened:
            state = json.loads(opened.metadata()["state"])
            for key, piece in state["pieces"].items():
                if piece["kind"] != kind:
                    continue
                shape, name, values = state["shapes"][piece["name"]], piece["name"], opened.get_tensor(key)
                part = tuple(
                    slice(at, at + size) for at, size in zip(piece["offset"], values.shape, strict=True)
                )
                wholes.setdefault(name, torch.zeros(shape))[part] = values
                counts.setdefault(name, torch.zeros(shape))[part] += 1
    assert all(bool((one == 1).all()) for one in counts.values())
    return wholes


def check(folder: Path, layout: dict[str, Any], num_ranks: int, want: Plain) -> None:
    found = [read_json(folder / f"{layout['name']}-{num_ranks}-{rank}.json") for rank in range(num_ranks)]
    logprobs = {}
    for one in found:
        assert one["steps"] == found[0]["steps"]
        for row, values in zip(one["rows"], one["logprobs"], strict=True):
            # peers have the same
            assert values == pytest.approx(logprobs.setdefault(row, values), abs=1e-6)
    for row, values in enumerate(want.logprobs):
        assert logprobs[row] == pytest.approx(values, abs=1e-5)
    out = folder / f"{layout['name']}-{num_ranks}"
    first_moments = saved(out, num_ranks, "exp_avg")
    assert first_moments.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        got = first_moments[name] / (1 - megatron_rank.OPTIMIZER.beta1)
        torch.testing.assert_close(
            got, gradient, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for got, step in zip(found[0]["steps"], want.steps, strict=True):
        assert got["loss"] == pytest.approx(step["loss"], abs=1e-4)
        assert got["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-3)
    assert found[0]["steps"][0]["loss"] == pytest.approx(want.steps[0]["loss"], abs=1e-5)
    original, untrained = (
        load_file(folder / layout["kind"] / "model.safetensors"),
        load_file(out / "untrained" / "model.safetensors"),
    )
    assert original.keys() == untrained.keys()
    assert all(torch.equal(original[name], untrained[name]) for name in original)


@pytest.mark.parametrize("layout", LAYOUTS[2], ids=lambda layout: layout["name"])
def test_two_ranks_compute_what_transformers_does(folder, plain, two_ranks, layout):
    check(folder, layout, 2, plain[layout["kind"]])


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS[4], ids=lambda layout: layout["name"])
def test_four_ranks_compute_what_transformers_does(folder, plain, four_ranks, layout):
    check(folder, layout, 4, plain[layout["kind"]])
