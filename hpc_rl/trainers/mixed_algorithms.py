"""Algorithms of the data sets of a mixture, combined to one algorithm of the whole batch.

Each algorithm sees only the rows of its data sets: its baselines and normalizations never mix them. The
losses are added token by token, and divided by the tokens of all data sets.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpc_rl.algorithms.algorithm import Algorithm
from hpc_rl.algorithms.token_batch import Loss, Options, RewardBatch, TokenBatch
from hpc_rl.config.algorithm_defaults import make_set_config
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.trainers.algorithm_checks import OutputChecks
from hpc_rl.trainers.algorithm_options import load_algorithm


@dataclass(frozen=True)
class Part:
    """An algorithm and its data sets, by number."""

    name: str
    algorithm: Algorithm
    options: Options
    sets: list[int]
    checks: OutputChecks

    def find(self, set_N: torch.Tensor) -> torch.Tensor:
        """Return which rows or tokens, with these numbers of data sets, belong to the part, bool [N]."""
        return torch.isin(set_N, torch.tensor(self.sets, device=set_N.device))


def load_mixed(config: GRPOConfig) -> tuple[Algorithm, Options]:
    """Return the algorithm of the trial and its options; one algorithm for all data sets without a mixture.

    Raises ConfigError.
    """
    algorithm, options = load_algorithm(config)
    name, mix = config.actor.algorithm, config.train_dataset.mix
    own = {number for number, one in enumerate(mix.values(), 1) if one.algorithm}
    if not own:
        return algorithm, options
    rest = [number for number in range(len(mix) + 1) if number not in own]
    parts = [Part(name, algorithm, options, rest, OutputChecks(name))]
    for number, (key, one) in enumerate(mix.items(), 1):
        if number in own:
            option = f"train_dataset.mix.{key}.algorithm"
            loaded, its_options = load_algorithm(make_set_config(config, key), option)
            _check_part(option, one.algorithm, loaded, algorithm)
            checks = OutputChecks(one.algorithm, option)
            parts.append(Part(one.algorithm, loaded, its_options, [number], checks))
    return combine(parts), options


def _check_part(option: str, name: str, algorithm: Algorithm, first: Algorithm) -> None:
    """Raise ConfigError for an algorithm that needs more than the rows of its data set."""
    why = ""
    if algorithm.select_tokens is not None:
        why = "can't be used for one data set: it selects tokens of the whole batch"
    elif algorithm.logprob_temperature != first.logprob_temperature:
        why = "can't be used for one data set: it recomputes log-probabilities at another temperature"
    elif missing := sorted(algorithm.needs - first.needs):
        why = f"needs {', '.join(missing)}, which actor.algorithm does not use"
    if why:
        raise ConfigError(
            Refusal(option=option, value=name, kind=Kind.UNSUPPORTED, why=why, related=("actor.algorithm",))
        )


def combine(parts: Sequence[Part]) -> Algorithm:
    """Return one algorithm that calls the algorithm of each row; its options are the first part's.

    Its batches have `set_B` and `set_T`. All functions raise ConfigError as OutputChecks does.
    """
    first = parts[0]

    def split(batch: RewardBatch) -> Iterator[tuple[Part, torch.Tensor, RewardBatch]]:
        """Yield each part with rows, their numbers, and their batch."""
        assert batch.set_B is not None, "the data set of each row is known"
        for part in parts:
            rows_N = part.find(batch.set_B).nonzero().flatten()
            if len(rows_N):
                yield part, rows_N, batch.select(rows_N)

    def penalize_lengths(batch: RewardBatch, options: Any) -> torch.Tensor:
        penalty_B = torch.zeros(len(batch.rewards_B))
        for part, rows_N, own in split(batch):
            found = part.algorithm.penalize_lengths(own, part.options)
            penalty_B[rows_N] = part.checks.check_tensor("penalize_lengths", found, rows_N.shape, "[B]")
        return penalty_B

    def compute_credit(batch: RewardBatch, options: Any) -> torch.Tensor:
        credit_BT = torch.zeros(batch.mask_BT.shape)
        for part, rows_N, own in split(batch):
            found = part.algorithm.compute_credit(own, part.options)
            shape = own.mask_BT.shape
            credit_BT[rows_N] = part.checks.check_tensor(
                "compute_credit", found, shape, "[B, T]", inputs=own.list_inputs()
            )
        return credit_BT

    def make_selection(name: str) -> Callable[[RewardBatch, Any], list[int]]:
        def select(batch: RewardBatch, options: Any) -> list[int]:
            kept: list[int] = []
            for part, rows_N, own in split(batch):
                found = getattr(part.algorithm, name)(own, part.options)
                kept += rows_N[part.checks.check_rows(name, found, len(rows_N))].tolist()
            return sorted(kept)

        return select

    def compute_loss(tokens: TokenBatch, options: Any) -> Loss:
        assert tokens.set_T is not None, "the data set of each token is known"
        parts_T: dict[str, torch.Tensor] = {}
        sums: dict[str, torch.Tensor] = {}
        for part in parts:  # also without tokens: all ranks report the same sums
            own = tokens._replace(mask_T=tokens.mask_T & part.find(tokens.set_T))
            loss = part.checks.check_loss(part.algorithm.compute_loss(own, part.options), own)
            for found, values in ((parts_T, loss.components_T), (sums, loss.sums)):
                for key, value in values.items():
                    found[key] = found[key] + value if key in found else value
        return Loss(parts_T, sums)

    return Algorithm(
        options=type(first.options),
        needs=first.algorithm.needs,
        penalize_lengths=penalize_lengths,
        select_groups=make_selection("select_groups"),
        compute_kl_rewards=first.algorithm.compute_kl_rewards,
        compute_credit=compute_credit,
        select_rows=make_selection("select_rows"),
        select_tokens=None,
        logprob_temperature=first.algorithm.logprob_temperature,
        compute_loss=compute_loss,
    )
