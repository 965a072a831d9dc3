"""The servers that stay at the version of an evaluation while the trainer publishes newer ones.

They are the servers of the pool `eval`, if there is one, else a share of the trained pool's servers.
weights/held.json names them, so that they load the version also after a restart. A server that holds the
version and is lost for a while is replaced by another one, which loads the version from its files.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from hpc_rl.core.errors import Damaged, HpcRlError
from hpc_rl.core.trial import Trial, load_object, write_atomic
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import LeaseView
from hpc_rl.servers.client import HttpServerClient

logger = logging.getLogger(__name__)
LOST_S = 5.0  # without a live lease, or without the version after a restart
Connect = Callable[[str], HttpServerClient]


@dataclass
class HeldServers:
    """Used by the publisher, on its event loop; only `want` is called by other threads.

    `share` of the trained pool's servers is held; None for a separate pool, with all of its servers.
    """

    trial: Trial
    share: float | None
    label: str = ""  # the version of the evaluation, "" without one
    keys: frozenset[str] = frozenset()  # servers of `label`
    problem: str = ""  # why `label` can't be loaded
    _published: str = ""  # the newest version
    _is_published: bool = False  # whether `label` is
    _lost_since: float | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def want(self, label: str, is_published: bool) -> None:
        """Hold servers for a version once it is published."""
        self.problem, self.label = "", label
        self._is_published = is_published or label == self._published

    def note_published(self, label: str) -> None:
        self._published = label
        self._is_published = self._is_published or label == self.label

    def excludes(self, key: str) -> bool:
        """Return whether a server of the trained pool gets no newer weights."""
        return self.share is not None and key in self.keys

    async def settle(self, leases: Mapping[str, LeaseView], connect: Connect, busy: Collection[str]) -> None:
        """Hold servers of a pool for the wanted version, if it is published and none holds it."""
        async with self._lock:
            label, path = self.label, self.trial.published(self.label)
            self._note_loss(leases)
            if not label or self.keys or not self._is_published:
                return
            targets = self._choose({key: seen for key, seen in leases.items() if _is_ready(seen, busy)})
            record = {"label": label, "path": str(path), "servers": targets}
            if targets or self.share is None:  # servers of a separate pool may wait for the record
                text = json.dumps(record) + "\n"
                await asyncio.to_thread(write_atomic, self.trial.held_weights, text, durable=False)
            calls = (connect(leases[key].value["url"]).hold_weights(label, str(path)) for key in targets)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            failed = {key: error for key, error in zip(targets, outcomes, strict=True) if error is not None}
            for key, error in failed.items():
                if not isinstance(error, HpcRlError):
                    raise error
                form = "%s can't load weights %s and does not take part in their evaluation: %s"
                logger.warning(form, keys.describe_server(key), label, error)
            self.keys = frozenset(targets) - failed.keys()
            damage = [str(error) for error in failed.values() if isinstance(error, Damaged)]
            if damage and not self.keys:
                self.problem = damage[0]
            if self.keys:
                logger.info("%d servers stay at weights %s until they are evaluated", len(self.keys), label)

    def _choose(self, ready: Mapping[str, LeaseView]) -> list[str]:
        """Return the servers to hold; servers that have the version or were held at it come first."""
        if self.share is None:
            return sorted(ready)
        record = load_object(self.trial.held_weights)
        before = record.get("servers", []) if record.get("label") == self.label else []
        num = max(1, int(self.share * len(ready)))

        def rank(key: str) -> tuple[bool, bool, str]:
            return key not in before, ready[key].value.get("version") != self.label, key

        return sorted(sorted(ready, key=rank)[:num])

    def _note_loss(self, leases: Mapping[str, LeaseView]) -> None:
        """Choose servers anew if all held ones are lost for a while."""
        values = [leases[key].value for key in self.keys if key in leases and leases[key].alive]
        if not self.keys or any(value.get("held") == self.label for value in values):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = time.monotonic()
        elif time.monotonic() - self._lost_since > LOST_S:
            form = "the servers that evaluate weights %s are lost; other servers load these weights"
            logger.warning(form, self.label)
            self.keys, self._lost_since = frozenset(), None

    async def release(self, leases: Mapping[str, LeaseView], connect: Connect) -> None:
        """Let the servers follow the trainer again."""
        async with self._lock:
            held, self.keys, self.label = self.keys, frozenset(), ""
            await asyncio.to_thread(self.trial.held_weights.unlink, missing_ok=True)
            live = [leases[key] for key in held if key in leases and leases[key].alive]
            calls = (connect(seen.value["url"]).hold_weights("") for seen in live)
            # a server that misses the call reads the record
            await asyncio.gather(*calls, return_exceptions=True)
        self._released.set()
        self._released = asyncio.Event()

    async def wait_for_release(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._released.wait()


def _is_ready(seen: LeaseView, busy: Collection[str]) -> bool:
    return seen.alive and seen.value.get("state") not in busy
