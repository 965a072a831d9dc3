"""Ranks: what the processes of a trainer agree on between collectives of the engine. Nothing is pickled."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpc_rl import errors
from hpc_rl.engines.base import sum_over_ranks
from hpc_rl.errors import HpcRlError, RoleFailed

CHUNK_BYTES = 1 << 28  # of one broadcast: a whole batch may not fit into GPU memory next to the model


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
        answer = self._broadcast(answer)
        if "error" in answer:
            raise getattr(errors, answer["error"], RoleFailed)(answer["message"])
        return answer["value"]

    def whole(self, mine: dict[int, np.ndarray], lengths: list[int]) -> dict[int, np.ndarray]:
        """Return the rows of all ranks, float32 [lengths[i]] by row number i, from what each rank has."""
        if self.num == 1:
            return mine
        flat = np.zeros(sum(lengths), np.float32)
        ends = np.cumsum(lengths)
        for i, row in mine.items():
            flat[ends[i] - lengths[i] : ends[i]] = row
        tensor = torch.from_numpy(flat).to(_device())
        dist.all_reduce(tensor)  # all but one of the terms are 0: exact
        return dict(enumerate(np.split(tensor.cpu().numpy(), ends[:-1])))

    def bytes_from_rank0(self, make: Callable[[], bytes | None]) -> bytes | None:
        """Return what `make` returns on rank 0, as from_rank0 does, for bytes of any size or None."""
        body = b""

        def size() -> int | None:
            nonlocal body
            made = make()
            body = made or b""
            return None if made is None else len(made)

        num_bytes = self.from_rank0(size)
        if num_bytes is None or self.num == 1:
            return None if num_bytes is None else body
        whole = bytearray()
        for start in range(0, num_bytes, CHUNK_BYTES):
            part = torch.empty(min(CHUNK_BYTES, num_bytes - start), dtype=torch.uint8)
            if self.rank == 0:
                part = torch.frombuffer(bytearray(body[start : start + CHUNK_BYTES]), dtype=torch.uint8)
            part = part.to(_device())
            dist.broadcast(part, src=0)
            if self.rank:
                whole += part.cpu().numpy().tobytes()
        return bytes(whole) if self.rank else body

    def _broadcast(self, value: dict[str, Any]) -> dict[str, Any]:
        if self.num == 1:
            return value
        raw = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(raw)], dtype=torch.int64, device=_device())
        dist.broadcast(size, src=0)
        data = torch.zeros(int(size), dtype=torch.uint8, device=_device())
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        dist.broadcast(data, src=0)
        return json.loads(bytes(data.cpu().numpy()))


def _device() -> str:
    """Return the device of the process group's tensors."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
