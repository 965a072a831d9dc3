"""Bodies of requests to the services of the roles: decompressed bodies stay within bounds."""

import gzip
import http.client
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest
from patience import extend

MAX_BYTES = 4 << 20
SERVICE = f"""
import asyncio, socket
from aiohttp import web
from hpc_rl.core.auth import Tokens
from hpc_rl.core.http_service import HttpService, make_application, receive_body

async def answer(request):
    return web.Response(text=str(len(await receive_body(request, {MAX_BYTES}))))

@web.middleware
async def check(request, handler):
    return await handler(request)

async def main():
    app = make_application(Tokens({{"control": "c" * 40, "data": "d" * 40}}), check, {MAX_BYTES})
    app.router.add_post("/", answer)
    listener = socket.create_server(("127.0.0.1", 0))
    await HttpService(app, 1.0).start(listener)
    print(listener.getsockname()[1], flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


class Service:
    """A service in another process."""

    def __init__(self) -> None:
        argv = [sys.executable, "-c", textwrap.dedent(SERVICE)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())

    def ask(self, body: bytes, encoding: str = "gzip") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=extend(60))
        try:
            connection.request("POST", "/", body, {"Content-Encoding": encoding} if encoding else {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    @property
    def peak_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.fixture(scope="module")
def service():
    made = Service()
    yield made
    made.process.kill()
    made.process.communicate()


def bomb(num_mib: int) -> bytes:
    """Return so much white space, compressed as gzip: one block, over and over."""
    stream = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = stream.compress(b" ") + stream.flush(zlib.Z_FULL_FLUSH)
    block = stream.compress(b" " * (1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH)
    return head + block * num_mib


def test_a_gzip_bomb_is_refused_and_takes_little_memory(service):
    body = bomb(1024)
    assert len(body) < 2 << 20
    before = service.peak_bytes
    for _ in range(4):
        assert service.ask(body)[0] == 413
    assert service.peak_bytes - before < 64 << 20


def test_bodies_may_be_compressed_up_to_the_limit(service):
    data = os.urandom(1000) * 3000
    assert service.ask(gzip.compress(data)) == (200, str(len(data)))
    assert service.ask(zlib.compress(data), "deflate") == (200, str(len(data)))
    assert service.ask(data, "") == (200, str(len(data)))
    assert service.ask(gzip.compress(b"")) == (200, "0")
    assert service.ask(bytes(MAX_BYTES + 1), "")[0] == 413
    assert service.ask(gzip.compress(bytes(MAX_BYTES)))[0] == 200
    assert service.ask(gzip.compress(bytes(MAX_BYTES + 1)))[0] == 413


@pytest.mark.parametrize(
    "body",
    [b"no gzip", gzip.compress(b"x" * 99)[:-9], gzip.compress(b"x") * 2, b""],
    ids=["no gzip", "cut off", "two streams", "empty"],  # a stream holds the time at which it was made
)
def test_what_is_no_compressed_body_is_refused(service, body):
    status, text = service.ask(body)
    assert status == 400 and "can't be read" in text


def test_an_unknown_compression_is_refused(service):
    assert service.ask(b"x", "br")[0] == 415
