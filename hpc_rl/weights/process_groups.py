"""Sends weights from rank 0 of the trainer to the servers over process groups, one group for each server.

Servers join in the background; until then, they load weights from files. All joined servers get a bucket at
the same time, and the next one when all have it. A server that fails or exceeds a time limit loses its group;
the publisher then lets it load the version from files, before it resumes.

All methods run in the event loop of the publisher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed import TCPStore

from hpc_rl.core.errors import HpcRlError
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import LeaseView
from hpc_rl.servers.client import BUCKET_S, JOIN_S, HttpServerClient, PauseMode
from hpc_rl.servers.weight_group import Bucket, WeightGroup, make_body, open_store, start_in_thread

logger = logging.getLogger(__name__)
JOIN_WAIT_S = 5.0  # a publication waits so long for servers that are joining
REJOIN_S = 60.0  # after a failure
STORE_S = 24 * 3600.0  # for a key of the store; joins have other limits
LONGEST_POLL_S = 0.02
LEAVE_S = 5.0
FAILURES = (HpcRlError, TimeoutError, RuntimeError, OSError)  # torch raises RuntimeError


class BucketSource(Protocol):
    """The weights of one version, on rank 0 of the trainer."""

    buckets: list[Bucket]

    def load(self, index: int) -> torch.Tensor:
        """Gather a bucket from all ranks, uint8 in CPU memory. It is valid until the second call after it.

        Raises RuntimeError.
        """


@dataclass(eq=False)
class Member:
    """A server that has joined."""

    key: str
    epoch: int
    client: HttpServerClient
    group: WeightGroup
    paused_at: float = 0.0


@dataclass
class Sent:
    """The outcome for the servers of one version, by key. Failed servers are paused, with a mixture."""

    pauses_s: dict[str, float] = field(default_factory=dict)  # of servers that have the version
    failed: dict[str, str] = field(default_factory=dict)


class ProcessGroups:
    """The groups of one trainer."""

    def __init__(self, address: str, device: torch.device) -> None:
        """Open the store on this address of the host at the first join."""
        self._address, self._device = address, device
        self._store: TCPStore | None = None
        self._stream: torch.cuda.Stream | None = None
        self._members: dict[str, Member] = {}
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._rejoin_at: dict[str, tuple[int, float]] = {}  # key -> epoch of the failure, and a time

    def follow(
        self,
        leases: Mapping[str, LeaseView],
        connect: Callable[[str], HttpServerClient],
        busy: tuple[str, ...],
    ) -> None:
        """Begin to join new servers, and drop the groups of lost ones."""
        for key, member in list(self._members.items()):
            seen = leases.get(key)
            if seen is None or not seen.alive or seen.epoch != member.epoch:
                self._drop(key, "lost this server")
        for key, seen in leases.items():
            ready = seen.alive and seen.value.get("receiver") and seen.value.get("state") not in busy
            epoch, at = self._rejoin_at.get(key, (-1, 0.0))
            if epoch == seen.epoch and time.monotonic() < at:
                continue
            if ready and key not in self._members and key not in self._joining:
                task = asyncio.ensure_future(self._join(key, seen, connect(seen.value["url"])))
                self._joining[key] = task
                task.add_done_callback(lambda _task, key=key: self._joining.pop(key, None))  # type: ignore[misc]

    async def choose(self, targets: Mapping[str, LeaseView]) -> list[str]:
        """Return the targets that have joined. Waits a little for servers that are joining."""
        joining = [task for key, task in self._joining.items() if key in targets]
        if joining:
            await asyncio.wait(joining, timeout=JOIN_WAIT_S)
        members = self._members
        return [key for key, seen in targets.items() if key in members and members[key].epoch == seen.epoch]

    async def send(self, keys: list[str], label: str, source: BucketSource, mode: PauseMode) -> Sent:
        """Pause these servers, send the version, resume; servers that fail stay paused.

        Raises RuntimeError if the ranks of the trainer can't gather the weights.
        """
        sent, live = Sent(), {key: self._members[key] for key in keys}
        await _Sending(self, live, sent, label, source, mode).run()
        return sent

    def give_up(self, member: Member, problem: str) -> None:
        """Drop a server's group for a while: it loads from files."""
        if self._members.get(member.key) is member:
            self._rejoin_at[member.key] = (member.epoch, time.monotonic() + REJOIN_S)
            self._drop(member.key, f"failed, and the server loads weights from files for a while: {problem}")

    def copy_to_gpu(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a copy of a bucket on the trainer's GPU; does not wait for training."""
        self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = flat.to(self._device)
        self._stream.synchronize()
        return copy

    async def close(self) -> None:
        for task in list(self._joining.values()):
            task.cancel()
        members, self._members = list(self._members.values()), {}
        for member in members:
            member.group.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                leaving = (member.client.leave_group(member.group.name) for member in members)
                await asyncio.gather(*leaving, return_exceptions=True)

    def _drop(self, key: str, why: str) -> None:
        logger.info(
            "the process group with %s is closed, because the group %s", keys.describe_server(key), why
        )
        self._members.pop(key).group.close()

    async def _join(self, key: str, seen: LeaseView, client: HttpServerClient) -> None:
        how = seen.value["receiver"]
        name, size = f"weights-{uuid.uuid4().hex}", 1 + int(how["num_ranks"])
        backend = how["backend"] if self._device.type == "cuda" else "gloo"
        opening: asyncio.Future[WeightGroup] | None = None
        try:
            store = self._store = self._store or open_store(self._address, STORE_S)
            place: dict[str, Any] = {"backend": backend, "device": self._device, "address": self._address}
            open_group = partial(WeightGroup, store, 0, size, name, timeout_s=JOIN_S, **place)
            opening = asyncio.ensure_future(start_in_thread(open_group))
            async with asyncio.timeout(1.5 * JOIN_S):
                await client.join_group(name, (self._address, store.port), size, backend)
                group = await asyncio.shield(opening)
        except BaseException as error:
            if opening is not None:
                opening.add_done_callback(_close_late_group)
            if not isinstance(error, FAILURES):
                raise
            self._rejoin_at[key] = (seen.epoch, time.monotonic() + REJOIN_S)
            form = "%s can't join a process group and loads weights from files instead: %s"
            logger.warning(form, keys.describe_server(key), error)
            return
        group.limit(BUCKET_S)
        self._members[key] = Member(key, seen.epoch, client, group)
        logger.info("%s has joined a process group (%s)", keys.describe_server(key), backend)


def _close_late_group(opening: asyncio.Future[WeightGroup]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


@dataclass
class _Sending:
    """One version on its way to the servers in `live`."""

    owner: ProcessGroups
    live: dict[str, Member]
    sent: Sent
    label: str
    source: BucketSource
    mode: PauseMode

    async def run(self) -> None:
        last = len(self.source.buckets) - 1
        loading = self._load(0)
        try:
            for index in range(last + 1):
                flat = await asyncio.shield(loading)
                if index == 0:
                    await self._for_each(self._begin)
                if index < last and self.live:
                    loading = self._load(index + 1)
                placed = {"cpu": flat}
                if any(member.group.device.type == "cuda" for member in self.live.values()):
                    copy = partial(self.owner.copy_to_gpu, flat)
                    placed["cuda"] = await start_in_thread(copy)
                await self._for_each(partial(self._send, index, placed))
                if not self.live:
                    return
            await self._for_each(self._finish)
        finally:  # the source takes one call at a time
            await asyncio.wait([loading])

    def _load(self, index: int) -> asyncio.Future[torch.Tensor]:
        return asyncio.ensure_future(start_in_thread(partial(self.source.load, index)))

    async def _for_each(self, act: Callable[[Member], Awaitable[None]]) -> None:
        """Act on all live servers at once; leave out servers that fail."""

        async def guard(member: Member) -> None:
            try:
                async with asyncio.timeout(BUCKET_S):
                    await act(member)
            except FAILURES as error:
                problem = str(error) or f"no answer within {BUCKET_S:.0f} s"
                self.live.pop(member.key)
                self.sent.failed[member.key] = problem
                self.owner.give_up(member, problem)

        await asyncio.gather(*map(guard, list(self.live.values())))

    async def _begin(self, member: Member) -> None:
        member.paused_at = time.monotonic()
        await member.client.pause(self.mode)
        await member.client.begin_update(self.label)

    async def _send(self, index: int, placed: Mapping[str, torch.Tensor], member: Member) -> None:
        bucket, is_last = self.source.buckets[index], index == len(self.source.buckets) - 1
        body = make_body(bucket, member.group.name, self.label, is_last, self.mode == "in_place")
        receiving = asyncio.ensure_future(member.client.receive_bucket(body))
        try:
            # the first transfer of NCCL connects, and waits for the server
            flat = placed[member.group.device.type]
            work = await start_in_thread(partial(member.group.broadcast, flat))
            pause_s = LONGEST_POLL_S / 16
            while not work.is_completed():
                if receiving.done():
                    receiving.result()  # a server that has refused does not receive
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_POLL_S)
            work.wait()
            await receiving
        finally:
            if not receiving.done():
                receiving.cancel()
            else:
                receiving.exception()

    async def _finish(self, member: Member) -> None:
        await member.client.end_update()
        await member.client.resume()
        self.sent.pauses_s[member.key] = time.monotonic() - member.paused_at
