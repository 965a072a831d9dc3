"""Training of an adapter by plain peft and torch, and the comparison of an engine with it."""

import json
from pathlib import Path

import numpy as np
import peft
import plain_training
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hpc_rl.engines.base import Engine
from hpc_rl.engines.shared.packing import balance
from hpc_rl.trainers.supervised import compute_sequence_loss

ADAPTER = {"use_lora": True, "lora_rank": 3, "lora_alpha": 12, "target_modules": ["all-linear"]}
EPS = 1e-4  # of Adam: with a smaller one, the rounding of gradients near 0 changes whole updates
OPTIONS = {**ADAPTER, "eps": EPS}
NUM_STEPS = 4
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def write_adapter(model: Path, folder: Path, modules: list[str] | str = "all-linear", seed: int = 3) -> None:
    """Write an adapter by peft with random A and B, so that it changes the model from the start."""
    torch.manual_seed(seed)
    adapted = _wrap(model, modules)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    adapted.save_pretrained(folder)


def _wrap(model: Path, modules: list[str] | str) -> peft.PeftModel:
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    settings = peft.LoraConfig(
        r=3, lora_alpha=12, target_modules=modules, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, settings)


def load(model: Path, adapter: Path, trainable: bool = False) -> peft.PeftModel:
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=trainable)


def plain(model: Path, adapter: Path) -> plain_training.Trained:
    """Train an adapter by peft and torch, one row at a time."""
    adapted = load(model, adapter, trainable=True)
    trained = {name: one for name, one in adapted.named_parameters() if one.requires_grad}
    adam = torch.optim.AdamW(trained.values(), lr=1e-3, betas=(0.9, 0.95), eps=EPS, weight_decay=0.01)
    adapted.train()
    result = plain_training.Trained([], [], [], {}, {})
    result.logprobs = list_logprobs(adapted)
    for step in range(NUM_STEPS):
        rows, total = plain_training.batch(step), 0.0
        for ids, mask in zip(rows.ids, rows.columns["loss_mask"], strict=True):
            logprobs = plain_training.logprobs_of(adapted, ids)
            loss = -(logprobs * torch.from_numpy(mask)).sum() / plain_training.weight(rows)
            loss.backward()
            total += loss.item()
        result.grad_norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item())
        adam.step()
        adam.zero_grad()
        result.losses.append(total)
    result.weights = {name.replace(".default", ""): one.detach().clone() for name, one in trained.items()}
    return result


def list_logprobs(model: torch.nn.Module) -> list[np.ndarray]:
    """Return the log-probabilities of the trained tokens of the first batch."""
    rows = plain_training.batch(0)
    with torch.no_grad():
        found = [plain_training.logprobs_of(model, ids).numpy() for ids in rows.ids]
    return [one * mask for one, mask in zip(found, rows.columns["loss_mask"], strict=True)]


def train(engine: Engine, out: Path) -> None:
    """Do with an engine what `plain` does; all ranks write their numbers to `out`. Collective."""
    mesh = engine.mesh
    out.mkdir(exist_ok=True)
    rows = plain_training.batch(0, mesh.data_rank, mesh.num_data_ranks)
    answer: dict = {"logprobs": [row.tolist() for row in engine.logprobs(rows, plain_training.TEMPERATURE)]}
    answer["base"] = [row.tolist() for row in engine.base_logprobs(rows, plain_training.TEMPERATURE)]
    engine.publishes_model = True
    merged = engine.list_published_pieces()
    engine.publishes_model = False
    alone = engine.list_published_pieces()
    answer["published"] = [
        {"name": piece.name, "offset": piece.offset, "values": piece.local.tolist(), "shape": piece.shape}
        for piece in alone
    ]
    answer["num_merged"] = sum(piece.local.numel() for piece in merged)
    answer["numbers"] = []
    for step in range(NUM_STEPS):
        share = plain_training.batch(step, mesh.data_rank, mesh.num_data_ranks)
        weight = plain_training.weight(plain_training.batch(step))
        numbers = engine.train_batch(share, compute_sequence_loss, weight, plain_training.TEMPERATURE)
        answer["numbers"].append(numbers)
    engine.snapshot(copied=False).write(out)
    (out / f"rank-{mesh.rank}.json").write_text(json.dumps(answer))
    engine.export(out / "exported")
    # whole, with the adapter merged
    whole = {name: tensor for bucket in engine.weights() for name, tensor in bucket}
    if not mesh.rank:
        torch.save(whole, out / "merged.pt")


def check(model: Path, adapter: Path, trained: plain_training.Trained, out: Path, num_ranks: int) -> None:
    """Compare what `train` wrote with what `plain` returned. Raises AssertionError."""
    answers = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    assert all(one["numbers"] == answers[0]["numbers"] for one in answers), "ranks disagree"
    for name, values in (("loss", trained.losses), ("grad_norm", trained.grad_norms)):
        found = [numbers[name] for numbers in answers[0]["numbers"]]
        np.testing.assert_allclose(found, values, rtol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    for key, expected in (("logprobs", trained.logprobs), ("base", list_logprobs(base))):
        _check_rows(answers, key, expected)
    exported = load_file(out / "exported" / "adapter_model.safetensors")
    assert exported.keys() == trained.weights.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, trained.weights[name], atol=2e-6, rtol=1e-5)
    after = load(model, out / "exported")
    for one, other in zip(list_logprobs(after), list_logprobs(_make_adapted(model, exported)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    after.merge_and_unload().save_pretrained(out / "by-peft")
    merged, expected = torch.load(out / "merged.pt"), load_file(out / "by-peft" / "model.safetensors")
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-5)
    _check_published(answers, adapter, sum(one.numel() for one in base.parameters()))


def _make_adapted(model: Path, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    modules = sorted({name.split(".")[-3] for name in weights})
    adapted = _wrap(model, modules)
    named = {name.replace(".weight", ".default.weight"): one for name, one in weights.items()}
    left = adapted.load_state_dict(named, strict=False)
    assert not left.unexpected_keys
    return adapted


def _check_rows(answers: list[dict], key: str, expected: list[np.ndarray]) -> None:
    rows = plain_training.batch(0).ids
    num_shares = len({json.dumps([len(row) for row in one[key]]) for one in answers})
    shares = balance([len(row) for row in rows], num_shares)
    for one in answers:
        lengths = [len(row) for row in one[key]]
        share = next(part for part in shares if [len(expected[i]) for i in part] == lengths)
        for i, row in zip(share, one[key], strict=True):
            np.testing.assert_allclose(row, expected[i], atol=1e-5)


def _check_published(answers: list[dict], adapter: Path, num_params: int) -> None:
    """The pieces of all ranks are the adapter, each value once; merged pieces are the whole model."""
    assert sum(one["num_merged"] for one in answers) == num_params
    start = load_file(adapter / "adapter_model.safetensors")
    counts = {name: torch.zeros_like(one) for name, one in start.items()}
    for piece in (piece for one in answers for piece in one["published"]):
        values = torch.tensor(piece["values"])
        if not values.numel():
            continue
        place = tuple(slice(at, at + size) for at, size in zip(piece["offset"], values.shape, strict=True))
        torch.testing.assert_close(values, start[piece["name"]][place])
        counts[piece["name"]][place] += 1
    assert all(bool((one == 1).all()) for one in counts.values())
