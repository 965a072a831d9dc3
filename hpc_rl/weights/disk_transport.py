"""Sends weights through the trial directory: ranks write changed values, servers read them.

A thread of each rank compares and writes its part while training continues. The ranks then exchange their
records; rank 0 completes the version with its index, and updates the servers. The first version of a trainer
has all values. So has a version after a damage, and one after differences that together have MAX_CHAIN times
the size of the model.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpc_rl.core import files
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.types import WeightVersion
from hpc_rl.engines.base import sum_over_ranks
from hpc_rl.weight_files import rank_file
from hpc_rl.weight_files.chain import MAX_CHAIN, MODEL_FOLDER, VersionIndex
from hpc_rl.weights import disk
from hpc_rl.weights.snapshot import WeightSnapshot
from hpc_rl.weights.transport import Published, TransportContext

logger = logging.getLogger(__name__)
ROUND_S = 10.0  # between exchanges of ranks that wait; must be shorter than the limit of a collective
GATHER_LIMIT = timedelta(days=7)  # a rank may wait for disk space; a rank that dies is noticed at once
CLOSE_TIMEOUT_S = 10.0


@dataclass
class Publication:
    """The progress of one publication on this rank."""

    version: WeightVersion
    whole: bool  # write all values
    begun_at: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)
    published: Published | None = None  # None until the end, and after a stop
    error: Exception | None = None


class DiskTransport:
    """See Transport."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._trial = context.trial
        device = getattr(context.engine, "device", torch.device("cpu"))
        self._snapshot = WeightSnapshot(context.engine, pin=device.type == "cuda")
        self._rank, self._num_ranks, self._group = 0, 1, None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
            # a separate one, because the threads exchange records while training uses the default one
            self._group = dist.new_group(backend="gloo", timeout=GATHER_LIMIT)
        self._job: Publication | None = None
        self._room = files.Room(self._trial.weights)
        self._room.closing = context.stopping
        self._next_is_whole = True
        # on rank 0: the last complete version, and the bytes of the differences up to it
        self._base: WeightVersion | None = None
        self._chain_bytes = self._whole_bytes = 0

    def start(self, version: WeightVersion) -> None:
        assert self._job is None, "one publication at a time"
        self._snapshot.take()
        self._begin(version, self._next_is_whole)

    def settle(self, wait: bool) -> Published | None:
        job = self._job
        while job is not None:
            if wait:
                job.ended.wait(ROUND_S)
            if self._room.waiting:
                self._context.on_wait()
            ended = job.ended.is_set()
            outcome = (job.published if ended else None) or Published()
            # also a stop must be known to all: the ranks exchange records again, or none does
            stops, pending, failed, again, self._next_is_whole = _find_any(
                self._context.stopping.is_set(),
                not ended,
                ended and job.error is not None,
                outcome.needs_whole and not outcome.acknowledged,
                outcome.needs_whole or self._chain_bytes > MAX_CHAIN * self._whole_bytes,
            )
            if failed:
                raise job.error or RoleFailed(
                    f"another trainer rank could not publish weights {job.version}; its log has the reason"
                )
            if again and not pending and not stops:
                form = "weights %s are published again, with all values: a server can't apply only changes"
                logger.warning(form, job.version)
                self._begin(job.version, whole=True)
                job = self._job
            elif not pending:
                self._job = None
                return job.published
            if not wait:
                return None
        return None

    def close(self) -> None:
        if self._job is not None and not self._job.ended.wait(CLOSE_TIMEOUT_S):
            form = (
                "the trainer stops before all servers have weights %s; the next start publishes weights again"
            )
            logger.warning(form, self._job.version)

    def _begin(self, version: WeightVersion, whole: bool) -> None:
        job = self._job = Publication(version, whole)
        name = f"publish-{version}"
        threading.Thread(target=self._work, args=(job,), daemon=True, name=name).start()

    def _work(self, job: Publication) -> None:
        try:
            record: dict[str, Any] = {"stopped": True}
            try:
                record = self._write_part(job)
            except OSError as error:
                if not (files.is_full(error) and self._context.stopping.is_set()):
                    job.error, record = error, {"failed": True}
            records = self._gather(record)
            if any(one.get("failed") for one in records):
                if job.error is None:
                    job.error = RoleFailed(
                        f"another trainer rank could not write weights {job.version}; its log has the reason"
                    )
            elif not any(one.get("stopped") for one in records):
                job.published = self._finish(job, records)
            elif self._rank == 0:
                shutil.rmtree(self._find_folder(job.version), ignore_errors=True)
        except Exception as error:  # settle raises it on the main thread of every rank
            job.error = error
        finally:
            job.ended.set()

    def _find_folder(self, version: WeightVersion) -> Path:
        return self._trial.weights / f".{version}.tmp"

    def _write_part(self, job: Publication) -> dict[str, Any]:
        """Write this rank's file; return its record. Waits for disk space. Raises OSError."""
        difference = self._snapshot.compare(job.whole)
        folder = self._find_folder(job.version)
        path = folder / f"rank-{self._rank:05d}.safetensors"

        def write() -> FileRecord:
            folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            return rank_file.write(path, self._rank, difference.stored)

        try:
            file = self._room.write(f"weights {job.version}", write)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        counts = {name: getattr(difference, name) for name in ("num_values", "num_changed", "whole_bytes")}
        return {"file": dataclasses.asdict(file), "is_whole": difference.is_whole, **counts}

    def _finish(self, job: Publication, records: list[dict[str, Any]]) -> Published | None:
        """Finish a version that all ranks have written. Raises as `_publish`."""
        return self._publish(job, records) if self._rank == 0 else None

    def _update_servers(self, version: WeightVersion, path: Path, num_bytes: int) -> Published:
        assert self._context.publisher is not None, "rank 0 has one"
        return self._context.publisher.publish(version, path, num_bytes, self._context.stopping)

    def _publish(self, job: Publication, records: list[dict[str, Any]]) -> Published | None:
        """Complete a version and update the servers. Rank 0 only. Raises OSError, RoleFailed, Stale."""
        folder = self._find_folder(job.version)
        whole = all(record["is_whole"] for record in records)
        index = VersionIndex(
            version=job.version,
            base=None if whole else self._base,
            files=tuple(FileRecord(**record["file"]) for record in records),
            whole_bytes=sum(record["whole_bytes"] for record in records),
        )

        def complete() -> None:
            if whole:
                (folder / MODEL_FOLDER).mkdir(exist_ok=True)
                self._context.engine.write_model_files(folder / MODEL_FOLDER, self._context.tokenizer)
            index.write(folder)

        try:
            self._room.write(f"weights {job.version}", complete)
        except OSError as error:
            if files.is_full(error) and self._context.stopping.is_set():
                return None
            raise
        final = disk.finish(self._trial, job.version)
        write_s = time.monotonic() - job.begun_at
        self._base, self._whole_bytes = job.version, index.whole_bytes
        self._chain_bytes = 0 if whole else self._chain_bytes + index.stored_bytes
        published = self._update_servers(job.version, final, index.whole_bytes)
        num_values = sum(record["num_values"] for record in records)
        published.num_bytes, published.write_s = index.stored_bytes, write_s
        published.density = sum(record["num_changed"] for record in records) / max(1, num_values)
        return published

    def _gather(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the records of all ranks."""
        if self._group is None:
            return [record]
        body = np.frombuffer(json.dumps(record).encode(), np.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(body)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(body)] = torch.from_numpy(body.copy())
        bodies = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._num_ranks)]
        dist.all_gather(bodies, padded, group=self._group)
        return [
            json.loads(one[: int(size)].numpy().tobytes()) for one, size in zip(bodies, sizes, strict=True)
        ]


def _find_any(*flags: bool) -> list[bool]:
    """Return, per flag, whether any rank set it. Collective."""
    return [total > 0 for total in sum_over_ranks([float(flag) for flag in flags])]
