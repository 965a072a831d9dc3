"""The processes of one replica on its other nodes: tensor parallel over more GPUs than a node has.

The first node has the role's usual process: proxy, lease, and the server program that answers requests. Each
other node has a member, which runs the same program as a part of the replica's process group, and keeps the
node's copy of the model. Members obey the first node's requests by HTTP, with the control token. An open
request shows each side that the other one lives: if a member or its program is lost, so is the replica, and
all its processes end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Protocol

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from hpc_rl.core.auth import Access, Tokens, parse_json_object
from hpc_rl.core.errors import ConfigError, Damaged, ExitCode, HpcRlError, RoleFailed
from hpc_rl.core.files import AWAY_S, wait_for_path
from hpc_rl.core.http_service import HttpService, find_access, make_application, receive_body
from hpc_rl.core.net import bind_published, make_http_url, notice_silence
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.types import WeightVersion
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.servers.base import Backend
from hpc_rl.servers.client import DAMAGED_STATUS, open_session
from hpc_rl.weight_files.model_copy import ModelCopy

logger = logging.getLogger(__name__)

CHECK_S = 0.5  # between checks of the member's program
STOP_S = 20.0  # for the first node to end the program of all nodes
MAX_BODY_BYTES = 1 << 20
NO_LIMIT = aiohttp.ClientTimeout(total=None)
Rendezvous = tuple[str, int]  # address and port of the process group, on the first node


class SpanningBackend(Backend, Protocol):
    """A backend whose program can run on several nodes."""

    async def start_member(self, path: str) -> None:
        """Start the program on another node than the first; return once its process runs.

        Raises ConfigError, RoleFailed, OSError.
        """


class Members:
    """The members of a replica, as its first node uses them. Without members, all calls do nothing."""

    def __init__(
        self,
        names: NameResolve,
        keys: Sequence[str] = (),
        token: str = "",
        rendezvous: Rendezvous | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Use the members that publish their URLs with `keys`, within `timeout_s`."""
        self._names, self._keys, self._timeout_s = names, list(keys), timeout_s
        self._headers, self._rendezvous = {"Authorization": f"Bearer {token}"}, rendezvous
        self._session: aiohttp.ClientSession | None = None
        self._urls: list[str] = []
        self._watches: list[asyncio.Task[str]] = []

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def problem(self) -> str:
        """Why the replica has lost a member; empty if it has not."""
        return next((watch.result() for watch in self._watches if watch.done()), "")

    async def wait_for_loss(self) -> None:
        """Wait until a member is lost. Raises RoleFailed."""
        await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        raise RoleFailed(self.problem)

    async def start(self, model: str, copy: ModelCopy | None, version: str) -> None:
        """Let each member start its program on a checkpoint, or on its node's copy of a version.

        The copies do not change until `release`. Raises RoleFailed, Damaged, OSError.
        """
        await self._connect()
        body = {"model": model, "rendezvous": self._rendezvous}
        await self._ask_all("/start", body | (_describe(copy, version) if copy else {}))

    async def prepare(self, copy: ModelCopy, version: str) -> None:
        """Bring the copy of each node to a version. Raises Damaged, OSError."""
        await self._connect()
        await self._ask_all("/prepare", _describe(copy, version))

    async def hold(self, copy: ModelCopy, version: str) -> None:
        """Keep the copy of each node as it is, until `release`. Raises OSError."""
        await self._ask_all("/hold", _describe(copy, version))

    async def release(self, drops: ModelCopy | None = None) -> None:
        """Let the copies change again; remove the copy `drops` of each node."""
        with contextlib.suppress(OSError):  # of a lost member
            await self._ask_all("/release", {"drops": str(drops.folder) if drops else ""})

    async def announce_stop(self) -> None:
        """Tell the members that this replica ends: the end of their program is not a failure."""
        if self._session is not None:
            with contextlib.suppress(OSError, Damaged, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._ask_all("/stop", {})

    async def close(self) -> None:
        """Let the members end."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._watches = []
        if self._session is not None:
            await self._session.close()

    async def _connect(self) -> None:
        """Find the members, and watch them. Raises RoleFailed."""
        if self._session is not None or not self._keys:
            return
        try:
            found = [asyncio.to_thread(self._names.wait, key, self._timeout_s) for key in self._keys]
            self._urls = [record["url"] for record in await asyncio.gather(*found)]
        except TimeoutError as error:
            raise RoleFailed(f"a node of this replica did not start its process: {error}") from error
        self._session = open_session()
        self._watches = [asyncio.create_task(self._watch(url)) for url in self._urls]

    async def _watch(self, url: str) -> str:
        """Return why a member is lost."""
        assert self._session is not None
        try:
            async with self._session.get(f"{url}/watch", headers=self._headers, timeout=NO_LIMIT) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError) as error:
            text = f"its connection broke: {type(error).__name__}"
        return f"the part of this replica at {url} is lost: {text or 'its process has ended'}"

    async def _ask_all(self, path: str, body: dict[str, Any]) -> None:
        await gather_calls(*(self._ask(url, path, body) for url in self._urls))

    async def _ask(self, url: str, path: str, body: dict[str, Any]) -> None:
        assert self._session is not None
        try:
            async with self._session.post(
                url + path, json=body, headers=self._headers, timeout=NO_LIMIT
            ) as answer:
                status, text = answer.status, await answer.text()
        except aiohttp.ClientError as error:
            raise OSError(f"{url} does not answer: {type(error).__name__}: {error}") from error
        if status == DAMAGED_STATUS:
            raise Damaged(f"{url}: {text}")
        if status != 200:
            raise OSError(f"{url}: {text}")


def _describe(copy: ModelCopy, version: str) -> dict[str, str]:
    return {"folder": str(copy.folder), "version": version}


async def gather_calls(*calls: Awaitable[Any]) -> None:
    """Wait for all calls; the first that fails cancels the others, and raises its error."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class Member:
    """The part of a replica on one of its other nodes.

    `make_backend` returns the backend for a rendezvous; `open_folder` prepares the directory of copies that
    the first node has chosen, or raises ConfigError.
    """

    def __init__(
        self,
        make_backend: Callable[[Rendezvous], SpanningBackend],
        open_folder: Callable[[Path], None],
        versions: Path,
        copies: NodeCopies,
        tokens: dict[str, str],
    ) -> None:
        self._make_backend, self._open_folder = make_backend, open_folder
        self._versions, self._copies, self._tokens = versions, copies, tokens
        self._backend: SpanningBackend | None = None
        self._held = ExitStack()  # the copies that must not change
        self._opened: set[Path] = set()  # directories that this process holds
        self._lock = asyncio.Lock()
        self._is_stopping = False
        self._problem = ""  # why the replica is lost

    async def run(self, address: str, publish: Callable[[str], None], stopping: threading.Event) -> int:
        """Serve the first node until the replica ends; return ExitCode.STOPPED.

        If it was not announced, or `stopping` set, the end of the program or of the first node is a failure:
        raises RoleFailed.
        """
        sock = bind_published(address)
        notice_silence(sock)  # its connections inherit this
        app = make_application(Tokens(self._tokens), self._check, MAX_BODY_BYTES)
        app.router.add_get("/watch", self._watch)
        for path, call in self._CALLS.items():
            app.router.add_post(path, self._answer(call))
        service = HttpService(app, close_timeout_s=1.0, cancels=True)
        await service.start(sock)
        await asyncio.to_thread(publish, make_http_url(address, sock.getsockname()[1]))
        leave_at = float("inf")
        try:
            while True:
                ended = self._backend.alive() if self._backend else ""
                if stopping.is_set() or self._is_stopping:
                    leave_at = min(leave_at, time.monotonic() + STOP_S)
                    if ended or self._problem or time.monotonic() >= leave_at:
                        return ExitCode.STOPPED
                elif ended or self._problem:
                    self._problem = self._problem or ended
                    raise RoleFailed(self._problem)
                await asyncio.sleep(CHECK_S)
        finally:
            if self._backend is not None:
                await self._backend.stop()
            self._held.close()
            await service.close()

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if find_access(request) < Access.CONTROL:
            return web.Response(status=401, text="this request needs the control token of the trial")
        return await handler(request)

    def _answer(self, call: Callable[[Member, dict[str, Any]], Awaitable[None]]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body = parse_json_object(await receive_body(request, MAX_BODY_BYTES))
            try:
                async with self._lock:
                    await call(self, body)
            except Damaged as error:
                return web.Response(status=DAMAGED_STATUS, text=str(error))
            except (HpcRlError, OSError, ValueError) as error:
                logger.error("request %s of the replica's first node failed: %s", request.path, error)
                return web.Response(status=500, text=f"{type(error).__name__}: {error}")
            return web.Response()

        return handle

    async def _watch(self, _request: web.Request) -> web.Response:
        """Answer with the reason once this member ends. Its caller is the first node."""
        try:
            while not self._problem:
                await asyncio.sleep(CHECK_S)
        except asyncio.CancelledError:
            self._problem = "the first node of this replica is gone"
            raise
        return web.Response(text=self._problem)

    async def _start(self, body: dict[str, Any]) -> None:
        if self._backend is not None:
            raise ValueError("the inference engine of this server is already running")
        address, port = body["rendezvous"]
        if "folder" in body:
            await self._hold(body)
            model = str(self._open_copy(body).model)
        else:
            model = body["model"]
            if not await asyncio.to_thread(wait_for_path, Path(model), time.monotonic() + AWAY_S):
                raise ConfigError(f"{model} does not exist on this node")
            opened = self._copies.open_copy(model)
            model = await asyncio.to_thread(self._held.enter_context, opened)
        self._backend = self._make_backend((str(address), int(port)))
        await self._backend.start_member(model)

    async def _prepare(self, body: dict[str, Any]) -> None:
        copy = self._open_copy(body)
        num_bytes = await asyncio.to_thread(copy.bring_to, WeightVersion.parse(body["version"]))
        if num_bytes:
            logger.info("weights %s are in %s: %.3f GB", body["version"], copy.model, num_bytes / 1e9)

    async def _hold(self, body: dict[str, Any]) -> None:
        held = self._open_copy(body).hold(WeightVersion.parse(body["version"]))
        await asyncio.to_thread(self._held.enter_context, held)

    async def _release(self, body: dict[str, Any]) -> None:
        self._held.close()
        if body.get("drops"):
            await asyncio.to_thread(shutil.rmtree, body["drops"], ignore_errors=True)

    async def _stop(self, _body: dict[str, Any]) -> None:
        self._is_stopping = True

    def _open_copy(self, body: dict[str, Any]) -> ModelCopy:
        folder = Path(body["folder"])
        if folder.parent not in self._opened:
            self._open_folder(folder)
            self._opened.add(folder.parent)
        return ModelCopy(folder, self._versions)

    _CALLS: ClassVar = {
        "/start": _start,
        "/prepare": _prepare,
        "/hold": _hold,
        "/release": _release,
        "/stop": _stop,
    }
