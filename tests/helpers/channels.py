"""The channel of a small server: it answers the trial's own clients in SGLang's words."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from hpc_rl.servers.channel import CHANNEL, ChannelRequest, ChannelServer
from hpc_rl.servers.wire import convert_to_parts


def flatten(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request as SGLang's clients write it: one sample without lists."""
    return {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in body.items()
    }


def add_channel(app: web.Application, answer: Callable[[ChannelRequest], Awaitable[Any]]) -> ChannelServer:
    """Serve requests with `answer`, which returns a native answer (or a list of them), or a status."""

    async def generate(request: ChannelRequest, _send: Any) -> tuple[int, Any]:
        found = await answer(request)
        return (found, {"error": "x"}) if isinstance(found, int) else (200, convert_to_parts(found))

    server = ChannelServer(generate, 1 << 26)
    app.router.add_get(CHANNEL, server.handle)
    return server
