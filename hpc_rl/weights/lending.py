"""The publisher of a trainer that shares its GPUs with the servers: it lends them to the servers for a while.

Servers have their memory between `lend` and `take_back` only. A server that starts or restarts waits until
then, so nothing needs to be stored about who has the GPUs: a trainer that starts takes them back before it
loads its state.
"""

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.core.errors import HpcRlError, RoleFailed
from hpc_rl.core.types import WeightVersion
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import LeaseView
from hpc_rl.weights.publish import RETRY_S, Publisher
from hpc_rl.weights.transport import Published

if TYPE_CHECKING:
    from hpc_rl.weights.process_groups import BucketSource

logger = logging.getLogger(__name__)
WAIT_S = 0.5  # between looks at a stop while the GPUs are not lent


@dataclass
class LendingPublisher(Publisher):
    """See the module."""

    def __post_init__(self) -> None:
        self._is_lent = threading.Event()
        # only the loop's thread uses these
        self._turn = asyncio.Lock()  # a call to resume must not arrive after one to release
        self._resumes = False  # servers take their memory
        self._resumed: set[tuple[str, int]] = set()  # keys and epochs of servers that have it
        super().__post_init__()

    def publish(
        self,
        version: WeightVersion,
        path: Path,
        num_bytes: int,
        stopping: threading.Event | None = None,
        source: "BucketSource | None" = None,
    ) -> Published:
        """Wait until the GPUs are lent; then let the servers resume with the version. See Publisher."""
        while not self._is_lent.wait(WAIT_S):
            if stopping is not None and stopping.is_set():
                return Published()
        self.resume()
        return super().publish(version, path, num_bytes, stopping, source)

    def lend(self) -> None:
        """Let a publication in flight go on; without one, call `resume`."""
        self._is_lent.set()

    def resume(self) -> None:
        """Let all servers take their memory, with the newest published weights."""
        asyncio.run_coroutine_threadsafe(self._begin_to_resume(), self._loop).result()

    def take_back(self) -> None:
        """Return once no live server holds memory. Raises RoleFailed after setup_timeout_s."""
        self._is_lent.clear()
        asyncio.run_coroutine_threadsafe(self._take_back(), self._loop).result()

    async def _begin_to_resume(self) -> None:
        async with self._turn:
            self._resumes = True
        await self._follow(self._roster.list_leases(at_once=True))

    async def _follow(self, leases: dict[str, LeaseView]) -> None:
        """Let servers resume that have not yet, for example because they have restarted."""
        async with self._turn:
            if self._resumes:
                waiting = (seen for key, seen in leases.items() if (key, seen.epoch) not in self._resumed)
                await asyncio.gather(*(self._resume_one(seen) for seen in waiting if seen.alive))

    async def _resume_one(self, seen: LeaseView) -> None:
        try:
            state = await self._client(seen.value["url"]).resume_memory()
        except HpcRlError as error:
            form = "%s can't resume generation yet; the trainer tries again: %s"
            logger.info(form, keys.describe_server(seen.key), error)
        else:
            if state == "serving":
                self._resumed.add((seen.key, seen.epoch))

    def _targets(self) -> dict[str, LeaseView]:
        """Return the servers that have resumed: leases show that later."""
        self._leases = self._roster.list_leases(at_once=True)
        return {key: seen for key, seen in self._leases.items() if (key, seen.epoch) in self._resumed}

    async def _take_back(self) -> None:
        async with self._turn:
            self._resumes = False
            self._resumed.clear()
        give_up_at = time.monotonic() + self.setup_timeout_s
        while holding := await self._release_all():
            if time.monotonic() > give_up_at:
                names = ", ".join(map(keys.describe_server, holding))
                raise RoleFailed(
                    f"{names} did not release the shared GPUs within {self.setup_timeout_s:.0f} s "
                    "(rollout.setup_timeout)"
                )
            await asyncio.sleep(RETRY_S)

    async def _release_all(self) -> list[str]:
        """Ask all live servers to release their memory; return the keys of servers that have not yet."""
        self._leases = self._roster.list_leases(at_once=True)
        live = {key: seen for key, seen in self._leases.items() if seen.alive}
        done = await asyncio.gather(*map(self._release_one, live.values()))
        return [key for key, is_released in zip(live, done, strict=True) if not is_released]

    async def _release_one(self, seen: LeaseView) -> bool:
        with contextlib.suppress(HpcRlError):  # it starts, or it has just ended: its lease says so soon
            await self._client(seen.value["url"]).release_memory()
            return True
        return False
