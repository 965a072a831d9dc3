"""NameResolve: small records under slash-separated keys, and leases. Two implementations: shared_fs.py and memory.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Seen:
    """A lease as a reader judges it: `alive` while the owner's counter moved within `ttl_s` of the reader's own clock."""

    key: str
    value: dict[str, Any]
    epoch: int
    alive: bool
    age_s: float  # since the counter was last seen to move, by the reader's clock


class Lease(Protocol):
    """Ownership of a key by epoch: a higher epoch wins, whoever has a lower one is stale."""

    epoch: int

    def renew(self, value: dict[str, Any] | None = None) -> None:
        """Move the counter (and replace the value). Raises Stale once a higher epoch exists."""

    def release(self) -> None:
        """Give the key up; readers see it gone."""


class NameResolve(Protocol):
    """Keys are `a/b/c` of safe components (ConfigError otherwise); values are JSON objects."""

    def add(self, key: str, value: dict[str, Any], replace: bool = False) -> None:
        """Raises FileExistsError if the key exists and replace is false; of concurrent adders exactly one wins."""

    def get(self, key: str) -> dict[str, Any] | None: ...

    def list(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Records whose key begins with the components of prefix, by key, sorted."""

    def wait(self, key: str, timeout_s: float) -> dict[str, Any]:
        """Raises TimeoutError that names the key."""

    def watch(self, prefix: str, timeout_s: float) -> Iterator[dict[str, dict[str, Any]]]:
        """Yields the listing at first and whenever it changes, until timeout_s passes without a change."""

    def delete(self, key: str) -> None: ...

    def lease(self, key: str, value: dict[str, Any], ttl_s: float) -> Lease:
        """Take the key over with the next epoch."""

    def leases(self, prefix: str) -> dict[str, Seen]:
        """Leases under prefix, by key; call it repeatedly with one NameResolve object, which remembers counters."""
