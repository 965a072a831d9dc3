"""HTTP services of the roles: tokens, connections, and answers to malformed requests.

Any process that reaches a port can open connections. A connection that never showed a token of the trial (a
stranger) is closed after a while. Strangers get only a part of the file descriptors: further connections wait
in the kernel until the oldest stranger has had time for a request and is closed.
"""

import asyncio
import logging
import resource
import socket
import time
import zlib

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_protocol import RequestHandler

from hpc_rl.core.auth import Access, Tokens

logger = logging.getLogger(__name__)

MAX_STRANGERS = 4096  # open connections without a token
SHARE_OF_FILES = 4  # strangers get at most one in this many of the process's file descriptors
FAIR_CHANCE_S = 2.0  # no stranger is closed earlier to make room: a busy client connects, then sends
STRANGER_S = 20.0  # then a stranger is closed
ACCEPTED_AT_ONCE = 32  # then other work gets its turn
PAUSE_S = 0.1  # before the next try, after accepting failed
KERNEL_QUEUE = 4096  # connections that wait to be accepted
MALFORMED = (web.RequestPayloadError, HttpProcessingError)
PIECE_BYTES = 1 << 18  # decompressed at a time
WINDOW_BITS = {"gzip": 31, "deflate": 15}  # of zlib, by Content-Encoding
TOKENS = web.AppKey("tokens", Tokens)


def make_application(tokens: Tokens, check: Middleware, max_body_bytes: int) -> web.Application:
    """Return an application whose requests pass `check`, which calls `find_access`."""
    app = web.Application(middlewares=[_refuse_malformed, check], client_max_size=max_body_bytes)
    app[TOKENS] = tokens
    return app


class HttpService:
    """An application that serves a listening socket.

    Args:
        app: Application returned by `make_application`.
        close_timeout_s: Time that running requests get when the service is closed.
        cancels: Whether a client that hangs up cancels its handler.
    """

    def __init__(self, app: web.Application, close_timeout_s: float, cancels: bool = False) -> None:
        app[SERVICE] = self
        # aiohttp would decompress a body of any size: see receive_body
        self._runner = web.AppRunner(
            app,
            handler_cancellation=cancels,
            access_log=None,
            shutdown_timeout=close_timeout_s,
            auto_decompress=False,
        )
        self._strangers: dict[RequestHandler, float] = {}  # connection -> its start; the oldest first
        self._listener: socket.socket | None = None
        self._connecting: dict[RequestHandler, asyncio.Task[None]] = {}  # accepted, without a transport yet
        self._closing_old: asyncio.Task[None] | None = None

    async def start(self, sock: socket.socket) -> None:
        await self._runner.setup()
        logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
        sock.setblocking(False)
        sock.listen(KERNEL_QUEUE)
        self._listener = sock
        asyncio.get_running_loop().add_reader(sock, self._accept)
        self._closing_old = asyncio.create_task(self._close_old())

    async def close(self) -> None:
        if self._closing_old:
            self._closing_old.cancel()
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await self._runner.cleanup()

    def keep(self, connection: RequestHandler) -> None:
        """Let a connection stay open, because it has shown a token."""
        self._strangers.pop(connection, None)

    def _accept(self) -> None:
        """Accept waiting connections, while strangers leave room."""
        listener = self._listener
        if listener is None:
            return
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._has_room():
                return self._pause(listener)
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("this HTTP service can't accept new connections for a moment: %s", error)
                return self._pause(listener)
            self._begin(sock)

    def _pause(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _begin(self, sock: socket.socket) -> None:
        assert self._runner.server is not None
        sock.setblocking(False)
        connection = self._runner.server()
        self._strangers[connection] = time.monotonic()
        self._connecting[connection] = asyncio.create_task(self._connect(connection, sock))

    async def _connect(self, connection: RequestHandler, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        except OSError as error:
            logger.info("a client closed its connection before it sent a request (harmless): %s", error)
        finally:
            del self._connecting[connection]

    def _has_room(self) -> bool:
        """Return whether one more stranger may connect; close an old one to make room."""
        limit = compute_max_strangers()
        while len(self._strangers) >= limit:
            oldest, since = next(iter(self._strangers.items()))
            if not self._has_gone(oldest) and since > time.monotonic() - FAIR_CHANCE_S:
                return False
            self._close(oldest)
        return True

    async def _close_old(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            old = time.monotonic() - STRANGER_S
            for connection, since in list(self._strangers.items()):
                if since < old or self._has_gone(connection):
                    self._close(connection)

    def _has_gone(self, connection: RequestHandler) -> bool:
        return connection.transport is None and connection not in self._connecting

    def _close(self, connection: RequestHandler) -> None:
        del self._strangers[connection]
        if connection.transport is not None:
            connection.transport.abort()


def compute_max_strangers() -> int:
    """Return how many connections without a token this process accepts at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_STRANGERS if soft == resource.RLIM_INFINITY else min(MAX_STRANGERS, soft // SHARE_OF_FILES)


SERVICE = web.AppKey("service", HttpService)


def find_access(request: web.Request) -> Access:
    """Return the rights of a request by its token, in a header or as the prefix of its path."""
    prefix = request.path.split("/")[2] if request.path.startswith("/t/") else ""
    access = request.app[TOKENS].find_access(request.headers.get("Authorization", ""), prefix)
    service = request.app.get(SERVICE)
    if access > Access.NONE and service is not None:
        service.keep(request.protocol)
    return access


async def receive_body(request: web.Request, max_bytes: int) -> bytes:
    """Return the body of a request, decompressed. At most `max_bytes` of it are ever in memory.

    Raises HTTPRequestEntityTooLarge, HTTPUnsupportedMediaType; RequestPayloadError for an invalid body.
    """
    body = await request.clone(client_max_size=max_bytes).read()
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in WINDOW_BITS:
        known = " or ".join(WINDOW_BITS)
        raise web.HTTPUnsupportedMediaType(
            text=f"the body of the request must be compressed with {known}, or not at all"
        )
    return await asyncio.to_thread(_decompress, body, WINDOW_BITS[encoding], max_bytes)


def _decompress(data: bytes, window_bits: int, max_bytes: int) -> bytes:
    """Decompress data. Raises as `receive_body`."""
    stream, found = zlib.decompressobj(window_bits), bytearray()
    view, at = memoryview(data), 0
    try:
        while at < len(data) and not stream.eof:
            piece: memoryview | bytes = view[at : at + PIECE_BYTES]
            at += len(piece)
            while piece:
                found += stream.decompress(piece, PIECE_BYTES)
                if len(found) > max_bytes:
                    found.clear()  # the exception lasts for a while
                    raise web.HTTPRequestEntityTooLarge(max_bytes)
                piece = stream.unconsumed_tail
    except zlib.error as error:
        raise web.RequestPayloadError(f"its body can't be decompressed: {error}") from error
    if not stream.eof or stream.unused_data or at < len(data):
        raise web.RequestPayloadError("its body must be one complete compressed stream")
    return bytes(found)


@web.middleware
async def _refuse_malformed(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except MALFORMED as error:
        return web.Response(status=400, text=f"the request can't be read: {error}"[:200])
    except ConnectionResetError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        return web.Response(status=499)  # the client hung up


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Return whether to log an error: any client can send invalid HTTP, as often as it likes."""
    return not (record.exc_info and isinstance(record.exc_info[1], MALFORMED))
