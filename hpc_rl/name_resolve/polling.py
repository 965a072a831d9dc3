"""What both implementations share: the rules for keys, and waiting by repeated listing."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any

from hpc_rl.errors import ConfigError

COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,127}")
FIRST_POLL_S = 0.05
LAST_POLL_S = 1.0


def components(key: str) -> list[str]:
    """The parts of a key, each safe as a file name and different from what leases and records append to it."""
    parts = key.split("/")
    for part in parts:
        if not COMPONENT.fullmatch(part) or ".." in part or part.endswith(".json") or ".epoch-" in part:
            raise ConfigError(
                f"name-resolve key {key!r} can't be used because of {part!r}: each part has 1 to 128 letters, digits and "
                ". _ + = @ -, starts with a letter or digit, and has no '..', '.epoch-' or '.json' at its end"
            )
    return parts


class Polling:
    """`wait` and `watch` on top of `get` and `list`."""

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
                raise TimeoutError(f"nobody published {key!r} within {timeout_s:g} s")
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
