"""GRPO from its formulas in float64, one sequence at a time, with its own AdamW: nothing of the package computes.

Options have the names of section `actor`; defaults are in `DEFAULTS`. Sources: Shao et al., arXiv 2402.03300
(GRPO); Schulman et al., arXiv 1506.02438 (GAE) and 1707.06347 (clip); Yu et al., arXiv 2503.14476 (DAPO);
Hilton et al., arXiv 2110.00641 (decoupled); Loshchilov and Hutter, arXiv 1711.05101 (AdamW).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exact_models import widen
from transformers import AutoModelForCausalLM

from hpc_rl.core.types import Batch, Trajectory

DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "max_new_tokens": 16,
    "reward_bias": 0.0,
    "reward_scaling": 1.0,
    "reward_clip": 20.0,
    "reward_norm": None,
    "adv_norm": None,
    "overlong_tokens": 0,  # 0: no penalty
    "overlong_penalty_factor": 0.0,
    "dynamic_sampling": False,
    "mask_no_eos_with_zero": False,
    "discount": 1.0,
    "gae_lambda": 1.0,
    "kl_ctl": 0.0,
    "kl_estimator": "k1",
    "beta": 0.0,
    "kl_loss_estimator": "k3",
    "eps_clip": 0.2,
    "eps_clip_higher": None,
    "c_clip": None,
    "recompute_logprob": False,
    "use_decoupled_loss": False,
    "behav_imp_weight_cap": None,
    "ppo_n_minibatches": 1,
    "loss_aggregation": "token_mean",
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-5,
    "weight_decay": 0.01,
    "gradient_clipping": 1.0,
}
NORM = {
    "mean_level": "batch",
    "std_level": "batch",
    "mean_leave1out": False,
    "std_unbiased": False,
    "eps": 1e-5,
}


@dataclass
class Row:
    """A trajectory of the batch; arrays have a number per trained token."""

    made: Trajectory
    group: int
    at: np.ndarray  # places of the trained tokens
    reward: float
    advantages: np.ndarray
    prox: np.ndarray  # log-probabilities
    behav: np.ndarray
    ref: np.ndarray | None = None


class PlainGRPO:
    """Trains a checkpoint of transformers; `weights` are the result, float64 by name."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.options = {**DEFAULTS, **options}
        unknown = self.options.keys() - DEFAULTS.keys()
        assert not unknown, f"the formulas have no {unknown}"
        loaded = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
        self.model = widen(loaded)
        self.first = widen(loaded)  # the reference model of the KL terms
        self.adam = AdamW(dict(self.model.named_parameters()), self.options)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in self.model.named_parameters()}

    def train(self, batch: Batch) -> None:
        """Make the updates of a step."""
        rows = self._select(batch)
        if not rows:
            return
        self._place_logprobs(rows)
        self._compute_advantages(rows)
        members = rows
        if self.options["mask_no_eos_with_zero"]:
            members = [row for row in rows if row.made.finish_reason != "length"]
        for part in cut(members, self.options["ppo_n_minibatches"]):
            by_row = self.options["loss_aggregation"] != "token_mean"
            divisor = len(part) if by_row else sum(len(row.at) for row in part)
            for row in part:
                (self._compute_loss(row) / divisor).backward()
            self.adam.step()

    def compute_logprobs(self, model: torch.nn.Module, made: Trajectory) -> torch.Tensor:
        """Return the log-probabilities of the trained tokens."""
        ids = torch.from_numpy(made.ids.astype(np.int64))
        logits = model(ids[None, :-1]).logits[0] / self.options["temperature"]
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None]).squeeze(1)
        return logprobs[torch.from_numpy(np.flatnonzero(made.loss_mask) - 1)]

    def _select(self, batch: Batch) -> list[Row]:
        """Return the rows, with the overlong penalty, without groups that dynamic sampling drops."""
        rows, options = [], self.options
        for number, group in enumerate(batch.groups):
            if options["dynamic_sampling"] and len({made.reward for made in group.trajectories}) == 1:
                continue
            for made in group.trajectories:
                at, reward = np.flatnonzero(made.loss_mask), made.reward
                if options["overlong_tokens"]:
                    excess = len(at) - (options["max_new_tokens"] - options["overlong_tokens"])
                    share = min(max(excess / options["overlong_tokens"], 0.0), 1.0)
                    reward -= share * options["overlong_penalty_factor"]
                sampled = made.logprobs[at].astype(np.float64)
                rows.append(Row(made, number, at, reward, np.zeros(len(at)), sampled, sampled))
        return rows

    @torch.no_grad()
    def _place_logprobs(self, rows: list[Row]) -> None:
        options = self.options
        for row in rows:
            if options["recompute_logprob"] or options["use_decoupled_loss"]:
                row.prox = self.compute_logprobs(self.model, row.made).numpy()
                if not options["use_decoupled_loss"]:
                    row.behav = row.prox
            if options["kl_ctl"] or options["beta"]:
                row.ref = self.compute_logprobs(self.first, row.made).numpy()

    def _compute_advantages(self, rows: list[Row]) -> None:
        options = self.options
        bound = options["reward_clip"]
        rewards = [
            np.array(
                [min(max((row.reward + options["reward_bias"]) * options["reward_scaling"], -bound), bound)]
            )
            for row in rows
        ]
        groups = [row.group for row in rows]
        if options["reward_norm"] is not None:
            rewards = normalize(rewards, groups, options["reward_norm"])
        for row, reward in zip(rows, rewards, strict=True):
            of_tokens = np.zeros(len(row.at))
            of_tokens[-1] = reward[0]
            if options["kl_ctl"]:
                estimate = ESTIMATES[options["kl_estimator"]]
                of_tokens -= options["kl_ctl"] * estimate(torch.from_numpy(row.ref - row.behav)).numpy()
            later = 0.0
            for t in reversed(range(len(row.at))):
                later = of_tokens[t] + options["discount"] * options["gae_lambda"] * later
                row.advantages[t] = later
        if options["adv_norm"] is not None:
            for row, found in zip(
                rows, normalize([row.advantages for row in rows], groups, options["adv_norm"]), strict=True
            ):
                row.advantages = found

    def _compute_loss(self, row: Row) -> torch.Tensor:
        """Return the weighted sum of the losses of a row's tokens."""
        options = self.options
        current = self.compute_logprobs(self.model, row.made)
        advantage, prox, behav = map(torch.from_numpy, (row.advantages, row.prox, row.behav))
        higher = options["eps_clip"] if options["eps_clip_higher"] is None else options["eps_clip_higher"]
        ratio = (current - prox).exp()
        clipped = ratio.clamp(1 - options["eps_clip"], 1 + higher)
        objective = torch.minimum(ratio * advantage, clipped * advantage)
        if options["c_clip"] is not None:
            bounded = torch.maximum(objective, options["c_clip"] * advantage)
            objective = torch.where(advantage < 0, bounded, objective)
        correction = (prox - behav).exp()
        if options["behav_imp_weight_cap"] is not None:
            correction = torch.where(correction > options["behav_imp_weight_cap"], 0.0, correction)
        loss = -objective * correction
        if options["beta"]:
            estimate = ESTIMATES[options["kl_loss_estimator"]]
            loss = loss + options["beta"] * estimate(torch.from_numpy(row.ref) - current)
        weight = {
            "token_mean": 1.0,
            "sequence_mean": 1 / len(row.at),
            "constant_length": 1 / options["max_new_tokens"],
        }[options["loss_aggregation"]]
        return weight * loss.sum()


