"""Plays SGLang's program on the nodes of one replica: quick to start, and strict about what each node has.

On the first node the embedded engine answers. A program on another node only joins, at the address of
`--dist-init-addr`, and then has a part of the model: it reads the same path on its node whenever weights are
loaded, and other bytes than the first node's are an error. As with SGLang, all end with the first that ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from hpc_rl.config.options.inference import EmbeddedConfig
from hpc_rl.servers.embedded.backend import EmbeddedBackend

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.5.23"


def make_stand_in(folder: Path) -> dict[str, str]:
    """Make a package `sglang` in a folder; return the options of a trial whose servers run it."""
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang/launch_server.py").write_text("from sglang_stand_in import main\n\nmain()\n")
    info = folder / f"sglang-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n")
    path = ":".join(map(str, (folder, Path(__file__).parent, ROOT)))
    return {
        "launcher.inference_server_python": sys.executable,
        "launcher.inference_server_env_vars": f"PYTHONPATH={path},OMP_NUM_THREADS=1",
    }


def main() -> None:
    words, given = sys.argv[1:], dict[str, str]()
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            given[word] = "" if following.startswith("--") else following
    host, _, port = given["--dist-init-addr"].rpartition(":")
    is_first = given["--node-rank"] == "0"
    print(f"node {given['--node-rank']} of {given['--nnodes']} joins at {host}:{port}", flush=True)
    asyncio.run(First(given).run(host, int(port)) if is_first else follow(host, int(port), given))


async def follow(host: str, port: int, given: dict[str, str]) -> None:
    """Join, and answer each path with the digest of the weights there, until the first node ends."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
            break
        except OSError:
            await asyncio.sleep(0.1)
    writer.write(f"{digest(Path(given['--model-path']))}\n".encode())
    while line := await reader.readline():
        writer.write(f"{digest(Path(line.decode().strip()))}\n".encode())
    sys.exit("the first node has ended")


def digest(model: Path) -> str:
    files = sorted(model.glob("*.safetensors"))
    return (
        hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else "no weights"
    )


class First:
    """The program of the first node."""

    def __init__(self, given: dict[str, str]) -> None:
        self.given, self.others = given, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()
        self.backend = EmbeddedBackend(
            EmbeddedConfig(dtype="float32"), tokenizer_path=given["--tokenizer-path"]
        )
        self.has_all = asyncio.Event()

    async def run(self, host: str, port: int) -> None:
        server = await asyncio.start_server(self.join, host, port)
        await self.has_all.wait()
        model = self.given["--model-path"]
        for reader, _ in self.others:
            assert (await reader.readline()).decode().strip() == digest(Path(model)), "nodes differ"
        await self.backend.start(model, self.given["--weight-version"])
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self.given["--host"], int(self.given["--port"])).start()
        async with server:
            await server.serve_forever()

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.others.append((reader, writer))
        if len(self.others) == int(self.given["--nnodes"]) - 1:
            self.has_all.set()
        while not (reader.at_eof() or reader.exception()):
            await asyncio.sleep(0.2)
        print("a node is lost", flush=True)
        os._exit(1)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        if path == "/health":
            return web.Response()
        if path == "/update_weights_from_disk" and (wrong := await self.find_other(body["model_path"])):
            return web.json_response({"success": False, "message": wrong}, status=400)
        if path != "/generate":
            status, answer = await self.backend.request(path, body)
            return web.json_response(answer, status=status)
        return await self.generate(request, body)

    async def find_other(self, model: str) -> str:
        """Return that another node has other weights at this path; empty if all have the same."""
        own = digest(Path(model))
        for number, (reader, writer) in enumerate(self.others, 1):
            writer.write(f"{model}\n".encode())
            if (await reader.readline()).decode().strip() != own:
                return f"node {number} has other weights at {model}"
        return ""

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Answer with one event for each sample, as SGLang does at the end of a stream."""
        body.pop("stream", None)
        several = isinstance(body["sampling_params"], list)
        for one in body["sampling_params"] if several else [body["sampling_params"]]:
            one.pop("stream_interval", None)
        status, answers = await self.backend.request("/generate", body)
        if status != 200:
            return web.json_response(answers, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, one in enumerate(answers if isinstance(answers, list) else [answers]):
            text = web.json_response({**one, "index": index}).text
            await response.write(f"data: {text}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response
