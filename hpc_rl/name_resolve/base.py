"""NameResolve: small records under slash-separated keys, and leases; see shared_fs.py and memory.py."""

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from hpc_rl.errors import ConfigError

COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,127}")
FIRST_POLL_S = 0.05
LAST_POLL_S = 1.0


@dataclass(frozen=True)
class LeaseView:
    """A lease as a reader judges it: alive while its counter moved within `ttl_s` of the reader's clock."""

    key: str
    value: dict[str, Any]
    epoch: int
    alive: bool
    age_s: float  # since the counter was last seen to move, by the reader's clock


class Lease(Protocol):
    """Ownership of a key by epoch: the highest epoch wins, holders of lower ones are stale."""

    epoch: int

    def renew(self, value: dict[str, Any] | None = None) -> None:
        """Move the counter, with another value if given. Raises Stale once a higher epoch exists."""

    def release(self) -> None:
        """Give the key up; readers no longer see it."""


class NameResolve(Protocol):
    """Keys are `a/b/c` of safe components (ConfigError otherwise); values are JSON objects."""

    def add(self, key: str, value: dict[str, Any], replace: bool = False) -> None:
        """Add a record; of concurrent adders one wins. Raises FileExistsError where one exists."""

    def get(self, key: str) -> dict[str, Any] | None: ...

    def list(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Return the records whose key begins with the components of prefix, sorted by key."""

    def wait(self, key: str, timeout_s: float) -> dict[str, Any]:
        """Return the record once it exists. Raises TimeoutError that names the key."""

    def watch(self, prefix: str, timeout_s: float) -> Iterator[dict[str, dict[str, Any]]]:
        """Yield the listing at first and whenever it changes, until timeout_s passes without a change."""

    def delete(self, key: str) -> None: ...

    def lease(self, key: str, value: dict[str, Any], ttl_s: float) -> Lease:
        """Take the key over with the next epoch."""

    def leases(self, prefix: str) -> dict[str, LeaseView]:
        """Return the leases under prefix, by key, judged by the counters that earlier calls saw."""


def components(key: str) -> list[str]:
    """Return the parts of a key, each safe as a file name. Raises ConfigError."""
    parts = key.split("/")
    for part in parts:
        if not COMPONENT.fullmatch(part) or ".." in part or part.endswith(".json") or ".epoch-" in part:
            raise ConfigError(
                f"name-resolve key {key!r}: {part!r} can't be a part: 1 to 128 letters, digits and "
                ". _ + = @ -, a letter or digit first, without '..', '.epoch-' and a final '.json'"
            )
    return parts


class PollingNames:
    """What both implementations share: `wait` and `watch` on top of `get` and `list`."""

    def get(self, key: str) -> dict[str, Any] | None:
        raise NotImplementedError

    def list(self, prefix: str) -> dict[str, dict[str, Any]]:
        raise NotImplementedError

    def wait(self, key: str, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        for pause_s in _pauses():
            value = self.get(key)
            if value is not None:
                return value
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no process published {key!r} within {timeout_s:g} s")
            time.sleep(min(pause_s, left_s))
        raise AssertionError("the pauses never end")

    def watch(self, prefix: str, timeout_s: float) -> Iterator[dict[str, dict[str, Any]]]:
        last = self.list(prefix)
        yield last
        pauses, deadline = _pauses(), time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(next(pauses), left_s))
            now = self.list(prefix)
            if now != last:
                last = now
                yield last
                pauses, deadline = _pauses(), time.monotonic() + timeout_s


def _pauses() -> Iterator[float]:
    pause_s = FIRST_POLL_S
    while True:
        yield pause_s * random.uniform(0.8, 1.2)  # many readers must not ask the file server in step
        pause_s = min(2 * pause_s, LAST_POLL_S)
