"""The process group of a trainer and one generation server, and the buckets of weights that it carries.

Rank 0 is the trainer's first rank, the other ranks belong to the server. No two servers share a group:
a server that joins, dies or hangs changes no other group. The group is outside of torch's global state, so it
can be aborted at any time. It uses the keys of SGLang's `init_custom_process_group` in the store, so SGLang
and vLLM join with their own code.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from hpc_rl.core import net

T = TypeVar("T")
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # in the keys of torch's groups
CLOSE_POLL_S, RECEIVE_POLL_S = 0.05, 0.001
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
            raise ValueError(
                "names, dtypes and shapes must have one entry for each tensor, with dtypes of PyTorch"
            )
        at = 0
        for name, dtype, size in zip(bucket.names, dtypes, bucket._list_sizes(), strict=True):
            if at % getattr(torch, dtype).itemsize:
                raise ValueError(
                    f"names, dtypes and shapes: tensor {name} would begin at byte {at}, which is no multiple "
                    f"of the size of {dtype}"
                )
            at += size
        return bucket


async def start_in_thread(call: Callable[[], T]) -> T:
    """Return the result of a call that may block; a process can end while it blocks."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def work() -> None:
        result, problem = None, None
        try:
            result = call()
        except BaseException as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=work, daemon=True, name="process-group").start()
    return await done


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


class _Exit:
    """The end of this process. A thread that is inside of torch when Python exits aborts the process."""

    def __init__(self) -> None:
        self.lock, self.has_begun = threading.Lock(), False
        atexit.register(self.begin)

    def begin(self) -> None:
        with self.lock:
            self.has_begun = True


_EXIT = _Exit()


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
        self._stream = None
        self._work: Any = None  # the newest transfer
        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout, options._threads = self._timeout, 1
            options._devices = [gloo.create_device(hostname=address)]
            self._group: Any = gloo(keys, rank, size, options)
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
            self._work = self._group.broadcast([flat], options)
        return self._work

    def receive(self, flat: torch.Tensor) -> None:
        """Fill `flat` with the bytes from rank 0. Raises RuntimeError."""
        work = self.broadcast(flat)
        while not work.is_completed():  # see _Exit
            time.sleep(RECEIVE_POLL_S)
        work.wait()

    def limit(self, timeout_s: float) -> None:
        """Change the time limit of the transfers that follow."""
        self._timeout = timedelta(seconds=timeout_s)

    def close(self) -> None:
        """Leave; the other members notice it. Returns at once.

        NCCL aborts a transfer that is running. gloo would hold Python's lock until the end of the transfer,
        so its connections stay open until then, at most for the time limit.
        """
        if self._group is None:
            return
        # the connections close when nothing refers to the group and its transfers any more
        held, self._group, self._work = [self._work, self._group], None, None

        def is_running() -> bool:
            return held[0] is not None and not held[0].is_completed()

        def abort() -> None:
            while self.device.type == "cpu" and is_running():
                time.sleep(CLOSE_POLL_S)
            with _EXIT.lock:
                if not _EXIT.has_begun:
                    held.pop().abort()
                    held.clear()

        if is_running():
            threading.Thread(target=abort, daemon=True, name="leave-group").start()
        else:
            abort()


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
