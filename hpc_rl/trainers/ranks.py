"""Ranks: exchange of small data among the processes of a trainer. Nothing is pickled."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpc_rl.core import errors
from hpc_rl.core.errors import HpcRlError, RoleFailed
from hpc_rl.engines.base import sum_over_ranks

CHUNK_BYTES = 1 << 28  # of one broadcast; a whole batch may not fit into GPU memory in addition to the model


class Ranks:
    """The ranks of the default process group; a single rank without one."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.num = dist.get_world_size() if dist.is_initialized() else 1

    def any(self, flag: bool) -> bool:
        """Return whether any rank set the flag. Also a barrier."""
        return self.any_of(flag)[0]

    def any_of(self, *flags: bool) -> list[bool]:
        """Return, per flag, whether any rank set it."""
        return [total > 0 for total in sum_over_ranks([float(flag) for flag in flags])]

    def max(self, value: float) -> float:
        """Return the largest value of all ranks."""
        values = [0.0] * self.num
        values[self.rank] = value
        return max(sum_over_ranks(values))

    def from_rank0(self, make: Callable[[], Any]) -> Any:
        """Return on every rank the plain data that `make` returns on rank 0; all raise its HpcRlError."""
        answer: dict[str, Any] = {}
        if self.rank == 0:
            try:
                answer = {"value": make()}
            except HpcRlError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
                if self.num == 1:
                    raise
        answer = json.loads(self._broadcast(json.dumps(answer).encode()))
        if "error" in answer:
            raise getattr(errors, answer["error"], RoleFailed)(answer["message"])
        return answer["value"]

    def whole(self, mine: dict[int, np.ndarray], lengths: list[int]) -> dict[int, np.ndarray]:
        """Gather the rows of all ranks, float32 [lengths[i]] by row number i.

        No two ranks may have the same row.
        """
        if self.num == 1:
            return mine
        flat = np.zeros(sum(lengths), np.float32)
        ends = np.cumsum(lengths)
        for i, row in mine.items():
            flat[ends[i] - lengths[i] : ends[i]] = row
        tensor = torch.from_numpy(flat).to(_choose_device())
        dist.all_reduce(tensor)  # exact: only one term is not 0
        return dict(enumerate(np.split(tensor.cpu().numpy(), ends[:-1])))

    def bytes_from_rank0(self, make: Callable[[], bytes | None]) -> bytes | None:
        """As from_rank0, for bytes of any size or None."""
        body: bytes | None = None

        def make_body() -> bool:
            nonlocal body
            body = make()
            return body is not None

        return self._broadcast(body or b"") if self.from_rank0(make_body) else None

    def _broadcast(self, body: bytes) -> bytes:
        if self.num == 1:
            return body
        size = torch.tensor([len(body)], dtype=torch.int64, device=_choose_device())
        dist.broadcast(size, src=0)
        whole = bytearray(body if self.rank == 0 else int(size))
        for start in range(0, len(whole), CHUNK_BYTES):
            chunk = memoryview(whole)[start : start + CHUNK_BYTES]
            part = torch.frombuffer(chunk, dtype=torch.uint8).to(_choose_device())
            dist.broadcast(part, src=0)
            chunk[:] = part.cpu().numpy().data
        return bytes(whole)


def _choose_device() -> str:
    """Return the device of the process group's tensors."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
