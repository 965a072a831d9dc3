"""Connections to a service: many clients at once, and strangers that send nothing."""

import asyncio
import contextlib
import socket

import pytest
from aiohttp import web
from patience import extend

from hpc_rl.core import http_service, net
from hpc_rl.core.auth import Access, Tokens
from hpc_rl.core.http_service import HttpService, find_access, make_application

TOKENS = Tokens({"control": "c" * 8, "data": "d" * 8})
REQUEST = b"GET /ping HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer dddddddd\r\n\r\n"


@web.middleware
async def check(request, handler):
    if find_access(request) == Access.NONE:
        raise web.HTTPUnauthorized
    return await handler(request)


async def ping(_request):
    return web.Response(text="pong")


@contextlib.asynccontextmanager
async def service():
    """Yield the port of a service."""
    app = make_application(TOKENS, check, 1 << 20)
    app.router.add_get("/ping", ping)
    http, listener = HttpService(app, close_timeout_s=0.1), net.bind("127.0.0.1")
    port = listener.getsockname()[1]
    await http.start(listener)
    try:
        yield port
    finally:
        await http.close()


@contextlib.asynccontextmanager
async def connections(number: int):
    """Yield a service's port, and this many connections to it."""
    async with service() as port, contextlib.AsyncExitStack() as stack:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
        for _, writer in opened:
            stack.callback(writer.close)
        yield opened


async def answer(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.readuntil(b"\r\n"), extend(30))


async def test_many_clients_that_connect_first_and_send_later_are_all_answered():
    async with connections(600) as opened:
        for _, writer in opened:
            writer.write(REQUEST)
        answers = await asyncio.gather(*(answer(reader) for reader, _ in opened))
        assert set(answers) == {b"HTTP/1.1 200 OK\r\n"}


async def test_idle_strangers_give_way_after_a_fair_chance(monkeypatch):
    monkeypatch.setattr(http_service, "MAX_STRANGERS", 8)
    monkeypatch.setattr(http_service, "FAIR_CHANCE_S", 0.3)
    async with connections(31) as opened:
        *idle, (reader, writer) = opened
        writer.write(REQUEST)
        assert await answer(reader) == b"HTTP/1.1 200 OK\r\n"
        closed = [reader.at_eof() or reader.exception() is not None for reader, _ in idle]
        assert closed[:22] == [True] * 22


async def test_a_stranger_is_closed_after_a_while_and_a_client_with_a_token_stays(monkeypatch):
    monkeypatch.setattr(http_service, "STRANGER_S", 0.2)
    async with connections(2) as ((known, known_writer), (stranger, _)):
        known_writer.write(REQUEST)
        assert await answer(known) == b"HTTP/1.1 200 OK\r\n"
        await known.readuntil(b"pong")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(stranger.read(), extend(30)) == b""
        known_writer.write(REQUEST)
        assert await answer(known) == b"HTTP/1.1 200 OK\r\n"


async def test_strangers_take_a_part_of_the_files_that_the_process_may_open(monkeypatch):
    for soft, expected in ((1024, 256), (65536, 4096), (http_service.resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(http_service.resource, "getrlimit", lambda _kind, soft=soft: (soft, soft))
        assert http_service.compute_max_strangers() == expected


async def test_a_closed_service_refuses_connections():
    async with service() as port:
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=extend(5)):
        pass
