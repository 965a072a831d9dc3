"""Sends weights to the servers over process groups, and through the trial directory.

Each version is also written to disk, as differences: for late servers, for servers whose group fails, and as
history. Rank 0 then gathers the weights in buckets of bounded size, and broadcasts them (process_groups.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpc_rl.core.types import WeightVersion
from hpc_rl.servers.weight_group import Bucket
from hpc_rl.weight_files.difference import DTYPE_BYTES, Rectangle
from hpc_rl.weights.disk_transport import DiskTransport, Publication
from hpc_rl.weights.snapshot import DTYPES
from hpc_rl.weights.transport import Published, TransportContext

BUCKET_BYTES = 256 << 20  # a larger tensor fills a bucket alone
END = -1  # to the other ranks, in place of the number of a bucket
TORCH_NAMES = {name: str(dtype).removeprefix("torch.") for dtype, name in DTYPES.items()}


class CollectiveTransport(DiskTransport):
    """See Transport."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._layout = ""  # digest of the rectangles of all ranks
        self._buckets: BucketGather | None = None

    def _write_part(self, job: Publication) -> dict[str, Any]:
        described = repr([rectangle for rectangle, _ in self._snapshot.list_parts()])
        return super()._write_part(job) | {"layout": hashlib.blake2b(described.encode()).hexdigest()}

    def _finish(self, job: Publication, records: list[dict[str, Any]]) -> Published | None:
        layout = repr([record["layout"] for record in records])
        if self._buckets is None or layout != self._layout:
            own = [asdict(rectangle) for rectangle, _ in self._snapshot.list_parts()]
            ranks = [
                [_parse(one) for one in record["parts"]] for record in self._gather({"parts": own})
            ]  # a long list: sent once
            self._buckets, self._layout = BucketGather(ranks, self._rank, self._group), layout
        self._buckets.parts = [values for _, values in self._snapshot.list_parts()]
        if self._rank != 0:
            self._buckets.assist()
            return None
        try:
            return super()._finish(job, records)
        finally:
            self._buckets.end()

    def _update_servers(self, version: WeightVersion, path: Path, num_bytes: int) -> Published:
        assert self._context.publisher is not None and self._buckets is not None
        return self._context.publisher.publish(
            version, path, num_bytes, self._context.stopping, self._buckets
        )


class BucketGather:
    """See BucketSource; on the other ranks, `assist` sends their parts to rank 0.

    `parts` are the values of this rank's rectangles, in their order.
    """

    def __init__(self, ranks: list[list[Rectangle]], rank: int, group: Any) -> None:
        """Divide the tensors into buckets; `ranks` are the rectangles of each rank."""
        self.parts: list[np.ndarray] = []
        self._ranks, self._rank, self._group = ranks, rank, group
        tensors = {one.name: one for rectangles in ranks for one in rectangles}
        self._plan = [_order(names) for names in _divide(tensors)]
        self.buckets = [_describe(rectangles) for rectangles in self._plan]
        self._buffers: list[torch.Tensor] = []

    @cached_property
    def _shares(self) -> list[list[list[int]]]:
        """The numbers of the rectangles, by bucket and rank."""
        place = {one.name: index for index, plan in enumerate(self._plan) for one in plan}
        shares: list[list[list[int]]] = [[[] for _ in self._ranks] for _ in self._plan]
        for rank, rectangles in enumerate(self._ranks):
            for number, one in enumerate(rectangles):
                shares[place[one.name]][rank].append(number)
        return shares

    def load(self, index: int) -> torch.Tensor:
        bucket = self.buckets[index]
        if not self._buffers:
            size = max(one.num_bytes for one in self.buckets)
            self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        flat = self._buffers[index % 2][: bucket.num_bytes]
        whole = _cut(flat.numpy(), self._plan[index])
        self._tell(index)
        for rank, numbers in enumerate(self._shares[index]):
            rectangles = [self._ranks[rank][number] for number in numbers]
            if rank == 0:
                values = iter([self.parts[number] for number in numbers])
            elif rectangles:
                values = self._receive(rank, rectangles)
            for rectangle, part in zip(rectangles, values, strict=False):
                rectangle.view(whole[rectangle.name])[...] = part.reshape(rectangle.shape)
        return flat

    def _receive(self, rank: int, rectangles: list[Rectangle]) -> Iterator[np.ndarray]:
        sizes = [one.num_values * one.word.itemsize for one in rectangles]
        body = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.recv(body, src=rank, group=self._group)
        for one, part in zip(rectangles, body.split(sizes), strict=True):
            yield part.numpy().view(one.word)

    def end(self) -> None:
        """Let `assist` return on the other ranks."""
        self._tell(END)

    def _tell(self, index: int) -> None:
        if self._group is not None:
            dist.broadcast(torch.tensor([index]), src=0, group=self._group)

    def assist(self) -> None:
        """Send this rank's parts of the buckets that rank 0 loads, until its `end`."""
        while True:
            order = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(order, src=0, group=self._group)
            if (index := int(order)) == END:
                return
            if numbers := self._shares[index][self._rank]:
                parts = [self.parts[number].view(np.uint8) for number in numbers]
                dist.send(torch.from_numpy(np.concatenate(parts)), dst=0, group=self._group)


def _parse(record: dict[str, Any]) -> Rectangle:
    sizes = {name: tuple(record[name]) for name in ("offset", "shape", "whole_shape")}
    return Rectangle(name=record["name"], dtype=record["dtype"], **sizes)


def _count_bytes(tensor: Rectangle) -> int:
    return int(np.prod(tensor.whole_shape, dtype=np.int64)) * DTYPE_BYTES[tensor.dtype]


def _divide(tensors: dict[str, Rectangle]) -> Iterator[list[Rectangle]]:
    """Yield the tensors in groups of at most BUCKET_BYTES; neighbours by name stay together."""
    group: list[Rectangle] = []
    size = 0
    for _, tensor in sorted(tensors.items()):
        if group and size + _count_bytes(tensor) > BUCKET_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += _count_bytes(tensor)
    if group:
        yield group


def _order(tensors: list[Rectangle]) -> list[Rectangle]:
    # each tensor then begins at a multiple of the size of its values
    return sorted(tensors, key=lambda one: (-DTYPE_BYTES[one.dtype], one.name))


def _describe(tensors: list[Rectangle]) -> Bucket:
    return Bucket(
        tuple(one.name for one in tensors),
        tuple(TORCH_NAMES[one.dtype] for one in tensors),
        tuple(one.whole_shape for one in tensors),
    )


def _cut(flat: np.ndarray, tensors: list[Rectangle]) -> dict[str, np.ndarray]:
    """Return the flat values of each tensor in a bucket, as views."""
    whole, at = {}, 0
    for one in tensors:
        end = at + _count_bytes(one)
        whole[one.name], at = flat[at:end].view(one.word), end
    return whole
