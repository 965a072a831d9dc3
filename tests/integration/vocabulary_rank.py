"""One rank of test_vocabulary.py: `python vocabulary_rank.py SCENARIO RANK NUM_RANKS FOLDER`."""

import itertools
from pathlib import Path
from typing import Any

import gloo_ranks
import torch
import torch.distributed as dist

from hpc_rl.engines.shared.logprobs import Tile, token_logprobs


def scenario_parts(folder: Path, rank: int, num_ranks: int) -> None:
    """Compare a rank's part of the vocabulary with the whole, values and gradients, of one or more targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator)
    head = torch.randn(52, 16, generator=generator)
    targets = torch.randint(0, 52, (300, 3), generator=generator)
    weights = torch.randn(300, 3, generator=generator)
    part = slice(rank * 52 // num_ranks, (rank + 1) * 52 // num_ranks)

    def values_and_gradients(
        head: torch.Tensor, column: Any, tile: Tile | None, group: dist.ProcessGroup | None
    ):
        inputs = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logprobs, entropy = token_logprobs(*inputs, targets[:, column], 0.7, tile, group)
        total = (logprobs * weights[:, column]).sum() + 0.5 * (entropy * weights[:, 0]).sum()
        return (logprobs.detach(), entropy.detach(), *torch.autograd.grad(total, inputs))

    for column, tile in itertools.product((0, slice(None)), (None, Tile(7, 52), Tile(128, 52), Tile(128, 9))):
        *whole, head_gradient = values_and_gradients(head, column, None, None)
        got = values_and_gradients(head[part], column, tile, dist.group.WORLD)
        for mine, want in zip(got, (*whole, head_gradient[part]), strict=True):
            assert (mine - want).abs().max() <= 3e-6 * want.abs().max()


if __name__ == "__main__":
    gloo_ranks.main(globals())
