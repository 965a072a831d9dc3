"""Training of a critic, of DPO and by a teacher's likely tokens on transformers and torch alone, and its
comparison with an engine's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hpc_rl.algorithms.opd import compute_forward_kl
from hpc_rl.config.options.training import DPOEngineConfig, PPOCriticConfig
from hpc_rl.engines.base import Engine, LossFn, MicroBatch, Sequences
from hpc_rl.engines.shared.packing import balance
from hpc_rl.trainers.critic import Critic
from hpc_rl.trainers.dpo import make_dpo_task
from hpc_rl.trainers.ranks import Ranks

LENGTHS = ((9, 3), (30, 4), (12, 2), (28, 17))  # of pairs
VOCABULARY = 37  # smaller than each model's
NUM_STEPS = 3
EPS_CLIP, BETA, NUM_TOP = 0.3, 0.5, 3
COLUMNS = {"critic": ("values", "returns"), "dpo": ("ref",), "top": ("top_ids", "top_teacher")}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def make_critic(path: Path, out: Path) -> None:
    """Write the critic that has the trunk of a language model and a random head."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    model.save_pretrained(out)


def batch(step: int) -> tuple[list[np.ndarray], dict[str, list[np.ndarray]]]:
    """Return the rows of a batch, pairs one after another, with the columns of all objectives."""
    random = np.random.default_rng(step)
    ids = [
        random.integers(0, VOCABULARY, size=length).astype(np.int32) for pair in LENGTHS for length in pair
    ]
    columns: dict[str, list[np.ndarray]] = {"loss_mask": [np.arange(len(row)) >= 1 for row in ids]}
    for name, low, high in (("values", -1, 1), ("returns", -1, 1), ("ref", -4, 0)):
        columns[name] = [
            random.uniform(low, high, len(row)).astype(np.float32) * mask
            for row, mask in zip(ids, columns["loss_mask"], strict=True)
        ]
    columns["top_ids"] = [
        random.permuted(np.tile(np.arange(VOCABULARY, dtype=np.int32), (len(row), 1)), axis=1)[:, :NUM_TOP]
        for row in ids
    ]
    shares = [random.dirichlet(np.ones(NUM_TOP + 1), len(row))[:, :NUM_TOP] for row in ids]
    columns["top_teacher"] = [np.log(one).astype(np.float32) for one in shares]
    return ids, columns


def count(step: int, kind: str) -> float:
    masks = batch(step)[1]["loss_mask"]
    return float(len(LENGTHS)) if kind == "dpo" else float(sum(mask.sum() for mask in masks))


def share(step: int, kind: str, data_rank: int, num_data_ranks: int) -> tuple[list[int], Sequences]:
    """Return the rows of a data rank, whole pairs, and their numbers."""
    ids, columns = batch(step)
    pairs = balance([sum(pair) for pair in LENGTHS], num_data_ranks)[data_rank]
    mine = [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
    names = ("loss_mask", *COLUMNS[kind])
    return mine, Sequences([ids[i] for i in mine], {name: [columns[name][i] for i in mine] for name in names})


def plain(path: Path, kind: str) -> dict[str, Any]:
    """Train a row at a time; return the scores or log-probabilities of the first batch, losses and norms."""
    cls = AutoModelForSequenceClassification if kind == "critic" else AutoModelForCausalLM
    model = cls.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), **ADAM)
    found: dict[str, Any] = {"logprobs": [], "losses": [], "grad_norms": []}
    for step in range(NUM_STEPS):
        ids, columns = batch(step)
        whole = [compute_all(model, row, kind) for row in ids]
        outputs = [
            row[:, 0] if kind == "critic" else row.gather(1, torch.from_numpy(own).long()[:, None])[:, 0]
            for row, own in zip(whole, ids, strict=True)
        ]
        masks = [torch.from_numpy(mask) for mask in columns["loss_mask"]]
        if step == 0:
            found["logprobs"] = [(row * mask).tolist() for row, mask in zip(outputs, masks, strict=True)]
        total = torch.zeros(())
        if kind == "critic":
            for value, mask, old, target in zip(
                outputs, masks, columns["values"], columns["returns"], strict=True
            ):
                old, target = torch.from_numpy(old), torch.from_numpy(target)
                bounded = old + (value - old).clamp(-EPS_CLIP, EPS_CLIP)
                worse = torch.maximum((value - target) ** 2, (bounded - target) ** 2) / 2
                total = total + worse[mask].sum()
        elif kind == "top":
            for all_TV, row, mask, top, given in zip(
                whole, outputs, masks, columns["top_ids"], columns["top_teacher"], strict=True
            ):
                teacher = torch.from_numpy(given).exp()
                policy = all_TV.gather(1, torch.from_numpy(top).long()).exp()
                rest = 1 - teacher.sum(1)
                forward = (teacher * (teacher / policy).log()).sum(1)
                forward = forward + rest * (rest / (1 - policy.sum(1))).log()
                total = total + (forward - row)[mask].sum()
        else:
            ratios = [
                (row - torch.from_numpy(ref))[mask].sum()
                for row, ref, mask in zip(outputs, columns["ref"], masks, strict=True)
            ]
            for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True):
                total = total + torch.log1p(torch.exp(-BETA * (chosen - rejected)))
        loss = total / count(step, kind)
        adam.zero_grad()
        loss.backward()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        found["losses"].append(loss.item())
        found["grad_norms"].append(torch.stack([grad.norm() for grad in grads]).norm().item())
        adam.step()
    return found


