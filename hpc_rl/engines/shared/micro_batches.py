"""Converts ragged rows to the tensors of one forward pass, and results to the flat `MicroBatch` of losses.

Two layouts with equal results:
- padded: rows of similar length, padded on the right. Causal attention never sees the padding, so no mask is
  needed;
- packed: rows one after another in a single row, with restarting position ids and the end of each row
  (attention.py).

The last token of a row is an input only if something is predicted from it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hpc_rl.config.options.training import MicroBatchSpec
from hpc_rl.engines.base import MicroBatch, Sequences, sum_over_data_ranks
from hpc_rl.engines.shared.attention import Layout, PackedRows
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.packing import (
    PASS_TOKENS,
    PASS_TOKENS_OF_RANKS,
    Groups,
    make_length_buckets,
    pack,
)

# longest row of padding in the packed layout, short enough for every model
PADDING_ROW = 1024


@dataclass
class Inputs:
    """Model inputs [B, W]. Token `wanted_N[n]` is predicted at position `source_N[n]`.

    With a column `top_ids`, targets_N is [N, 1 + K]: the token and the column's tokens.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None  # None: 0, 1, 2, … in every row
    source_N: torch.Tensor  # index into the flattened [B * W]
    targets_N: torch.Tensor
    wanted_N: torch.Tensor
    num_tokens: int  # T
    rows: PackedRows | None = None  # packed layout only
    temperature_N: torch.Tensor | None = None  # from a column `temperature`

    def flat(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return [T], or [T, K], with the values at the wanted tokens and 0 elsewhere."""
        return values_N.new_zeros(self.num_tokens, *values_N.shape[1:]).index_copy(0, self.wanted_N, values_N)


def cut(rows: Sequences, layout: Layout, spec: MicroBatchSpec, pass_tokens: int = PASS_TOKENS) -> Groups:
    """Cut rows into the groups of micro-batches; `granularity` neighbours stay together.

    `pass_tokens` is the cost of one more micro-batch, as in `make_length_buckets`. Raises ValueError if a
    row, or neighbours together, have more than `max_tokens_per_mb` tokens.
    """
    granularity, max_tokens, n_mbs = spec.granularity, spec.max_tokens_per_mb, spec.n_mbs or 1
    max_blocks = spec.max_seqs_per_mb and spec.max_seqs_per_mb // granularity
    together = [range(len(rows))[first : first + granularity] for first in range(0, len(rows), granularity)]
    lengths = [[len(rows.ids[row]) for row in block] for block in together]
    if layout == "packed":
        blocks = pack([sum(block) for block in lengths], max_tokens, n_mbs, max_blocks)
    else:
        padded = [max(block) * granularity for block in lengths]
        blocks = make_length_buckets(padded, max_tokens, n_mbs, max_blocks, pass_tokens)
    return [[row for block in group for row in together[block]] for group in blocks]


def share_rounds(
    rows: Sequences, layout: Layout, spec: MicroBatchSpec, mesh: Mesh, multiple: int = 1
) -> tuple[Groups, int]:
    """Return this data rank's groups and the number of rows of all ranks. Collective.

    All ranks get the same number of groups, at least one and a multiple of `multiple`; some groups may be
    empty. Raises ValueError on every rank if a row of any rank does not fit.
    """
    groups: Groups = []
    refused = ""
    try:
        groups = cut(rows, layout, spec, PASS_TOKENS if mesh.num_ranks == 1 else PASS_TOKENS_OF_RANKS)
    except ValueError as error:
        refused = str(error)
    mine = [0.0] * mesh.num_data_ranks
    mine[mesh.data_rank] = float(len(groups))
    numbers = [float(len(rows)), float(bool(refused)), *mine]
    total_rows, num_refused, *counts = sum_over_data_ranks(mesh, numbers)
    if num_refused:
        raise ValueError(refused or "a row of another rank is longer than max_tokens_per_mb")
    most = -(-max(1, int(max(counts))) // multiple) * multiple
    return groups + [[] for _ in range(most - len(groups))], int(total_rows)


def make_inputs(
    rows: Sequences,
    group: list[int],
    layout: Layout,
    device: torch.device,
    shift: int = 1,
    pad_to: int = 0,
    pin_memory: bool = False,
    context: tuple[int, int] = (0, 1),
) -> Inputs:
    """Return model inputs for the rows of one group; without rows a single token, for the collectives.

    The wanted tokens are the ones that the bool column `loss_mask` selects (by default all), except the first
    of each row. They get the values of a column `temperature`.

    Args:
        rows: All rows of this rank.
        group: The rows of this group.
        layout: The layout of the inputs.
        device: The device of the inputs.
        shift: 1 predicts a token at the token before it, 0 at the token itself (score models).
        pad_to: Add unused tokens up to this number.
        pin_memory: Copy through page-locked memory.
        context: (rank, number of ranks) that share the tokens of a packed row in equal parts. The wanted
            tokens are then the ones whose source is in the rank's part.
    """
    lengths = np.array([len(rows.ids[row]) for row in group], dtype=np.int64)
    ids_T = np.concatenate([np.zeros(0, dtype=np.int64), *(rows.ids[row] for row in group)])
    row_T = np.repeat(np.arange(len(group)), lengths)
    starts = np.cumsum(lengths) - lengths
    place_T = np.arange(len(ids_T)) - starts[row_T]
    width = max(int(lengths.max(initial=0)) - shift, 1)
    fed_T = place_T < lengths[row_T] - shift
    wanted_T = place_T >= shift
    if "loss_mask" in rows.columns:
        wanted_T &= _gather_column(rows, "loss_mask", group).astype(bool, copy=False)
    if layout == "padded":
        before_T = row_T * width
        input_ids = np.zeros((max(len(group), pad_to // width, 1), width), dtype=np.int64)
        input_ids[row_T[fed_T], place_T[fed_T]] = ids_T[fed_T]
        positions = lengths_R = None
    else:
        fed_lengths = np.maximum(lengths - shift, 0)
        before_T = (np.cumsum(fed_lengths) - fed_lengths)[row_T]
        padding = max(pad_to - int(fed_T.sum()), 0 if fed_T.any() else 1)
        padding += -(int(fed_T.sum()) + padding) % context[1]
        input_ids = np.concatenate([ids_T[fed_T], np.zeros(padding, dtype=np.int64)])[None]
        positions = np.concatenate([place_T[fed_T], np.arange(padding) % PADDING_ROW])[None]
        whole, rest = divmod(padding, PADDING_ROW)
        lengths_R = np.concatenate([fed_lengths, np.full(whole, PADDING_ROW), [rest]])
        lengths_R = lengths_R[lengths_R > 0]
    wanted_N = np.flatnonzero(wanted_T)
    source_N = (before_T + place_T - shift)[wanted_N]
    if positions is not None and context[1] > 1:
        length = positions.shape[1] // context[1]
        part = slice(context[0] * length, (context[0] + 1) * length)
        input_ids, positions = input_ids[:, part], positions[:, part]
        here_N = source_N // length == context[0]
        wanted_N, source_N = wanted_N[here_N], source_N[here_N] - part.start

    targets_N = ids_T[wanted_N]
    if "top_ids" in rows.columns:
        targets_N = np.column_stack([targets_N, _gather_column(rows, "top_ids", group)[wanted_N]])

    def move(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if pin_memory else tensor).to(device, non_blocking=True)

    return Inputs(
        move(input_ids),
        None if positions is None else move(positions),
        move(source_N),
        move(targets_N),
        move(wanted_N),
        len(ids_T),
        None if lengths_R is None else _make_packed_rows(lengths_R, move),
        move(_gather_column(rows, "temperature", group)[wanted_N]) if "temperature" in rows.columns else None,
    )


def _make_packed_rows(lengths_R: np.ndarray, move: Callable[[np.ndarray], torch.Tensor]) -> PackedRows:
    ends = np.concatenate([[0], np.cumsum(lengths_R)]).astype(np.int32)
    return PackedRows(move(ends), int(lengths_R.max()), tuple(lengths_R.tolist()))


def make_micro_batch(
    rows: Sequences, group: list[int], inputs: Inputs, logprobs_N: torch.Tensor, entropy_N: torch.Tensor
) -> MicroBatch:
    """Return the input of the loss function for a group."""
    device = logprobs_N.device
    columns = {
        name: torch.from_numpy(_gather_column(rows, name, group)).to(device, non_blocking=True)
        for name in rows.columns
    }
    row_T = np.repeat(np.arange(len(group)), [len(rows.ids[row]) for row in group])
    logprobs_T, top_TK = inputs.flat(logprobs_N), None
    if logprobs_T.ndim == 2:
        logprobs_T, top_TK = logprobs_T[:, 0], logprobs_T[:, 1:]
    return MicroBatch(logprobs_T, inputs.flat(entropy_N), columns, torch.from_numpy(row_T).to(device), top_TK)


def _gather_column(rows: Sequences, name: str, group: list[int]) -> np.ndarray:
    values = rows.columns[name]
    dtype = bool if name.endswith("mask") else np.int64 if name == "top_ids" else np.float32
    if not group:  # without values, the name decides the type
        return np.zeros((0, 1) if name.startswith("top_") else 0, dtype)
    return np.concatenate([values[row] for row in group]).astype(dtype, copy=False)
