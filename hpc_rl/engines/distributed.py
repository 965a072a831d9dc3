"""The process group of one incarnation of the trainer: rank 0 binds first and publishes what it bound, the others find it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_rl.errors import RoleFailed
from hpc_rl.net import reachable_address

SIOCGIFADDR = 0x8915  # ask Linux for an interface's IPv4 address


def init_ranks(
    rank: int,
    num_ranks: int,
    device: torch.device | str,
    publish: Callable[[str, int], None] | None = None,
    find: Callable[[], tuple[str, int]] | None = None,
    timeout_s: float = 600.0,
    join_timeout_s: float | None = None,
) -> None:
    """Join the process group: gloo on CPU, NCCL on CUDA. One rank alone needs none, and gets none.

    Rank 0 starts the store on a port that the system chooses and calls `publish(address, port)`; each other rank calls `find()`,
    which waits for that. `timeout_s` is a collective's; ranks that are not there within `join_timeout_s` (by default the same)
    raise RoleFailed in those that are. Raises TimeoutError from `find`, RuntimeError (DistStoreError) without the store.
    """
    if num_ranks == 1:
        return
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        assert publish is not None, "rank 0 needs a way to publish the store's address"
        address = reachable_address().strip("[]")
        store = dist.TCPStore(address, 0, num_ranks, is_master=True, timeout=timeout, wait_for_workers=False)
        publish(address, store.port)
    else:
        assert find is not None, "ranks above 0 need a way to find the store"
        address, port = find()
        store = dist.TCPStore(
            address, port, num_ranks, is_master=False, timeout=timeout, wait_for_workers=False
        )
    _wait_for_all(store, num_ranks, timeout_s if join_timeout_s is None else join_timeout_s)
    _join(store, rank, num_ranks, torch.device(device), timeout, address)


def init_alone(device: torch.device | str) -> None:
    """A process group of this process only, for what exists only with one."""
    dist.init_process_group(_backend(torch.device(device)), store=dist.HashStore(), rank=0, world_size=1)


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_all(store: dist.Store, num_ranks: int, timeout_s: float) -> None:
    """A rank that hangs before it joins must not cost the hours that a collective may take."""
    if store.add("joined", 1) == num_ranks:
        store.set("all joined", "")
    try:
        store.wait(["all joined"], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        joined = store.add("joined", 0)
        raise RoleFailed(
            f"{joined} of {num_ranks} ranks came within {timeout_s:g} s; the logs of the others say why"
        ) from error


def _join(
    store: dist.Store, rank: int, num_ranks: int, device: torch.device, timeout: timedelta, address: str
) -> None:
    if device.type == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo would bind to what the host's own name resolves to, which is loopback on many systems
        interface = _interface_of(reachable_address(address))
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(_backend(device), store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address, None where there is none (or it is an IPv6 address)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                found = socket.inet_ntoa(fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)[20:24])
            except OSError:
                continue  # an interface without an IPv4 address
            if found == address:
                return name
    return None
