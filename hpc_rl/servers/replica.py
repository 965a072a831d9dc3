"""The life cycle of one server replica.

It starts, loads the newest published weights, holds its lease, watches for newer weights, and drains.

The order matters: it binds the port, takes the lease (state `starting`), and starts the backend. The lease
says `serving` only once the backend has published weights. A replica that missed a publish loads the weights
by itself after a while. A replica that weights/held.json names stays at that version, also after a restart.
On shared GPUs the trainer decides when the backend starts (lent_memory.py).
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from hpc_rl.core.allocation import DEFAULT_POOL
from hpc_rl.core.errors import ConfigError, Damaged, ExitCode, HpcRlError, RoleFailed, Stale
from hpc_rl.core.net import bind_published, make_http_url
from hpc_rl.core.trial import Trial, load_json, write_atomic
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import Lease, NameResolve
from hpc_rl.servers.base import Backend
from hpc_rl.servers.client import BUCKET_S, DAMAGED_STATUS
from hpc_rl.servers.lent_memory import LentMemory
from hpc_rl.servers.proxy import RELEASED, Proxy
from hpc_rl.servers.router import is_older

logger = logging.getLogger(__name__)

CHECK_S = 0.5  # between checks of the backend and of the lease's heartbeat
FOLLOW_S = 2.0  # between checks for published weights, in case the publisher's call was lost
HELD_EVERY = 5  # each fifth of these checks is for a version to stay at instead
SELF_LOAD_AFTER_S = 3.0  # gives the publisher time to update the server first
USE_EVERY_S = 30.0  # between records of busy time, for `hpc-rl report`
# without a bucket of weights that have begun to arrive; then the publisher is considered dead
RECEIVE_LIMIT_S = 1.5 * BUCKET_S
PAUSE_LIMIT_S = 300.0  # without a control call; then the publisher that paused is considered dead
DRAIN_S = 3.0


@dataclass(frozen=True)
class Identity:
    """The identity of a replica and of its start."""

    index: int
    attempt: str
    incarnation: int
    pool: str = DEFAULT_POOL


class Replica:
    """Runs one backend behind its proxy until asked to stop.

    Before the first publish it serves the checkpoint at `base_path`; if that is "", it waits. A `frozen`
    replica always serves that checkpoint, as the version `label`, and ignores published weights. With
    `shares_gpus` it has its memory only while the trainer lends it. An `evaluates` replica loads only the
    versions that are evaluated.
    """

    def __init__(
        self,
        backend: Backend,
        trial: Trial,
        names: NameResolve,
        tokens: dict[str, str],
        identity: Identity,
        base_path: str,
        address: str = "127.0.0.1",
        frozen: bool = False,
        shares_gpus: bool = False,
        label: str = "",
        evaluates: bool = False,
    ) -> None:
        self._frozen, self._label, self._evaluates = frozen, label, evaluates
        self._backend, self._trial, self._names = backend, trial, names
        self._who, self._base = identity, base_path
        self._address = address
        self._shutdown = threading.Event()
        self._changed = asyncio.Event()
        # label of the weights that are loading; the lease protects their directory from deletion
        self._loading = ""
        self._lacks_files = False  # the published weights can't be built from their files
        self._num_checks = 0  # for published weights
        self.proxy = Proxy(
            backend,
            tokens,
            identity.attempt,
            identity.incarnation,
            self._changed.set,
            self._shutdown.set,
            frozen,
        )
        self._memory = LentMemory(self.proxy, self._current) if shares_gpus else None
        self._url = ""
        self._lease: Lease | None = None
        self._reported_s = 0.0  # last recorded busy time
        self._newer: tuple[str, float] = ("", 0.0)  # label of newer weights, and the time of their discovery

    async def run(self, stopping: threading.Event) -> int:
        """Serve until `stopping` is set or POST /shutdown; return ExitCode.STOPPED.

        Raises RoleFailed if the backend or the lease is lost, ConfigError.
        """
        sock = bind_published(self._address)
        self._url = make_http_url(self._address, sock.getsockname()[1])
        await self.proxy.serve(sock)
        key, value = keys.server(self._who.pool, self._who.index), self._value()
        self._lease = await asyncio.to_thread(self._names.lease, key, value, has_beats=True)
        self.proxy.epoch = self._lease.epoch
        logger.info("server %d of pool %s listens at %s", self._who.index, self._who.pool, self._url)
        tasks = {asyncio.create_task(self._heartbeat()), asyncio.create_task(self._live())}
        try:
            while not (stopping.is_set() or self._shutdown.is_set()):
                done, _ = await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            return ExitCode.STOPPED
        finally:
            await self._end(tasks)

    async def _end(self, tasks: set[asyncio.Task[None]]) -> None:
        lost = self.proxy.lifecycle == "stale"
        has_answered = bool(self.proxy.version) or (self._frozen and self.proxy.lifecycle == "serving")
        self.proxy.enter("stopping")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._report_use)
        if has_answered and not self._backend.alive():
            # running requests return to their clients with the tokens so far
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._backend.request("/pause_generation", {"mode": "abort"})
        await self.proxy.close()
        await self._backend.stop()
        if self._lease and not lost:
            with contextlib.suppress(OSError, HpcRlError):
                await asyncio.to_thread(self._lease.release)

    def _value(self) -> dict[str, Any]:
        receiver = self._backend.receiver
        return {
            "url": self._url,
            "version": self._loading or self.proxy.version,
            # without `paused` and later releases, which would cost two writes per publish
            "state": "serving" if self.proxy.version and self._is_released else self.proxy.lifecycle,
            "attempt": self._who.attempt,
            "incarnation": self._who.incarnation,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            # the trainer then publishes all values
            **({"held": self.proxy.held} if self.proxy.held else {}),
            **({"lacks_files": True} if self._lacks_files else {}),
            **({"receiver": asdict(receiver)} if receiver else {}),
        }

    @property
    def _is_released(self) -> bool:
        return self.proxy.lifecycle == RELEASED

    async def _heartbeat(self) -> None:
        assert self._lease is not None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):  # wait_for of Python 3.11 can swallow a cancellation
                    await self._changed.wait()
            self._changed.clear()
            value = self._value()
            if not self._lease.is_due(value):
                continue
            try:
                await asyncio.to_thread(self._lease.renew, value)
            except Stale as error:
                self.proxy.enter("stale")
                raise RoleFailed(
                    f"another process now runs server {self._who.index}, so this process stops: {error}"
                ) from error
            # a shared file system may fail for a while; readers see the age of the lease
            except OSError as error:
                logger.warning("the server can't write its heartbeat and tries again: %s", error)

    def _report_use(self) -> None:
        """Record the busy time if it has grown. An error of the file system is only logged."""
        if (busy_s := round(self.proxy.busy_s, 3)) == self._reported_s:
            return
        path = self._trial.attempt(self._who.attempt).server_use(self._who.index, self._who.incarnation)
        try:
            path.parent.mkdir(exist_ok=True)
            use: dict[str, Any] = {"busy_s": busy_s, "request_s": round(self.proxy.request_s, 3)}
            use |= {"requests": self.proxy.num_requests, "decode": self.proxy.decode_speed.sums}
            write_atomic(path, json.dumps(use), durable=False)
            self._reported_s = busy_s
        except OSError as error:
            logger.warning("the server can't record its busy time, so `hpc-rl report` lacks it: %s", error)

    async def _live(self) -> None:
        if self._memory:
            await self._memory.wait_for_start()
        await self._start()
        follow_at = 0.0
        report_at = time.monotonic() + USE_EVERY_S
        while True:
            if time.monotonic() >= report_at:
                await asyncio.to_thread(self._report_use)
                report_at = time.monotonic() + USE_EVERY_S
            reason = self._backend.alive()
            if reason:
                raise RoleFailed(f"the server has lost its inference engine: {reason}")
            if self._memory and self._memory.problem:
                raise RoleFailed(self._memory.problem)
            if time.monotonic() >= follow_at and not self._is_released:
                await self._follow()
                follow_at = time.monotonic() + FOLLOW_S
            await asyncio.sleep(CHECK_S)

    async def _start(self) -> None:
        if not self._base and self._current() is None:
            logger.info("the server waits until the trainer publishes the first weights")
        while (current := self._current()) is None and not self._base:
            await asyncio.sleep(CHECK_S)
        while True:
            base = self._base, self._label
            path, self._loading = (current["path"], current["label"]) if current else base
            self.proxy.enter("loading")
            try:
                await self._backend.start(path, self._loading)
                break
            except Damaged as error:
                form = "the server can't load weights %s and waits until the trainer publishes others: %s"
                logger.error(form, self._loading, error)
                await self._wait_for_others(current)
                current = self._current()
            except (ConfigError, OSError, ValueError) as error:
                newer = self._current()
                if newer == current:
                    # published weights may be whole again after a restart
                    kind = RoleFailed if current else ConfigError
                    raise kind(f"the checkpoint at {path} can't be served: {error}") from error
                form = "loading %s failed (%s), but other weights are current now, so the server loads those"
                logger.info(form, path, error)
                current = newer
        self.proxy.version, self._loading = self._loading, ""
        self.proxy.held = self.proxy.version if current and "servers" in current else ""
        self.proxy.enter("serving" if self.proxy.version or self._frozen else "waiting")
        label = self.proxy.version or "without a version"
        logger.info("the server is %s, with weights %s from %s", self.proxy.state, label, path)

    async def _wait_for_others(self, current: dict[str, Any] | None) -> None:
        """Ask for weights with all values, and wait until other files are published."""
        self._lacks_files = True
        self._changed.set()
        while (self._current() or current) == current:
            await asyncio.sleep(CHECK_S)
        self._lacks_files = False

    def _current(self) -> dict[str, Any] | None:
        """Return the record of the weights to serve."""
        if self._frozen:
            return None
        held = self._find_held()
        return held if held or self._evaluates else load_json(self._trial.current_weights)

    def _find_current(self) -> dict[str, Any] | None:
        """Return the record as `_current`; a server that is not held reads one file only."""
        if self._frozen or self.proxy.held or self._evaluates:
            return self._current()
        return load_json(self._trial.current_weights)

    def _find_held(self) -> dict[str, Any] | None:
        """Return the record of the weights that this server must stay at, if any."""
        record = None if self._frozen else load_json(self._trial.held_weights)
        key = keys.server(self._who.pool, self._who.index)
        return record if record and (self._evaluates or key in record["servers"]) else None

    async def _follow(self) -> None:
        """Load weights whose publication was missed, and end a pause that was forgotten."""
        proxy, now = self.proxy, time.monotonic()
        self._num_checks += 1
        is_for_held = not proxy.held and self._num_checks % HELD_EVERY == 0
        current = await asyncio.to_thread(self._find_held if is_for_held else self._find_current)
        if is_for_held and current is None:
            return
        if current is not None:
            await self._hold(current)
        if proxy.receiving:
            if current and not proxy.is_updating and now - proxy.last_control_at > RECEIVE_LIMIT_S:
                await self._load(current)
            return
        if current and not proxy.held and is_older(proxy.version, current["label"]):
            if self._newer[0] != current["label"]:
                self._newer = (current["label"], now)
            if now - self._newer[1] >= SELF_LOAD_AFTER_S:
                await self._load(current)
            return
        self._lacks_files = False
        if proxy.pause_mode and now - proxy.last_control_at > PAUSE_LIMIT_S:
            form = "the trainer paused this server, and has sent nothing for %.0f s, so the server continues "
            form += "with weights %s"
            logger.warning(form, PAUSE_LIMIT_S, proxy.version)
            await proxy.control("/continue_generation", {})

    async def _hold(self, current: dict[str, Any]) -> None:
        """Stay at a version, or end that, if the call of the trainer was lost."""
        held = current["label"] if "servers" in current else ""
        if held == self.proxy.held:
            return
        body = {"model_path": current["path"], "weight_version": held}
        status, answer = await self.proxy.control("/hold_weights", body)
        if status != 200:
            form = "the server can't load weights %s for an evaluation and tries again later: %s"
            logger.warning(form, held, answer)

    async def _load(self, current: dict[str, Any]) -> None:
        body = {"model_path": current["path"], "weight_version": current["label"], "flush_cache": True}
        logger.info("the trainer did not send weights %s: the server loads them from files", current["label"])
        pause = not self.proxy.pause_mode
        resumes = pause or bool(self.proxy.receiving)
        if pause:
            await self.proxy.control("/pause_generation", {"mode": "retract"})
        elif self.proxy.pause_mode == "in_place":
            body["flush_cache"] = False
        try:
            status, answer = await self.proxy.control("/update_weights_from_disk", body)
            if status != 200:
                form = "the server can't load weights %s and tries again later: %s"
                logger.warning(form, current["label"], answer)
                self._lacks_files = status == DAMAGED_STATUS
                self._newer = (current["label"], time.monotonic())
        finally:
            if resumes:
                await self.proxy.control("/continue_generation", {})
