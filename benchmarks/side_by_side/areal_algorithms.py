"""Packing and generalized advantage estimation against the algorithms that AReaL uses, in this process.

AReaL is no package, so the algorithms are written here: its first-fit-decreasing packing, and a loop over the
columns of a batch that carries the advantage over unmasked tokens.
"""

import time
from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpc_rl.algorithms.rewards import compute_gae
from hpc_rl.engines.shared.packing import pack

CAPACITY = 32768
NUM_ROWS, NUM_TOKENS = 64, 1024
DISCOUNT, GAE_LAMBDA = 0.99, 0.95
MAX_ERROR = 1e-4


def pack_as_peer(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return groups of rows, the longest row first.

    A row opens a group if even the emptiest has no room. Otherwise it goes into the group with the fewest rows
    among those with room, and of these into the one with the least tokens.
    """
    groups: list[list[int]] = []
    sums: list[tuple[int, int]] = []  # tokens and group, ascending
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        if not sums or sums[0][0] + length > capacity:
            insort(sums, (length, len(groups)))
            groups.append([row])
            continue
        counts = [
            len(groups[group]) for _, group in sums[: bisect_right(sums, (capacity - length, len(groups)))]
        ]
        tokens, group = sums.pop(counts.index(min(counts)))
        groups[group].append(row)
        insort(sums, (tokens + length, group))
    return sorted(sorted(group) for group in groups)


def loop_gae(rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return advantages at masked tokens, from the last column back; a token that is not masked changes nothing."""
    mask = mask_BT.float()
    advantage, value = torch.zeros(len(mask)), torch.zeros(len(mask))
    columns = []
    for t in reversed(range(mask.shape[1])):
        delta = rewards_BT[:, t] + DISCOUNT * value - values_BT[:, t]
        found = delta + DISCOUNT * GAE_LAMBDA * advantage
        advantage = advantage * (1 - mask[:, t]) + found * mask[:, t]
        value = value * (1 - mask[:, t]) + values_BT[:, t] * mask[:, t]
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1) * mask


def make_lengths(num_rows: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    return np.clip(draw.lognormal(7.6, 0.9, num_rows), 16, CAPACITY).astype(np.int64)


def make_masks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    position_T = torch.arange(NUM_TOKENS)
    length_B1 = torch.randint(64, NUM_TOKENS, (NUM_ROWS, 1), generator=generator)
    return {
        "one run": position_T < length_B1,
        "random 70 %": torch.rand(NUM_ROWS, NUM_TOKENS, generator=generator) < 0.7,
        "turns": (position_T // 64 % 2 == 0).expand(NUM_ROWS, NUM_TOKENS).contiguous(),
    }


def time_cpu(does: Callable[[], Any], repetitions: int) -> float:
    """Return the mean CPU seconds of a call."""
    begun = time.process_time()
    for _ in range(repetitions):
        does()
    return (time.process_time() - begun) / repetitions


def compare(
    pairs: int, peer: Callable[[], Any], ours: Callable[[], Any], repetitions: int
) -> list[dict[str, float]]:
    """Return CPU seconds of both sides, alternately; the first pair warms up."""
    rows = []
    for number in range(pairs + 1):
        sides = {"peer": peer, "ours": ours}
        order = ("ours", "peer") if number % 2 else ("peer", "ours")
        rows.append({side: time_cpu(sides[side], repetitions) for side in order})
    return rows[1:]


def measure_packing(pairs: int, num_rows: int) -> dict[str, Any]:
    lengths = make_lengths(num_rows)
    ours, peer = pack(lengths, CAPACITY), pack_as_peer(lengths, CAPACITY)
    assert sorted(row for group in ours for row in group) == list(range(num_rows))
    assert all(lengths[group].sum() <= CAPACITY for group in ours) and len(ours) <= len(peer)
    rows = compare(pairs, lambda: pack_as_peer(lengths, CAPACITY), lambda: pack(lengths, CAPACITY), 1)
    return {"pairs": rows, "groups": {"ours": len(ours), "peer": len(peer)}}


def measure_gae(pairs: int, mask: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    mask_BT = make_masks()[mask]
    rewards_BT = torch.randn(NUM_ROWS, NUM_TOKENS, generator=generator) * mask_BT
    values_BT = torch.randn(NUM_ROWS, NUM_TOKENS, generator=generator)

    def ours() -> torch.Tensor:
        return compute_gae(rewards_BT, mask_BT, DISCOUNT, GAE_LAMBDA, values_BT)

    error = float((ours() - loop_gae(rewards_BT, values_BT, mask_BT)).abs().max())
    assert error <= MAX_ERROR, error
    rows = compare(pairs, lambda: loop_gae(rewards_BT, values_BT, mask_BT), ours, 10)
    return {"pairs": rows, "largest_error": error}
