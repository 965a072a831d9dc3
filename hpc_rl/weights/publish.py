"""Updates the live servers of a pool to published weights: prepare, then pause, load and resume in one call.

An event loop in another thread keeps the connections and watches the leases between publications. Servers
prepare while they generate. A failed server is skipped: it loads the current weights by itself, and is used
again when its lease shows them. One acknowledgement is enough to continue.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from hpc_rl.core.allocation import DEFAULT_POOL
from hpc_rl.core.errors import Damaged, HpcRlError, RoleFailed
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import WeightVersion
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.roster import RosterReader
from hpc_rl.name_resolve.shared_fs import LeaseView, NameResolve
from hpc_rl.servers.client import HttpServerClient, PauseMode, open_session
from hpc_rl.servers.router import is_older
from hpc_rl.weights import disk
from hpc_rl.weights.held_servers import HeldServers
from hpc_rl.weights.transport import Published

if TYPE_CHECKING:
    from hpc_rl.weights.process_groups import BucketSource, ProcessGroups

logger = logging.getLogger(__name__)

RETRY_S, LONGEST_RETRY_S = 0.1, 2.0  # first and longest pause between searches for a server
LOOK_S = 0.25  # between looks at the roster, while no server is ready
# states in which a server accepts no updates; a starting server loads the newest weights
BUSY = ("starting", "released", "loading", "stale", "stopping")
SLOWEST_LOAD_BYTES_PER_S = 50e6  # a server that loads slower is skipped


@dataclass
class Publisher:
    """Rank 0's connections to the generation servers. Close it at the end. Only its thread uses `names`."""

    trial: Trial
    names: NameResolve
    tokens: dict[str, str]
    pool: str = DEFAULT_POOL
    setup_timeout_s: float = 600.0  # to wait for the first acknowledgement of a publish
    update_timeout_s: float = 60.0  # of one server, in addition to the time for loading the bytes
    watch_s: float = 1.0  # between reads of the roster
    pause_mode: PauseMode = "retract"
    max_paused: int | None = None  # servers that load from files at once; None for all
    history_bytes: float = 0.0  # weights.history_gb
    process_groups: "ProcessGroups | None" = None  # over which joined servers get weights
    evaluation_pool: str = (
        ""  # its servers are held at the version of an evaluation; "" for a share of `pool`
    )
    server_share: float = 0.25
    kept: frozenset[str] = frozenset()  # versions whose files stay

    def __post_init__(self) -> None:
        self._left_out: dict[str, tuple[int, str]] = {}  # key -> epoch and label of the failed update
        self._roster = RosterReader(self.names, keys.servers(self.pool))
        self._evaluating = self._roster
        if self.evaluation_pool:
            self._evaluating = RosterReader(self.names, keys.servers(self.evaluation_pool))
        self.held = HeldServers(self.trial, None if self.evaluation_pool else self.server_share)
        self._leases: dict[str, LeaseView] = {}
        self._session: aiohttp.ClientSession | None = None
        self._pruning: asyncio.Future[Any] | None = None
        self._history = disk.History(self.trial, self.history_bytes)
        self._preparing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="publisher")
        self._thread.start()
        self._watcher = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def publish(
        self,
        version: WeightVersion,
        path: Path,
        num_bytes: int,
        stopping: threading.Event | None = None,
        source: "BucketSource | None" = None,
    ) -> Published:
        """Update the servers to a version of `num_bytes`; return once one has it or `stopping` is set.

        Servers in `process_groups` get it from `source`, other servers from `path`. Also returns if no server
        has it and one needs a version with all values. Raises RoleFailed if no server loaded it within
        setup_timeout_s, or if it was removed.
        """
        publishing = self._publish(str(version), path, num_bytes, stopping, source)
        work: Future[Published] = asyncio.run_coroutine_threadsafe(publishing, self._loop)
        return work.result()

    def hold(self, label: str, is_published: bool = False) -> None:
        """Let some servers stay at a version for an evaluation, once it is published."""
        self.held.want(label, is_published)
        self._loop.call_soon_threadsafe(self._hold_soon)

    def release(self) -> None:
        """Let the servers of an evaluation follow the trainer again."""
        asyncio.run_coroutine_threadsafe(self._release(), self._loop).result()

    def close(self) -> None:
        self._watcher.cancel()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    async def _publish(
        self,
        label: str,
        path: Path,
        num_bytes: int,
        stopping: threading.Event | None,
        source: "BucketSource | None",
    ) -> Published:
        limit_s = self.update_timeout_s + num_bytes / SLOWEST_LOAD_BYTES_PER_S
        give_up_at = time.monotonic() + self.setup_timeout_s
        waiting, pause_s = False, RETRY_S
        if not self.evaluation_pool:  # an evaluation of the version before takes its servers now
            await self._settle_held()
        while True:
            if not path.is_dir():
                raise RoleFailed(
                    f"the files of weights {label} in {path} are missing, and no server has loaded them yet"
                )
            targets = self._targets()
            result = Published(needs_whole=any(_lacks_files(seen) for seen in self._leases.values()))
            turns = asyncio.Semaphore(self.max_paused or max(1, len(targets)))
            update = partial(self._update, label=label, path=path, limit_s=limit_s, turns=turns)
            joined = await self._choose_joined(targets, source)
            await asyncio.gather(
                self._send(result, joined, label, path, source, update),
                *(update(result, key, seen) for key, seen in targets.items() if key not in joined),
            )
            self._remember(result, targets, label)
            if result.acknowledged:
                self.held.note_published(label)
                self._hold_soon()
                self._prune()
                return result
            if result.needs_whole:
                return result
            if stopping is not None and stopping.is_set():
                return result
            if self.held.keys and not targets:  # all servers stay at an older version
                await self.held.wait_for_release(LONGEST_RETRY_S)
                give_up_at = time.monotonic() + self.setup_timeout_s
                continue
            if time.monotonic() > give_up_at:
                raise RoleFailed(
                    f"no generation server loaded weights {label} within {self.setup_timeout_s:.0f} s "
                    f"(rollout.setup_timeout): {_describe_problems(result)}"
                )
            if not waiting:
                form = "the trainer waits for a generation server that loads weights %s (%s)"
                logger.info(form, label, _describe_problems(result))
            waiting = True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S if targets else LOOK_S)

    def _targets(self) -> dict[str, LeaseView]:
        """Return live servers that accept updates; servers that failed before only if there are no others."""
        self._leases = self._roster.list_leases(at_once=True)
        live, usual = {}, {}
        for key, seen in self._leases.items():
            if seen.alive and seen.value.get("state") not in BUSY and not self.held.excludes(key):
                live[key] = seen
                epoch, label = self._left_out.get(key, (-1, ""))
                if epoch != seen.epoch or not is_older(str(seen.value.get("version") or ""), label):
                    usual[key] = seen
        return usual or live

    async def _choose_joined(
        self, targets: dict[str, LeaseView], source: "BucketSource | None"
    ) -> dict[str, LeaseView]:
        if self.process_groups is None or source is None:
            return {}
        self.process_groups.follow(self._leases, self._client, BUSY)
        return {key: targets[key] for key in await self.process_groups.choose(targets)}

    async def _send(
        self,
        result: Published,
        joined: dict[str, LeaseView],
        label: str,
        path: Path,
        source: "BucketSource | None",
        update: Callable[[Published, str, LeaseView], Awaitable[None]],
    ) -> None:
        """Send weights to joined servers; if the transfer to a server fails, it loads them from files."""
        if not joined or self.process_groups is None or source is None:
            return
        for seen in joined.values():  # their nodes' copies follow meanwhile, in case a group fails
            task = asyncio.ensure_future(self._prepare(self._client(seen.value["url"]), path, label))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        sent = await self.process_groups.send(list(joined), label, source, self.pause_mode)
        result.pauses_s |= sent.pauses_s
        result.acknowledged += sent.pauses_s
        result.num_received = len(sent.pauses_s)
        for key, problem in sent.failed.items():
            form = "weights %s did not reach %s, which loads them from files instead: %s"
            logger.warning(form, label, keys.describe_server(key), problem)
        await asyncio.gather(*(update(result, key, joined[key]) for key in sent.failed))

    async def _prepare(self, client: HttpServerClient, path: Path, label: str) -> None:
        with contextlib.suppress(HpcRlError):  # a server that needs the files reports the problem then
            await client.prepare_weights(str(path), label)

    def _remember(self, result: Published, targets: dict[str, LeaseView], label: str) -> None:
        for key in result.acknowledged:
            self._left_out.pop(key, None)
        for key, problem in result.failed.items():
            if key not in self._left_out:
                form = (
                    "%s could not load weights %s; it gets newer weights only if no other server is left: %s"
                )
                logger.warning(form, keys.describe_server(key), label, problem)
            self._left_out[key] = (targets[key].epoch, label)

    async def _update(
        self,
        result: Published,
        key: str,
        seen: LeaseView,
        label: str,
        path: Path,
        limit_s: float,
        turns: asyncio.Semaphore,
    ) -> None:
        """Update one server, and add the outcome to the result."""
        client = self._client(seen.value["url"])
        try:
            async with asyncio.timeout(limit_s):
                await client.prepare_weights(str(path), label)
                async with turns:
                    version, pause_s = await client.switch_weights(str(path), label, self.pause_mode)
        except TimeoutError:
            result.failed[key] = f"no answer within {limit_s:.0f} s"
        except HpcRlError as error:
            result.failed[key] = str(error)
            result.needs_whole |= isinstance(error, Damaged)
        else:
            result.pauses_s[key] = pause_s
            if version == label:
                result.acknowledged.append(key)
            else:
                result.failed[key] = f"reports weights version {version!r} after the update"

    def _client(self, url: str) -> HttpServerClient:
        if self._session is None:
            self._session = open_session()
        return HttpServerClient(self._session, url, self.tokens["data"], self.tokens["control"])

    def _prune(self) -> None:
        # in the background: training does not wait for a slow file system
        if self._pruning is None or self._pruning.done():
            held = {str(seen.value.get("version")) for seen in self._leases.values() if seen.alive}
            held |= self.kept
            self._pruning = self._loop.run_in_executor(None, self._history.prune, held)

    async def _watch(self) -> None:
        # regular reads, so that the next publish knows which servers have died
        while True:
            await asyncio.sleep(self.watch_s)
            with contextlib.suppress(OSError):  # the next read may succeed
                self._leases = self._roster.list_leases()
                await self._follow(self._leases)
            await self._settle_held()

    async def _follow(self, leases: dict[str, LeaseView]) -> None:
        """React to a regular read of the leases."""
        if self.process_groups is not None:
            self.process_groups.follow(leases, self._client, BUSY)

    def _hold_soon(self) -> None:
        task = asyncio.ensure_future(self._settle_held())
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _settle_held(self) -> None:
        if not self.held.label:
            return
        with contextlib.suppress(OSError):  # the next round may succeed
            await self.held.settle(self._evaluating.list_leases(at_once=True), self._client, BUSY)

    async def _release(self) -> None:
        await self.held.release(self._evaluating.list_leases(), self._client)

    async def _close(self) -> None:
        for task in list(self._preparing):
            task.cancel()
        if self.process_groups is not None:
            await self.process_groups.close()
        if self._pruning is not None:
            await asyncio.wait([self._pruning])
        if self._session is not None:
            await self._session.close()


def _lacks_files(seen: LeaseView) -> bool:
    """Return whether a server waits for a version with all values."""
    return seen.alive and bool(seen.value.get("lacks_files"))


def _describe_problems(result: Published) -> str:
    problems = (f"{keys.describe_server(key)}: {problem}" for key, problem in result.failed.items())
    return "; ".join(problems) or "none is ready"
