"""Direct preference optimization: supervised training on pairs, with a frozen reference model.

The reward of a completion is beta * log(pi / ref): its log-probability under the model, minus the one under
the reference model, which is computed once per batch.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from hpc_rl.config.options.training import DPOEngineConfig
from hpc_rl.datasets.encode import load_preferences
from hpc_rl.engines.base import Engine, MicroBatch, Scorer, Sequences, sum_over_data_ranks
from hpc_rl.trainers.supervised import Row, SupervisedTask

# Returns the loss of each pair [P] from beta and the logarithms of pi / ref of chosen and rejected [P, 2].
PairLoss = Callable[[torch.Tensor, float], torch.Tensor]


class PairSums(NamedTuple):
    """Sums over pairs."""

    loss: torch.Tensor  # with gradient
    num_correct: torch.Tensor  # the chosen completion has the larger reward
    margin: torch.Tensor  # of the rewards
    chosen: torch.Tensor  # rewards
    rejected: torch.Tensor


def compute_sigmoid_loss(ratios_P2: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return -(1 - e) log sigmoid(m) - e log sigmoid(-m) per pair, m = beta * (chosen - rejected).

    Rafailov et al., arXiv 2305.18290, equation 7. With label smoothing e, conservative DPO: Mitchell, "A note
    on DPO with noisy preferences & relationship to IPO", 2023, equation 3.
    """
    margin_P = beta * (ratios_P2[:, 0] - ratios_P2[:, 1])
    return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)


def compute_ipo_loss(ratios_P2: torch.Tensor, beta: float) -> torch.Tensor:
    """Return (chosen - rejected - 1 / (2 beta))^2 per pair. Azar et al., arXiv 2310.12036, equation 17."""
    return (ratios_P2[:, 0] - ratios_P2[:, 1] - 1 / (2 * beta)).square()


def sum_pairs(ratios_P2: torch.Tensor, beta: float, loss: PairLoss) -> PairSums:
    rewards_P2 = beta * ratios_P2.detach()
    chosen_P, rejected_P = rewards_P2.unbind(1)
    margin_P = chosen_P - rejected_P
    return PairSums(
        loss(ratios_P2, beta).sum(), (margin_P > 0).sum(), margin_P.sum(), chosen_P.sum(), rejected_P.sum()
    )


def make_dpo_task(config: DPOEngineConfig, reference: Scorer) -> SupervisedTask:
    """Return the task of a trial whose section `model` is `config`."""
    if config.loss_type == "ipo":
        pair_loss: PairLoss = compute_ipo_loss
    else:
        pair_loss = partial(compute_sigmoid_loss, label_smoothing=config.label_smoothing)
    sum_losses = partial(sum_pairs, beta=config.beta, loss=pair_loss)

    def compute_loss(batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sums = sum_losses(sum_log_ratios(batch))
        return sums.loss, {name: value for name, value in sums._asdict().items() if name != "loss"}

    def evaluate(engine: Engine, rows: Sequences) -> dict[str, float]:
        both = zip(engine.logprobs(rows, 1.0), rows.columns["ref"], strict=True)
        ratios = [float((logprobs - ref).sum(dtype="float64")) for logprobs, ref in both]
        sums = sum_losses(torch.tensor(ratios, dtype=torch.float64).reshape(-1, 2))
        numbers = [float(sums.loss), float(sums.num_correct), float(sums.margin), len(ratios) / 2]
        loss, correct, margin, count = sum_over_data_ranks(engine.mesh, numbers)
        count = max(1.0, count)
        return {"eval_loss": loss / count, "eval_accuracy": correct / count, "eval_margin": margin / count}

    return SupervisedTask(
        load=load_preferences,
        num_tokens=lambda row: len(row[0]) + len(row[1]),
        encode=partial(make_preferences, reference),
        loss=compute_loss,
        weight=len,
        means={
            "accuracy": "num_correct",
            "margin": "margin",
            "reward_chosen": "chosen",
            "reward_rejected": "rejected",
        },
        evaluate=evaluate,
    )


def make_preferences(reference: Scorer, rows: list[Row]) -> Sequences:
    """Encode (chosen ids, rejected ids, chosen mask, rejected mask) rows as chosen and rejected alternately.

    Adds a column `ref` with the log-probabilities of the reference model. Collective.
    """
    ids = [sequence for row in rows for sequence in row[:2]]
    columns: dict[str, list[np.ndarray]] = {"loss_mask": [mask for row in rows for mask in row[2:]]}
    columns["ref"] = reference.logprobs(Sequences(ids, dict(columns)), 1.0)
    return Sequences(ids, columns)


def sum_log_ratios(batch: MicroBatch) -> torch.Tensor:
    """Return the logarithms of pi / ref of whole completions, [P, 2] for chosen and rejected."""
    ratios_T = batch.logprobs_T - batch.columns_T["ref"]  # both are 0 outside of the loss mask
    num_rows = int(batch.row_T[-1]) + 1 if len(batch.row_T) else 0
    return ratios_T.new_zeros(num_rows).index_add(0, batch.row_T, ratios_T).reshape(-1, 2)
