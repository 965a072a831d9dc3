"""The teacher of a distillation: it adds its log-probabilities to finished trajectories.

The batch log stores them with the trajectory, so a sealed batch asks the teacher nothing again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpc_rl.config.options.distillation import DistillationConfig
from hpc_rl.config.row_shapes import get_messages
from hpc_rl.config.text_templates import fill_template
from hpc_rl.core.types import TokenLogprobs, Trajectory, TrajectoryGroup
from hpc_rl.datasets.encode import encode_prompt, find_question
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.pipes import RunPrompt
from hpc_rl.rollout.rewards import Rejection


class ScoringPool(Protocol):
    """Gives log-probabilities of given tokens: ServerPool, or servers.external.Endpoint."""

    async def compute_logprobs(
        self, inputs: list[list[int]], starts: list[int], top_k: int = 0, min_version: str = ""
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens of each input from its start on."""


@dataclass(frozen=True)
class Demonstration:
    """What the teacher's prompt has in addition to the policy's."""

    column: str
    template: str
    tokenizer: Tokenizer

    def encode(self, row: Mapping[str, Any]) -> list[int]:
        """Return the teacher's prompt. Raises Rejection without a demonstration, ConfigError."""
        if not row.get(self.column):
            message = f"the row has no demonstration in the column {self.column}"
            raise Rejection(RejectReason.BAD_GROUP, message)
        question, earlier = find_question(dict(row))
        values = {**row, "question": question, "demonstration": row[self.column]}
        text = fill_template(self.template, values)
        if get_messages(dict(row)) is None:
            return encode_prompt(self.tokenizer, {"prompt": text})
        return encode_prompt(self.tokenizer, {"messages": [*earlier, {"role": "user", "content": text}]})


@dataclass(frozen=True)
class Teacher:
    """The teacher's pool; `follows_trainer` if its servers have the policy's own weights."""

    pool: ScoringPool
    demonstration: Demonstration | None = None
    follows_trainer: bool = False

    async def score(self, group: TrajectoryGroup, prompt: RunPrompt) -> None:
        """Add the teacher's log-probabilities to the trajectories that lack them. Raises Rejection."""
        rows = [one for one in group.trajectories if one.teacher_logprobs is None]
        for row in rows:
            row.teacher_logprobs = np.zeros(len(row.ids), np.float32)
        rows = [row for row in rows if row.loss_mask[1:].any()]  # nothing is before the first token
        if not rows:
            return
        own = prompt["input_ids"]
        shown = own if self.demonstration is None else self.demonstration.encode(prompt["columns"])
        inputs, starts = [], []
        for row in rows:
            if self.demonstration is not None and row.ids[: len(own)].tolist() != own:
                message = "a demonstration needs trajectories that begin with the prompt of the row"
                raise Rejection(RejectReason.BAD_GROUP, message)
            first = max(1, int(row.loss_mask.argmax()))
            inputs.append([*shown, *row.ids[len(own) :].tolist()])
            starts.append(max(1, first + len(shown) - len(own)))
        version = prompt["version"] if self.follows_trainer else ""
        scores = await self.pool.compute_logprobs(inputs, starts, min_version=version)
        for row, one in zip(rows, scores, strict=True):
            row.teacher_logprobs = _place(one.logprobs, row)


def _place(logprobs: list[float], row: Trajectory) -> np.ndarray:
    """Return float32 [L] with the last values at the last tokens, 0 where the model made no token."""
    values = np.zeros(len(row.ids), np.float32)
    values[len(row.ids) - len(logprobs) :] = logprobs
    return np.where(row.loss_mask, values, np.float32(0))


def make_demonstration(section: DistillationConfig, tokenizer: Tokenizer) -> Demonstration | None:
    if section.demonstration_column is None:
        return None
    return Demonstration(section.demonstration_column, section.demonstration_template, tokenizer)
