"""HTTP services of the roles: their tokens, their connections, and what a malformed request is answered.

Every process that reaches a port can open connections there. One that has shown no token of the trial is
closed after a while, and of many the oldest: a flood of them takes no file descriptors from the role.
"""

import asyncio
import logging
import socket
import time

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_protocol import RequestHandler

from hpc_rl.auth import Access, Tokens

MAX_STRANGERS = 128  # open connections that have shown no token
STRANGER_S = 20.0  # for which one of them stays open
ACCEPTED_AT_ONCE = 32  # between two looks at the limits
KERNEL_QUEUE = 4096  # connections that wait to be accepted
MALFORMED = (web.RequestPayloadError, HttpProcessingError)
TOKENS = web.AppKey("tokens", Tokens)


def application(tokens: Tokens, check: Middleware, max_body_bytes: int) -> web.Application:
    """Return an application whose requests pass `check`, which calls access_of."""
    app = web.Application(middlewares=[_refuse_malformed, check], client_max_size=max_body_bytes)
    app[TOKENS] = tokens
    return app


class HttpService:
    """An application that answers on a socket which listens.

    Args:
        app: Of `application`.
        close_timeout_s: For what still runs when it is closed.
        cancels: A client that hangs up cancels its handler.
    """

    def __init__(self, app: web.Application, close_timeout_s: float, cancels: bool = False) -> None:
        app[SERVICE] = self
        self._runner = web.AppRunner(
            app, handler_cancellation=cancels, access_log=None, shutdown_timeout=close_timeout_s
        )
        self._strangers: dict[RequestHandler, float] = {}  # since when, the oldest first
        self._server: asyncio.Server | None = None
        self._closing_old: asyncio.Task[None] | None = None

    async def start(self, sock: socket.socket) -> None:
        await self._runner.setup()
        logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, sock=sock, backlog=ACCEPTED_AT_ONCE)
        sock.listen(KERNEL_QUEUE)
        self._closing_old = asyncio.create_task(self._close_old())

    async def close(self) -> None:
        if self._closing_old:
            self._closing_old.cancel()
        if self._server:
            self._server.close()
        await self._runner.cleanup()

    def keep(self, connection: RequestHandler) -> None:
        """Let a connection stay open: it has shown a token."""
        self._strangers.pop(connection, None)

    def _connection(self) -> RequestHandler:
        assert self._runner.server is not None
        connection = self._runner.server()
        while len(self._strangers) >= MAX_STRANGERS:
            self._close(next(iter(self._strangers)))
        self._strangers[connection] = time.monotonic()
        return connection

    async def _close_old(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            old = time.monotonic() - STRANGER_S
            for connection in [one for one, since in self._strangers.items() if since < old]:
                self._close(connection)

    def _close(self, connection: RequestHandler) -> None:
        del self._strangers[connection]
        if connection.transport is not None:  # else the client has hung up
            connection.transport.abort()


SERVICE = web.AppKey("service", HttpService)


def access_of(request: web.Request) -> Access:
    """Return what a request may do by its token, in a header or as the prefix of its path."""
    prefix = request.path.split("/")[2] if request.path.startswith("/t/") else ""
    access = request.app[TOKENS].access(request.headers.get("Authorization", ""), prefix)
    service = request.app.get(SERVICE)
    if access > Access.NONE and service is not None:
        service.keep(request.protocol)
    return access


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
    """Return whether to log it: any client can send what is not HTTP, and as often as it likes."""
    return not (record.exc_info and isinstance(record.exc_info[1], MALFORMED))
