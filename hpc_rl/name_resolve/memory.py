"""NameResolve within one process, for tests and for trials whose roles are threads."""

from __future__ import annotations

import copy
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpc_rl.errors import Stale
from hpc_rl.name_resolve.base import LeaseView, PollingNames, components


@dataclass
class _Held:
    value: dict[str, Any]
    epoch: int
    ttl_s: float
    moved_at: float
    released: bool = False

    def view(self, key: str, now: float) -> LeaseView:
        age_s = now - self.moved_at
        return LeaseView(key, copy.deepcopy(self.value), self.epoch, age_s <= self.ttl_s, age_s)


class MemoryNames(PollingNames):
    """Share the object between threads. `clock` gives seconds; leases are judged by it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, dict[str, Any]] = {}
        self._held: dict[str, _Held] = {}

    def add(self, key: str, value: dict[str, Any], replace: bool = False) -> None:
        components(key)
        with self._lock:
            if key in self._records and not replace:
                raise FileExistsError(errno.EEXIST, f"name-resolve key {key!r} exists")
            self._records[key] = copy.deepcopy(value)

    def get(self, key: str) -> dict[str, Any] | None:
        components(key)
        with self._lock:
            return copy.deepcopy(self._records.get(key))

    def list(self, prefix: str) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {
                key: copy.deepcopy(value)
                for key, value in sorted(self._records.items())
                if _under(prefix, key)
            }

    def delete(self, key: str) -> None:
        components(key)
        with self._lock:
            self._records.pop(key, None)

    def lease(self, key: str, value: dict[str, Any], ttl_s: float) -> MemoryLease:
        components(key)
        with self._lock:
            epoch = self._held[key].epoch + 1 if key in self._held else 1
            self._held[key] = _Held(copy.deepcopy(value), epoch, ttl_s, self._clock())
            return MemoryLease(self, key, epoch)

    def leases(self, prefix: str) -> dict[str, LeaseView]:
        with self._lock:
            now = self._clock()
            return {
                key: held.view(key, now)
                for key, held in sorted(self._held.items())
                if _under(prefix, key) and not held.released
            }


class MemoryLease:
    """One epoch of a lease of a MemoryNames."""

    def __init__(self, names: MemoryNames, key: str, epoch: int) -> None:
        self.key = key
        self.epoch = epoch
        self._names = names

    def renew(self, value: dict[str, Any] | None = None) -> None:
        with self._names._lock:
            held = self._names._held[self.key]
            if held.epoch > self.epoch or held.released:
                raise Stale(
                    f"lease {self.key!r}: epoch {self.epoch} was released or is older than epoch {held.epoch}"
                )
            held.value = held.value if value is None else copy.deepcopy(value)
            held.moved_at = self._names._clock()

    def release(self) -> None:
        with self._names._lock:
            held = self._names._held[self.key]
            held.released = held.released or held.epoch == self.epoch


def _under(prefix: str, key: str) -> bool:
    return not prefix or key.split("/")[: len(components(prefix))] == components(prefix)
