"""The training prompts of a trial: which row each prompt index has.

A draw depends only on the seed and on what the batch log records: the earlier draws, and the mean reward of
each row's latest group in a batch. The batch log records the draw too, so a prompt index keeps its row.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from hpc_rl.config.options.dataset import PromptDatasetConfig
from hpc_rl.config.row_shapes import find_weight
from hpc_rl.core.errors import ConfigError
from hpc_rl.datasets.encode import Prompt, Prompts
from hpc_rl.datasets.order import choose_set, is_drawn, order_by_weight
from hpc_rl.datasets.rows import Draw, RowKey, combine_fingerprints, name_in_errors
from hpc_rl.datasets.tokenizer import Tokenizer

MAIN = "main"
SET_COLUMN = "data_set"


class Curriculum:
    """The prompts of one or several data sets, and the row of each prompt index.

    Without a dataset there are no prompts; the trial then trains on environments only.
    """

    def __init__(self, dataset: PromptDatasetConfig | None, tokenizer: Tokenizer, seed: int) -> None:
        self.seed, self._dataset = seed, dataset
        if dataset is None:
            self.parts = [Prompts(None, tokenizer, seed)]
            return
        self.parts = [Prompts(one, tokenizer, seed) for one in dataset.parts.values()]
        self._names = [MAIN, *dataset.mix]
        self._shares = dataset.shares
        self._order_by_weight = lru_cache(maxsize=2 * len(self.parts))(self._compute_weighted_order)
        if dataset.curriculum == "weights":
            self._weights = [_load_weights(part, dataset.weight_column) for part in self.parts]

    @property
    def path(self) -> str:
        return self.parts[0].path

    @property
    def fingerprint(self) -> dict[str, Any]:
        return combine_fingerprints([part.rows.fingerprint for part in self.parts])

    def __len__(self) -> int:
        """Return the number of prompts in one epoch: the rows of all data sets."""
        return sum(map(len, self.parts))

    def draw(self, index: int, next_visits: Mapping[int, int], rates: Mapping[RowKey, float]) -> Draw:
        """Return the row of a new prompt index.

        `next_visits` has the next visit of each data set after the draws so far, `rates` the mean reward of
        the latest group of each row.
        """
        assert self._dataset is not None, "a trial without a dataset issues no prompts"
        part, visit = choose_set(index, self._shares)
        match self._dataset.curriculum:
            case "weights":
                epoch, position = divmod(visit, len(self.parts[part]))
                return Draw(part, int(self._order_by_weight(part, epoch)[position]), visit)
            case "band":
                return self._draw_by_band(part, max(visit, next_visits.get(part, 0)), rates)
            case _:
                return Draw(part, self.parts[part].locate(visit)[1], visit)

    def get(self, draw: Draw) -> Prompt:
        """Return the prompt of a draw. Raises ConfigError for a row that can't be encoded."""
        assert self._dataset is not None
        prompts = self.parts[draw.part]
        # with weights a row may have several visits in an epoch
        epoch = draw.visit if self._dataset.curriculum == "weights" else draw.visit // len(prompts)
        prompt = prompts.get(epoch, draw.row)
        if len(self.parts) == 1:
            return prompt
        return replace(prompt, columns={**prompt.columns, SET_COLUMN: self._names[draw.part]})

    def _draw_by_band(self, part: int, visit: int, rates: Mapping[RowKey, float]) -> Draw:
        """Return the first visit from this one on that is not skipped."""
        assert self._dataset is not None
        low, high = self._dataset.pass_band
        while True:
            row = self.parts[part].locate(visit)[1]
            rate = rates.get((part, row))
            if rate is None or low <= rate <= high:
                break
            if is_drawn(self._dataset.outside_share, self.seed, part, visit):
                break
            visit += 1
        return Draw(part, row, visit)

    def _compute_weighted_order(self, part: int, epoch: int) -> np.ndarray:
        """Return the rows of a data set's epoch, int64 [N]."""
        prompts = self.parts[part]
        positions = order_by_weight(self.seed, epoch, self._weights[part], prompts.shuffle)
        return np.array(prompts.kept)[positions]


def _load_weights(prompts: Prompts, column: str) -> np.ndarray:
    """Return the weights of the rows that are kept, float64 [N], of which the largest is 1.

    Raises ConfigError.
    """
    weights_N = np.empty(len(prompts))
    for position, row in enumerate(prompts.kept):
        with name_in_errors(prompts.path, row):
            weights_N[position] = find_weight(prompts.rows[row], column)
    if not weights_N.any():
        raise ConfigError(
            f"dataset {prompts.path}: the column {column} is 0 in every row, so no row would be drawn. "
            "Give some rows a weight above 0."
        )
    return weights_N / weights_N.max()  # else the sum of very large ones, or its inverse, is infinite
