"""The position of a trainer rank in its parallel groups. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.core.allocation import Train


@dataclass(frozen=True)
class Mesh:
    """A rank among data x context x tensor x pipeline ranks.

    Ranks count through the tensor dimension first, then context, data and pipeline, as in Megatron-core.
    Ranks with the same `data_rank` are peers: they get the same rows. Experts are divided over other groups
    of the same ranks.
    """

    rank: int = 0
    num_ranks: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    experts: int = 1
    expert_tensor: int = 1  # tensor ranks of one expert

    @classmethod
    def of(cls, train: Train, rank: int, num_ranks: int) -> Mesh:
        """Return the position of a rank in the mesh of an allocation."""
        return cls(rank, num_ranks, train.t, train.c, train.p, train.e, train.etp)

    @property
    def num_data_ranks(self) -> int:
        return self.num_ranks // (self.tensor * self.context * self.pipeline)

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def context_rank(self) -> int:
        return self.rank // self.tensor % self.context

    @property
    def data_rank(self) -> int:
        return self.rank // (self.tensor * self.context) % self.num_data_ranks

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.tensor * self.context * self.num_data_ranks)

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank contributes to sums for all its peers."""
        return self.tensor_rank == self.context_rank == self.pipeline_rank == 0