def compute_all(model: torch.nn.Module, ids: np.ndarray, kind: str) -> torch.Tensor:
    """Return the score of each token [T, 1], or all log-probabilities [T, V], 0 at the first token."""
    ids_1T = torch.from_numpy(ids).long()[None]
    if kind == "critic":
        return model.score(model.model(ids_1T).last_hidden_state)[0]
    logprobs_TV = torch.log_softmax(model(ids_1T).logits[0, :-1], 1)
    return torch.cat([torch.zeros(1, logprobs_TV.shape[1]), logprobs_TV])


def compute_top_loss(batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the divergence over the likely tokens and the cross-entropy of the row's own."""
    assert batch.top_logprobs_TK is not None
    forward_T = compute_forward_kl(batch.columns_T["top_teacher"], batch.top_logprobs_TK)
    mask_T = batch.columns_T["loss_mask"]
    return torch.where(mask_T, forward_T - batch.logprobs_T, torch.zeros_like(forward_T)).sum(), {}


def make_loss(kind: str, engine: Engine) -> LossFn:
    if kind == "top":
        return compute_top_loss
    if kind == "critic":
        return Critic(engine, PPOCriticConfig(path="m", eps_clip=EPS_CLIP), Ranks(), 1).compute_loss
    return make_dpo_task(DPOEngineConfig(path="m", beta=BETA), engine).loss


def train(engine: Engine, kind: str) -> dict[str, Any]:
    """Return what `plain` returns, by an engine, and the numbers of this rank's rows. Collective."""
    where = (kind, engine.mesh.data_rank, engine.mesh.num_data_ranks)
    numbers, rows = share(0, *where)
    found: dict[str, Any] = {"rows": numbers, "losses": [], "grad_norms": []}
    scored = Sequences(rows.ids, {"loss_mask": rows.columns["loss_mask"]})
    found["logprobs"] = [row.tolist() for row in engine.logprobs(scored, 1.0)]
    for step in range(NUM_STEPS):
        sums = engine.train_batch(share(step, *where)[1], make_loss(kind, engine), count(step, kind), 1.0)
        found["losses"].append(sums["loss"])
        found["grad_norms"].append(sums["grad_norm"])
    return found


def check(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Compare the results of all ranks with the plain ones. Raises AssertionError."""
    for one in found:
        for number, row in zip(one["rows"], one["logprobs"], strict=True):
            np.testing.assert_allclose(row, wanted["logprobs"][number], atol=1e-5)
        for name in ("losses", "grad_norms"):
            np.testing.assert_allclose(one[name][0], wanted[name][0], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(one[name], wanted[name], rtol=1e-4, atol=1e-4)
    assert sorted({number for one in found for number in one["rows"]}) == list(range(2 * len(LENGTHS)))


def write(folder: Path, rank: int, found: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def read(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
