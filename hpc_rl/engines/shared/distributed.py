"""The process group of a trainer incarnation: rank 0 binds a port and publishes it, the others find it."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.net import find_interface


def init_ranks(
    rank: int,
    num_ranks: int,
    device: torch.device | str,
    publish: Callable[[str, int], None],
    find: Callable[[], tuple[str, int]],
    timeout_s: float = 600.0,
    join_timeout_s: float | None = None,
    address: str = "127.0.0.1",
) -> dist.Store | None:
    """Join the process group (gloo on CPU, NCCL on CUDA); return its store, or None for a single rank.

    Rank 0 starts the store on a free port and passes `address` and port to `publish`. The other ranks wait
    for them in `find`, which may raise TimeoutError. `timeout_s` limits a collective, `join_timeout_s` (by
    default the same) the time until all ranks have joined.

    Raises RoleFailed if ranks are missing after `join_timeout_s`, RuntimeError (DistStoreError) if the store
    can't be reached.
    """
    if num_ranks == 1:
        return None
    device, timeout = torch.device(device), timedelta(seconds=timeout_s)
    first = rank == 0
    host, port = (address, 0) if first else find()
    store = dist.TCPStore(host, port, num_ranks, is_master=first, timeout=timeout, wait_for_workers=False)
    if first:
        publish(address, store.port)
    _wait_for_all(store, num_ranks, timeout_s if join_timeout_s is None else join_timeout_s)
    if device.type == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo would bind to the address of the host's own name, which is loopback on many systems
        if interface := find_interface(address):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    elif device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _choose_backend(device), store=store, rank=rank, world_size=num_ranks, timeout=timeout
    )
    return store


def init_alone(device: torch.device | str) -> None:
    """Make a process group of this process only. FSDP needs one."""
    dist.init_process_group(
        _choose_backend(torch.device(device)), store=dist.HashStore(), rank=0, world_size=1
    )


def shutdown() -> None:
    """Leave the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_all(store: dist.Store, num_ranks: int, timeout_s: float) -> None:
    # otherwise a rank that hangs before it joins would block the others for the long limit of a collective
    if store.add("joined", 1) == num_ranks:
        store.set("all joined", "")
    try:
        store.wait(["all joined"], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        joined = store.add("joined", 0)
        raise RoleFailed(
            f"only {joined} of {num_ranks} trainer ranks started within {timeout_s:g} s; see their logs"
        ) from error


def _choose_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
