"""The process group of a trainer and one generation server, and the buckets of weights that it carries.

Rank 0 is the trainer's first rank, the other ranks belong to the server. Each server has a group of its own:
a server that joins, dies or hangs changes no other group. The group is outside of torch's global state, so it
can be aborted at any time. Its keys in the store are those of SGLang's `init_custom_process_group`, so SGLang
and vLLM join with their own code.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from hpc_rl.core import net

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # in the keys of torch's groups
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class Bucket:
    """Whole tensors that travel as one: their bytes follow each other, as in SGLang's `flattened_bucket`."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # as torch names them, without `torch.`
    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> int:
        return sum(self._list_sizes())

    def _list_sizes(self) -> list[int]:
        pairs = zip(self.dtypes, self.shapes, strict=True)
        return [getattr(torch, dtype).itemsize * math.prod(shape) for dtype, shape in pairs]

    def split(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a bucket, uint8 [num_bytes], as views."""
        parts = flat.split(self._list_sizes())
        for name, dtype, shape, part in zip(self.names, self.dtypes, self.shapes, parts, strict=True):
            yield name, part.view(getattr(torch, dtype)).view(shape)

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Bucket:
        """Return the bucket of a request. Raises ValueError."""
        try:
            names, dtypes, shapes = body["names"], body["dtypes"], body["shapes"]
            bucket = cls(
                tuple(map(str, names)), tuple(dtypes), tuple(tuple(map(int, shape)) for shape in shapes)
            )
            known = all(isinstance(getattr(torch, dtype, None), torch.dtype) for dtype in dtypes)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"names, dtypes and shapes must be lists: {error!r}") from error
        if not known or not len(names) == len(dtypes) == len(shapes) > 0:
            raise ValueError("names, dtypes and shapes must have one entry for each tensor")
        return bucket


def open_store(address: str, timeout_s: float) -> TCPStore:
    """Open the store of the groups on a free port of this address. Only the trainer's rank 0 does."""
    listener = net.bind_published(address) if ":" in address else net.bind(address)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """Return a connection to the trainer's store. Raises RuntimeError."""
    # a port where nothing listens would cost the whole time limit
    socket.create_connection((address, port), timeout=timeout_s).close()
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class WeightGroup:
    """The group in one process. Its methods may be called from any thread, one at a time."""

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        size: int,
        name: str,
        *,
        backend: str = "gloo",
        device: torch.device | None = None,
        address: str = "",
        timeout_s: float,
    ) -> None:
        """Join the group; gloo waits for all members, and binds to `address`. Raises RuntimeError.

        NCCL uses the GPU `device`, and waits for the members in the first transfer.
        """
        self.name = name
        self.device = torch.device("cpu") if backend == "gloo" or device is None else device
        self._timeout = timedelta(seconds=timeout_s)
        keys = PrefixStore(f"{_DEVICES[backend]}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._store = keys  # the group uses it
        self._stream = None
        if backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()
            gloo._timeout, gloo._threads = self._timeout, 1
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._group: Any = dist.ProcessGroupGloo(keys, rank, size, gloo)
        else:
            self._group = _open_nccl(keys, rank, size, self._timeout)
            self._stream = torch.cuda.Stream(device)  # waits for nothing that training does

    def broadcast(self, flat: torch.Tensor) -> Any:
        """Begin to broadcast from rank 0; return torch's Work. Raises RuntimeError.

        `flat` is on the group's device.
        """
        if self._group is None:
            raise RuntimeError(f"the process group {self.name} is closed")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._timeout
        options.asyncOp = True
        with torch.cuda.stream(self._stream):
            return self._group.broadcast([flat], options)

    def limit(self, timeout_s: float) -> None:
        """Change the time limit of the transfers that follow."""
        self._timeout = timedelta(seconds=timeout_s)

    def close(self) -> None:
        """Leave at once: a transfer that is running fails, here and in the other members."""
        if self._group is not None:
            group, self._group = self._group, None
            group.abort()


def _open_nccl(keys: PrefixStore, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = False
    options._timeout = timeout
    # torch would end this process after the loss of a server
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "0"
    try:
        return dist.ProcessGroupNCCL(keys, rank, size, options)
    finally:
        os.environ.pop(_NCCL_ERRORS)
        if before is not None:
            os.environ[_NCCL_ERRORS] = before


def make_body(bucket: Bucket, name: str, label: str, last: bool, keep_cache: bool) -> dict[str, Any]:
    """Return SGLang's request for one bucket. The last one has the label, and drops the cache."""
    return {
        "names": bucket.names,
        "dtypes": bucket.dtypes,
        "shapes": bucket.shapes,
        "group_name": name,
        "load_format": "flattened_bucket",
        "flush_cache": last and not keep_cache,
        "weight_version": label if last else None,
    }


def pack(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[Bucket, torch.Tensor]:
    """Return a bucket of these tensors, and its bytes."""
    bucket = Bucket(
        tuple(name for name, _ in tensors),
        tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors),
        tuple(tuple(tensor.shape) for _, tensor in tensors),
    )
    return bucket, torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in tensors])
