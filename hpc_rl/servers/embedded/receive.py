"""Weights that arrive at the embedded engine over a process group, by the calls of SGLang's API."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import Any

import torch

from hpc_rl.core.errors import RequestRefused
from hpc_rl.servers.client import BUCKET_S, JOIN_S
from hpc_rl.servers.weight_group import Bucket, WeightGroup, reach_store

logger = logging.getLogger(__name__)


class WeightReceiver:
    """One server's group, and the buckets of one version. At most one trainer sends at a time."""

    def __init__(self, address: str) -> None:
        """Bind groups to this address of the host."""
        self._address = address
        self._lock = threading.Lock()  # of `_group`
        self._group: WeightGroup | None = None
        self._names: set[str] = set()  # that arrived since `begin`
        self._last: dict[str, Any] = {}  # the request for the newest bucket

    def join(self, body: dict[str, Any]) -> None:
        """Join a trainer's group in place of an earlier one; wait for the trainer. Raises RequestRefused."""
        if not self._address or body.get("backend") != "gloo":
            allowed = "backend must be gloo" if self._address else "use actor.weight_update_mode disk"
            raise RequestRefused(
                "the embedded engine can't receive weights from a process group of backend "
                f"{body.get('backend')!r}; {allowed}"
            )
        self.leave()
        try:
            where = str(body["master_address"]), int(body["master_port"])
            rank, size, name = int(body["rank_offset"]), int(body["world_size"]), str(body["group_name"])
            store = reach_store(*where, JOIN_S)
            group = WeightGroup(store, rank, size, name, address=self._address, timeout_s=JOIN_S)
        except (KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
            raise RequestRefused(f"can't join the trainer's process group: {error!r}") from error
        group.limit(BUCKET_S)
        with self._lock:
            self._group, before = group, self._group
        if before is not None:
            before.close()

    def leave(self, name: str = "") -> None:
        """Leave the group, if there is one with this name."""
        with self._lock:
            if self._group is None or name not in ("", self._group.name):
                return
            group, self._group = self._group, None
        group.close()

    def begin(self) -> None:
        self._names, self._last = set(), {}

    def receive(self, body: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of the next bucket. After a failure the group is closed.

        Raises RequestRefused.
        """
        try:
            bucket = Bucket.parse(body)
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        if body.get("load_format") != "flattened_bucket":
            raise RequestRefused(f"load_format must be flattened_bucket, got {body.get('load_format')!r}")
        group = self._group
        if group is None or group.name != body.get("group_name"):
            own = f"in process group {group.name!r}" if group else "in no process group"
            wanted = f"not in group {body.get('group_name')!r}"
            raise RequestRefused(f"this server is {own}, {wanted}: call /init_weights_update_group first")
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        try:
            group.receive(flat)
        except RuntimeError as error:
            self.leave(group.name)
            raise RequestRefused(f"the trainer's weights did not arrive: {error}") from error
        self._last = body
        return dict(bucket.split(flat))

    def note(self, names: Collection[str]) -> None:
        """Record loaded weights."""
        self._names |= set(names)

    def finish(self, wanted: set[str]) -> tuple[str | None, bool]:
        """Return the label of the version, and whether the cache stays. Raises RequestRefused."""
        if missing := sorted(wanted - self._names):
            raise RequestRefused(
                f"{len(missing)} tensors of the model have not arrived, such as {missing[0]}"
            )
        label = self._last.get("weight_version")
        return None if label is None else str(label), not self._last.get("flush_cache", True)
