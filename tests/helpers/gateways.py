"""A gateway on a port of its own, and small servers for it that can be slow, wrong or away."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from channels import add_channel, flatten

from hpc_rl.core import net
from hpc_rl.core.http_service import HttpService
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.gateway.balance import BalancingRouter
from hpc_rl.gateway.gateway import Gateway, GatewaySettings
from hpc_rl.gateway.gateway_log import GatewayLog
from hpc_rl.gateway.requests import Bounds
from hpc_rl.gateway.routes import make_gateway_routes
from hpc_rl.name_resolve import keys
from hpc_rl.rollout.routes import make_application
from hpc_rl.servers.channel import ChannelRequest

TOKENS = {"control": "control-token", "data": "data-token"}


class FakeServer:
    """Answers one sample after the other with `reply(body)`: an answer, or a status."""

    def __init__(self, version: str = "0.1") -> None:
        self.version, self.bodies, self.cancelled = version, [], 0
        self.reply = lambda body: answer([3 + len(body["input_ids"]) % 4, 1], self.version)
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None:
        app = web.Application()
        self._channel = add_channel(app, self._generate)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._channel.close(0.1)
        await self._runner.cleanup()

    def announce(self, names: Any, index: int = 0, state: str = "serving") -> Any:
        value = {"url": self.url, "version": self.version, "state": state}
        return names.lease(keys.server("rollout", index), value, 60.0)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"state": "serving"})

    async def _generate(self, request: ChannelRequest) -> Any:
        body = flatten(request.body)
        self.bodies.append(body)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if not isinstance(body["rid"], list):
            return self.reply(body)
        names = ("input_ids", "sampling_params", "rid")
        parts = zip(*(body[name] for name in names), strict=True)
        replies = [self.reply(dict(zip(names, part, strict=True))) for part in parts]
        return replies[0] if isinstance(replies[0], int) else replies


def answer(ids: list[int], version: str, finish: str = "stop") -> dict[str, Any]:
    spans = [{"version": version, "start": 0, "end": len(ids)}]
    logprobs = [[-(50 + token) / 64, token, None] for token in ids]
    meta = {"finish_reason": {"type": finish}, "output_token_logprobs": logprobs, "weight_versions": spans}
    return {"output_ids": ids, "meta_info": {**meta, "weight_version": version}}


class Caller:
    """Raw HTTP to a gateway."""

    def __init__(self, gateway: Gateway, url: str, session: aiohttp.ClientSession, token: str) -> None:
        self.gateway, self.url, self.session, self.token = gateway, url, session, token

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.token}", **headers}
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if response.content_type == "application/json" else raw

    async def get(self, path: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.token}"}
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[str]:
        """Return the data of all events."""
        headers = {"Authorization": f"Bearer {self.token}"}
        async with self.session.post(
            self.url + path, json={**body, "stream": True}, headers=headers
        ) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


@contextlib.asynccontextmanager
async def open_gateway(
    names: Any,
    tokenizer: Tokenizer,
    folder: Path,
    settings: GatewaySettings | None = None,
    bounds: Bounds | None = None,
    tokens: dict[str, str] = TOKENS,
):
    """Yield a Caller of a gateway for the servers that `names` knows."""
    log = GatewayLog(folder)
    bounds = bounds or Bounds(max_new_tokens=32, context=4096, vocab_size=16)
    router = BalancingRouter(names, tokens["data"], setup_timeout_s=0.3, request_retries=0, poll_s=0.02)
    async with router, aiohttp.ClientSession() as session:
        gateway = Gateway(router, tokenizer, log, bounds, settings, "toy")
        service = HttpService(make_application(make_gateway_routes(gateway), tokens), close_timeout_s=0.1)
        listener = net.bind("127.0.0.1")
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await service.start(listener)
        try:
            yield Caller(gateway, url, session, tokens["data"])
        finally:
            await service.close()
            log.close()