# of log ref - log p
ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda gap: -gap,
    "k2": lambda gap: gap * gap / 2,
    "k3": lambda gap: gap.exp() - 1 - gap,
}


def normalize(rows: list[np.ndarray], groups: Sequence[int], norm: Mapping[str, Any]) -> list[np.ndarray]:
    """Return (x - mean) / (deviation + eps) of all numbers, by the levels of `norm`."""
    norm = {**NORM, **norm}

    def gather(values: list[np.ndarray], i: int, level: str) -> np.ndarray:
        alike = [v for v, group in zip(values, groups, strict=True) if level == "batch" or group == groups[i]]
        return np.concatenate(alike)

    centered = []
    for i, row in enumerate(rows):
        mean = np.zeros(len(row))
        if norm["mean_level"] is not None:
            peers = gather(rows, i, norm["mean_level"])
            mean += peers.mean()
            if norm["mean_leave1out"]:
                mean = (peers.sum() - row) / max(1, len(peers) - 1)
        centered.append(row - mean)
    if norm["std_level"] is None:
        return centered
    result = []
    for i, row in enumerate(centered):
        peers = gather(centered, i, norm["std_level"])
        count = max(1, len(peers) - int(norm["std_unbiased"]))
        result.append(row / (math.sqrt((peers**2).sum() / count) + norm["eps"]))
    return result


def cut(rows: list[Row], num_parts: int) -> Iterator[list[Row]]:
    """Yield mini-batches of about as many tokens: the longest row goes to the shortest part, prompt included."""
    parts: list[list[Row]] = [[] for _ in range(num_parts)]
    for row in sorted(rows, key=lambda row: -len(row.made.ids)):
        sizes = [sum(len(one.made.ids) + 1 for one in part) for part in parts]
        parts[sizes.index(min(sizes))].append(row)
    yield from filter(None, parts)


class AdamW:
    """Adam with decoupled weight decay and a bound of the gradient's norm."""

    def __init__(self, parameters: dict[str, torch.Tensor], options: Mapping[str, Any]) -> None:
        self.parameters = parameters
        self.options = options
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters by their gradients, and clear these."""
        options = self.options
        self.num_steps += 1
        gradients = {name: one.grad for name, one in self.parameters.items()}
        norm = math.sqrt(sum(float((one**2).sum()) for one in gradients.values()))
        scale = min(1.0, options["gradient_clipping"] / (norm + 1e-6))
        for name, parameter in self.parameters.items():
            gradient, (first, second) = gradients[name] * scale, self.moments[name]
            first.mul_(options["beta1"]).add_((1 - options["beta1"]) * gradient)
            second.mul_(options["beta2"]).add_((1 - options["beta2"]) * gradient**2)
            mean = first / (1 - options["beta1"] ** self.num_steps)
            scatter = second / (1 - options["beta2"] ** self.num_steps)
            parameter -= options["lr"] * options["weight_decay"] * parameter
            parameter -= options["lr"] * mean / (scatter.sqrt() + options["eps"])
            parameter.grad = None
