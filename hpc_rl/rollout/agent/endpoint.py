"""OpenAI's API for the agents of one executor worker, on a port of this host alone.

    POST /episodes/<number>/v1/chat/completions, .../v1/completions
    GET  /episodes/<number>/v1/models
    POST /episodes/<number>/v1/reward   `{"reward": 0.5}`, with further numbers as its parts

Each episode has its own key, which opens no other episode and nothing else of the trial.
"""

import contextlib
import hmac
import itertools
import secrets
from collections.abc import Iterator

from aiohttp import web
from aiohttp.typedefs import Handler

from hpc_rl.core import http_service, net
from hpc_rl.core.auth import Tokens, parse_json_object
from hpc_rl.core.http_service import SERVICE, HttpService, receive_body
from hpc_rl.gateway.answers import make_error
from hpc_rl.gateway.requests import Wire
from hpc_rl.gateway.routes import describe_models, make_generate_handler
from hpc_rl.rollout.agent.episode import Episode
from hpc_rl.rollout.rewards import Rejection, parse_score

CLOSE_TIMEOUT_S = 1.0
MAX_REWARD_BYTES = 1 << 16


class AgentEndpoint:
    """The endpoint; use `open` once, then `admit` for each episode."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._numbers = itertools.count()
        self._service: HttpService | None = None
        self._url = ""

    async def open(self) -> None:
        """Listen on a free port of this host; without effect if it does."""
        if self._service is not None:
            return
        # nobody has these two: the middleware checks the key of the episode
        unused = Tokens({name: secrets.token_urlsafe(32) for name in ("control", "data")})
        app = http_service.make_application(unused, self._check, MAX_REWARD_BYTES)
        prefix = "/episodes/{episode}/v1"
        for path, wire in (("chat/completions", Wire.CHAT), ("completions", Wire.COMPLETION)):
            app.router.add_post(f"{prefix}/{path}", make_generate_handler(self._find, wire))
        app.router.add_get(f"{prefix}/models", self._list_models)
        app.router.add_post(f"{prefix}/reward", self._take_reward)
        self._service = HttpService(app, CLOSE_TIMEOUT_S)
        listener = net.bind(net.LOOPBACK)
        self._url = net.make_http_url(net.LOOPBACK, listener.getsockname()[1])
        await self._service.start(listener)

    async def close(self) -> None:
        if self._service is not None:
            await self._service.close()
            self._service = None

    @contextlib.contextmanager
    def admit(self, episode: Episode) -> Iterator[str]:
        """Yield the base URL of an episode; it answers until the end of the context."""
        name = str(next(self._numbers))
        self._episodes[name] = episode
        try:
            yield f"{self._url}/episodes/{name}/v1"
        finally:
            del self._episodes[name]

    def _find(self, request: web.Request) -> Episode:
        return self._episodes[request.match_info["episode"]]

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let requests with the key of their episode in."""
        episode = self._episodes.get(request.match_info.get("episode", ""))
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="replace")
        if episode is None or not hmac.compare_digest(given, episode.key.encode()):
            message = "no such episode: use OPENAI_BASE_URL and OPENAI_API_KEY of this agent's environment"
            return web.json_response(make_error(message, "authentication_error"), status=401)
        request.app[SERVICE].keep(request.protocol)
        return await handler(request)

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response(describe_models(self._find(request)))

    async def _take_reward(self, request: web.Request) -> web.Response:
        episode = self._find(request)
        try:
            episode.post_reward(parse_score(parse_json_object(await receive_body(request, MAX_REWARD_BYTES))))
        except (Rejection, ValueError) as error:
            message = error.message if isinstance(error, Rejection) else str(error)
            episode.refuse_reward(message)
            return web.json_response(make_error(message, "invalid_request_error"), status=400)
        return web.json_response({"status": "ok"})
