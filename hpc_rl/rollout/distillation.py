"""The teacher of a distillation: it adds its log-probabilities to finished trajectories, or samples them.

The batch log stores the result, so a sealed batch asks the teacher nothing again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpc_rl.config.options.distillation import DistillationConfig
from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.row_shapes import get_messages
from hpc_rl.config.text_templates import fill_template
from hpc_rl.core.types import Reply, TokenLogprobs, Trajectory, TrajectoryGroup, Turn
from hpc_rl.datasets.encode import encode_prompt, find_question
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.pipes import RunPrompt
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.rollout.server_pool import ChatPool


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
    top_k: int = 0  # likely tokens to add at each position

    async def score(self, group: TrajectoryGroup, prompt: RunPrompt) -> None:
        """Add the teacher's log-probabilities to the trajectories that lack them. Raises Rejection."""
        rows = [one for one in group.trajectories if self._lacks_scores(one)]
        for row in rows:
            self._place(TokenLogprobs([]), row)
        rows = [row for row in rows if row.loss_mask[1:].any()]  # nothing is before the first token
        if not rows:
            return
        own = prompt["input_ids"]
        shown = own if self.demonstration is None else self.demonstration.encode(prompt["columns"])
        inputs, starts = [], []
        for row in rows:
            if self.demonstration is not None and row.ids[: len(own)].tolist() != own:
                message = (
                    "a trajectory does not begin with its prompt, as a teacher with demonstrations needs"
                )
                raise Rejection(RejectReason.BAD_GROUP, message)
            first = max(1, int(row.loss_mask.argmax()))
            inputs.append([*shown, *row.ids[len(own) :].tolist()])
            starts.append(max(1, first + len(shown) - len(own)))
        version = prompt["version"] if self.follows_trainer else ""
        scores = await self.pool.compute_logprobs(inputs, starts, self.top_k, version)
        for row, one in zip(rows, scores, strict=True):
            self._place(one, row)

    def _lacks_scores(self, row: Trajectory) -> bool:
        return row.teacher_logprobs is None or (self.top_k > 0 and row.teacher_top_ids is None)

    def _place(self, scores: TokenLogprobs, row: Trajectory) -> None:
        """Store the scores of the last tokens; 0, and no likely tokens, where the model made no token."""
        length, first = len(row.ids), len(row.ids) - len(scores.logprobs)
        values = np.zeros(length, np.float32)
        values[first:] = scores.logprobs
        row.teacher_logprobs = np.where(row.loss_mask, values, np.float32(0))
        if not self.top_k:
            return
        row.teacher_top_ids = np.zeros((length, self.top_k), np.int32)
        row.teacher_top_logprobs = np.full((length, self.top_k), -np.inf, np.float32)
        for place, ids, logprobs in zip(
            range(first, length), scores.top_ids, scores.top_logprobs, strict=True
        ):
            if row.loss_mask[place]:
                row.teacher_top_ids[place, : len(ids)] = ids  # fewer than top_k of a small vocabulary
                row.teacher_top_logprobs[place, : len(ids)] = logprobs


@dataclass(frozen=True)
class TextSource:
    """An external endpoint that samples in place of the policy: its answers to chats, as the policy's tokens.

    Its model may have another tokenizer. `gconfig` has the limits of the policy.
    """

    endpoint: ChatPool
    tokenizer: Tokenizer
    gconfig: GenerationHyperparameters

    async def sample(
        self, row: Mapping[str, Any], num_prompt: int, seeds: Sequence[int], version: str
    ) -> list[Turn]:
        """Return an answer to the row's question for each seed, as tokens with this version."""
        question, earlier = find_question(dict(row))
        replies = await self.endpoint.ask([*earlier, {"role": "user", "content": question}], seeds)
        room = min(self.gconfig.max_new_tokens, self.gconfig.max_tokens - num_prompt)
        return [self._make_turn(reply, room, version) for reply in replies]

    def _make_turn(self, reply: Reply, room: int, version: str) -> Turn:
        ids = self.tokenizer.encode(reply.text, add_special_tokens=False)
        if reply.finish_reason != "length" and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        reason = "length" if len(ids) > room else reply.finish_reason
        ids = ids[: max(0, room)]
        # cross-entropy needs no log-probabilities of the teacher
        return Turn(ids, [0.0] * len(ids), [(version, 0, len(ids))], reason)


def make_demonstration(section: DistillationConfig, tokenizer: Tokenizer) -> Demonstration | None:
    if section.demonstration_column is None:
        return None
    return Demonstration(section.demonstration_column, section.demonstration_template, tokenizer)
