"""Sequences and the rows in which the embedded engine decodes them.

The tokens of a row stay in arrays until the row leaves, so a step runs no Python code per row.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from hpc_rl.servers.embedded.decoder import CacheRows
from hpc_rl.servers.embedded.model import Model
from hpc_rl.servers.wire import SamplingParams


class Event(Protocol):
    """An event that sequences may have in common."""

    def set(self) -> None:
        """Note an end. Called in the event loop."""


class _Unwatched:
    def set(self) -> None:
        pass


UNWATCHED = _Unwatched()  # for sequences that nobody waits for, or not yet


@dataclass(eq=False, slots=True)
class Sequence:
    """One unfinished sample. The engine thread owns it between submit and done."""

    ids: list[int]
    params: SamplingParams
    seed: int
    rid: str
    tokens: list[int] = field(default_factory=list)  # so far; updated by DecodeBatch.collect
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    row: int = -1
    num_retractions: int = 0
    prompt_key: bytes = b""
    cancelled: bool = False
    done: Event = UNWATCHED  # set in the event loop, after `finish`


_STATE = np.dtype(
    [
        ("length", np.int64),  # tokens in the cache
        ("pending", np.int64),  # the token to feed next
        ("made", np.int64),  # tokens generated in this row
        ("limit", np.int64),  # most tokens to generate in this row
        ("least", np.int64),  # tokens to generate before a stop token may be sampled
        ("seed", np.uint64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("stop", np.int64),  # index of the set of stop tokens
    ]
)


class DecodeBatch:
    """Rows that are decoded together. In batch-invariant mode, each sequence has its own batch (`exact`)."""

    def __init__(self, model: Model, exact: bool) -> None:
        self.model, self.exact = model, exact
        self.sequences: list[Sequence] = []
        self.rows = CacheRows(model.num_layers)
        self.state = np.zeros(0, _STATE)
        self.tokens = np.zeros((0, 0), np.int64)
        self.logprobs = np.zeros((0, 0), np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    def longest(self) -> int:
        return int(self.state["length"][: len(self)].max()) if self.sequences else 0

    def reserve(self, num_rows: int, columns: int, made: int, like: torch.Tensor | None = None) -> None:
        """Make room for rows, cache columns (needs `like` the first time) and generated tokens."""
        if num_rows > len(self.state):
            self.state = np.resize(self.state, num_rows if self.exact else max(num_rows, 2 * len(self.state)))
        have_rows, have_made = self.tokens.shape
        if num_rows > have_rows or made > have_made:
            more_rows = max(have_rows, len(self.state)) - have_rows
            more_made = 0 if made <= have_made else max(made, 2 * have_made) - have_made
            self.tokens = np.pad(self.tokens, ((0, more_rows), (0, more_made)))
            self.logprobs = np.pad(self.logprobs, ((0, more_rows), (0, more_made)))
        sample_of = self.rows.tensors[0] if self.rows.tensors else like
        assert sample_of is not None
        self.rows.reserve(num_rows, columns, sample_of, (len(self), self.longest()), self.exact)

    def join(
        self, sequences: list[Sequence], stops: list[int], lengths: list[int], pending: list[int]
    ) -> None:
        """Append rows. The caller reserves their room and writes their cache."""
        first, params = len(self.sequences), [sequence.params for sequence in sequences]
        made = [len(sequence.tokens) for sequence in sequences]
        columns: dict[str, list[Any]] = {
            "length": lengths,
            "pending": pending,
            "limit": [one.max_new_tokens - count for one, count in zip(params, made, strict=True)],
            "least": [one.min_new_tokens - count for one, count in zip(params, made, strict=True)],
            "seed": [sequence.seed for sequence in sequences],
            "temperature": [one.temperature for one in params],
            "top_k": [one.top_k if 0 < one.top_k < self.model.vocab_size else 0 for one in params],
            "top_p": [one.top_p for one in params],
            "stop": stops,
        }
        rows = slice(first, first + len(sequences))
        self.state["made"][rows] = 0
        for name, values in columns.items():
            self.state[name][rows] = values
        for row, sequence in enumerate(sequences, first):
            sequence.row = row
        self.sequences += sequences

    def leave(self, leaving: list[int]) -> None:
        """Remove rows; the last rows fill the holes."""
        keep = len(self) - len(leaving)
        gone = set(leaving)
        holes = [row for row in leaving if row < keep]
        movers = [row for row in range(keep, len(self)) if row not in gone]
        for row in leaving:
            self.sequences[row].row = -1
        if holes:
            columns = int(self.state["length"][movers].max())
            self.rows.copy(movers, holes, columns)
            for array in (self.state, self.tokens, self.logprobs):
                array[holes] = array[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self.sequences[hole] = self.sequences[mover]
                self.sequences[hole].row = hole
        del self.sequences[keep:]

    def collect(self, row: int, version: str) -> Sequence:
        """Move the tokens of a row into its sequence. The row may continue."""
        sequence, state = self.sequences[row], self.state[row]
        self.close_span(row, version)
        made = int(state["made"])
        sequence.tokens += self.tokens[row, :made].tolist()
        sequence.logprobs += self.logprobs[row, :made].tolist()
        for name in ("limit", "least", "made"):
            state[name] -= made
        return sequence

    def close_span(self, row: int, version: str) -> None:
        """Record that the tokens since the last span came from `version`."""
        sequence = self.sequences[row]
        start = sequence.spans[-1][2] if sequence.spans else 0
        end = len(sequence.tokens) + int(self.state["made"][row])
        if end <= start:
            return
        if sequence.spans and sequence.spans[-1][0] == version:
            start = sequence.spans.pop()[1]
        sequence.spans.append((version, start, end))
