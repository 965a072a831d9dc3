"""The proxy: the authenticated HTTP interface of one server replica, in front of its backend.

Data token (as bearer, or as path prefix `/t/<token>`): POST /generate, /v1/chat/completions, /logprobs, or
/classify of a reward model; GET /model_info, /health. Control token (bearer only): POST /pause_generation,
/continue_generation, /abort_request, /prepare_weights, /update_weights_from_disk, /switch_weights (pause,
load and continue), /hold_weights, /flush_cache, /weights_checker, /shutdown. The proxy adds epoch and
attempt, checks the order of version labels, and refuses requests while it is stale. replica.py handles
leases, reloading and the end of the process.

With the control token, weights come over a process group: POST /init_weights_update_group,
/begin_weight_update, /update_weights_from_distributed, /end_weight_update, /destroy_weights_update_group.
Between begin and end the loaded weights are a mixture, without a label: generation is paused, and
/continue_generation is refused until the end, or until a version is loaded from disk.

On shared GPUs there are also POST /release_memory_occupation and /resume_memory_occupation (lent_memory.py).

/hold_weights lets the server stay at a version for an evaluation: it refuses others until the next such call.

Clients of the trial generate over the channel (GET /channel, channel.py): they get the tokens of a longer
request while it runs, so that these survive the server.
"""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from hpc_rl.core.auth import Access, Tokens, parse_json_object
from hpc_rl.core.http_service import HttpService, find_access, make_application, receive_body
from hpc_rl.servers.base import Answer, Backend
from hpc_rl.servers.channel import CHANNEL, ChannelRequest, ChannelServer
from hpc_rl.servers.client import EXACT_HEADER, MIN_VERSION_HEADER
from hpc_rl.servers.decode_speed import DecodeSpeed
from hpc_rl.servers.router import is_older
from hpc_rl.servers.wire import LOGPROBS, SendParts

logger = logging.getLogger(__name__)

DATA_POST = ("/generate", "/v1/chat/completions", LOGPROBS, "/classify")
OF_MEMORY = ("/release_memory_occupation", "/resume_memory_occupation")
CONTROL_POST = (
    "/prepare_weights",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/update_weights_from_disk",
    "/switch_weights",
    "/hold_weights",
    "/flush_cache",
    "/weights_checker",
    "/init_weights_update_group",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/destroy_weights_update_group",
    *OF_MEMORY,
)
OF_WEIGHTS = ("/prepare_weights", "/init_weights_update_group")  # without a label
FROZEN = "the model of this pool is frozen (never trained), so its servers take no weights"
MAX_BODY_BYTES = 64 * 2**20
CLOSE_S = 2.0  # time for running requests to end
STALE_WAIT_S = 1.0  # a request that needs newer weights waits for their publication
RELEASED = "released"  # the trainer has the shared GPUs
UP = ("waiting", "serving")  # the backend runs; `waiting`: it has no published weights yet


class Proxy:
    """One replica's HTTP application and its state. Calls `on_change` after a change of state or version."""

    def __init__(
        self,
        backend: Backend,
        tokens: dict[str, str],
        attempt: str = "",
        incarnation: int = 0,
        on_change: Callable[[], None] = lambda: None,
        on_shutdown: Callable[[], None] = lambda: None,
        frozen: bool = False,
    ) -> None:
        self.frozen = frozen  # refuses new weights
        self.backend = backend
        self.epoch = 0
        self.version = ""
        self.held = ""  # the version that the server stays at, for an evaluation
        self.lifecycle = "starting"  # starting | released | loading | waiting | serving | stopping | stale
        self.pause_mode = ""
        # label of the weights that arrive over a process group: the loaded ones are a mixture
        self.receiving = ""
        self._has_last_bucket = False
        self.last_control_at = time.monotonic()
        self._attempt, self._incarnation = attempt, incarnation
        self._tokens = Tokens(tokens)
        self._on_change, self._on_shutdown = on_change, on_shutdown
        self._control_lock = asyncio.Lock()
        # control calls that others answer, in any state of the server; they run one at a time, as updates do
        self.calls: dict[str, Callable[[dict[str, Any]], Awaitable[Answer]]] = {}
        self._has_updated = asyncio.Event()  # set at the next update, then replaced
        self._num_running, self._busy_since, self._busy_s = 0, 0.0, 0.0
        self.decode_speed = DecodeSpeed()
        self.num_requests, self.request_s = 0, 0.0  # answered ones, and the sum of their durations
        self._service: HttpService | None = None
        self._channel = ChannelServer(self._generate_parts, MAX_BODY_BYTES)

    @property
    def state(self) -> str:
        return "paused" if self.lifecycle == "serving" and self.pause_mode else self.lifecycle

    @property
    def busy_s(self) -> float:
        """The total time with at least one request, in seconds."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._num_running else 0.0)

    @property
    def is_updating(self) -> bool:
        """Whether a call that changes weights is running."""
        return self._control_lock.locked()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        begun = time.monotonic()
        if not self._num_running:
            self._busy_since = begun
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self.num_requests += 1
            self.request_s += time.monotonic() - begun
            if not self._num_running:
                self._busy_s += time.monotonic() - self._busy_since

    def enter(self, lifecycle: str) -> None:
        """Change the lifecycle. From `stale` it changes only to `stopping`."""
        if self.lifecycle == "stale" and lifecycle != "stopping":
            return
        self.lifecycle = lifecycle
        self._on_change()

    async def serve(self, sock: socket.socket) -> None:
        """Start to serve on a bound socket."""
        app = make_application(self._tokens, self._check, MAX_BODY_BYTES)
        for prefix in ("", "/t/{token}"):
            app.router.add_get(prefix + "/health", self._health)
            app.router.add_get(prefix + "/model_info", self._model_info)
            for path in DATA_POST:
                app.router.add_post(prefix + path, partial(self._generate, path))
        app.router.add_get(CHANNEL, self._channel.handle)
        for path in CONTROL_POST:
            app.router.add_post(path, self._control_call)
        app.router.add_post("/shutdown", self._shutdown)
        # a client that disconnects cancels its handler, which aborts the request in the backend
        self._service = HttpService(app, close_timeout_s=CLOSE_S, cancels=True)
        await self._service.start(sock)

    async def close(self) -> None:
        await self._channel.close(CLOSE_S)
        if self._service:
            await self._service.close()

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a request without the token that its path needs. A token in the path is the data token."""
        path = request.path
        needed = Access.CONTROL if path in (*CONTROL_POST, "/shutdown") else Access.DATA
        if find_access(request) < needed:
            message = f"this request needs the {needed.name.lower()} token of the trial"
            return _make_response(401, {"error": {"message": message}})
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            message = f"no such path for the {needed.name.lower()} token: {request.method} {path}"
            return _make_response(error.status, {"error": {"message": message}})

    # data
    async def _health(self, _request: web.Request) -> web.Response:
        state = "dead" if self.lifecycle in UP and self.backend.alive() else self.state
        known = {"state": state, "epoch": self.epoch, "weight_version": self.version}
        known |= {"attempt": self._attempt, "incarnation": self._incarnation}
        return _make_response(200 if state in ("serving", "paused", "waiting", "released") else 503, known)

    async def _generate(self, path: str, request: web.Request) -> web.StreamResponse:
        least = request.headers.get(MIN_VERSION_HEADER, "")
        if refusal := await self._find_refusal(least, EXACT_HEADER in request.headers):
            return _make_response(*refusal)
        try:
            body = parse_json_object(await receive_body(request, MAX_BODY_BYTES))
        except ValueError as error:
            return _make_response(400, {"error": {"message": f"{error}"}})
        with self._busy():
            return _make_response(*await self.backend.request(path, body))

    async def _generate_parts(self, request: ChannelRequest, send: SendParts) -> Answer:
        if refusal := await self._find_refusal(request.least, request.exact):
            return refusal
        with self._busy(), self.decode_speed.watch(request.body, send) as send_on:
            return await self.backend.generate(request.body, send_on)

    async def _find_refusal(self, least: str, is_exact: bool) -> Answer | None:
        """Return the answer to a request that can't be served; wait a while for the version `least`."""
        while self.lifecycle == RELEASED and self.version:
            await self._has_updated.wait()  # it resumes with newer weights, or with the same again
        if self.lifecycle != "serving":
            return self._not_up()
        try:
            if not await self._wait_for_version(least) or (is_exact and self.version != least):
                return 503, {"error": "stale", "weight_version": self.version}
        except ValueError as error:
            return 400, {"error": {"message": f"{error}"}}
        return None

    async def _wait_for_version(self, least: str) -> bool:
        """Return whether the weights are new enough, or are so within STALE_WAIT_S. Raises ValueError."""
        give_up_at = time.monotonic() + STALE_WAIT_S
        while is_older(self.version, least):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(give_up_at - time.monotonic()):
                    await self._has_updated.wait()
            if time.monotonic() >= give_up_at:
                return not is_older(self.version, least)
        return True

    async def _model_info(self, _request: web.Request) -> web.Response:
        if self.lifecycle not in UP:
            return _make_response(*self._not_up())
        status, answer = await self.backend.request("/model_info", None)
        if status == 200:
            answer = {**answer, "weight_version": self.version, "epoch": self.epoch}
        return _make_response(status, answer)

    def _not_up(self) -> Answer:
        return 503, {"error": {"message": f"the server is {self.lifecycle}"}, "state": self.lifecycle}

    # control
    async def _control_call(self, request: web.Request) -> web.Response:
        try:
            raw = await receive_body(request, MAX_BODY_BYTES)
            body = parse_json_object(raw) if raw else {}
        except ValueError as error:
            return _make_response(400, {"error": {"message": f"{error}"}})
        # the call continues if the publisher disconnects: an update must not be recorded by half
        return _make_response(*await asyncio.shield(asyncio.ensure_future(self.control(request.path, body))))

    async def control(self, path: str, body: dict[str, Any]) -> Answer:
        """Answer a control call from a client with the control token or from the replica itself.

        Updates run one at a time.
        """
        if call := self.calls.get(path):
            async with self._control_lock:
                return await call(body)
        if path in OF_MEMORY:
            return _refuse_update("the server shares no GPU with the trainer, so it keeps its memory")
        if self.lifecycle not in UP:
            return self._not_up()
        if path in OF_WEIGHTS and self.frozen:
            return _refuse_update(FROZEN)
        if path == "/continue_generation" and self.receiving:
            return _refuse_update(
                f"only a part of weights {self.receiving} has arrived: load them before /continue_generation"
            )
        if update := self._UPDATES.get(path):
            async with self._control_lock:
                if self.lifecycle not in UP:  # it has changed meanwhile
                    return self._not_up()
                answer = await update(self, body)
        else:
            answer = await self.backend.request(path, body)
        self.last_control_at = time.monotonic()
        if answer[0] == 200 and path in ("/pause_generation", "/continue_generation"):
            self.pause_mode = str(body.get("mode", "abort")) if path == "/pause_generation" else ""
            self._on_change()
        return answer

    async def _update(self, body: dict[str, Any]) -> Answer:
        label = body.get("weight_version")
        if problem := self._find_problem(label, flush_cache=body.get("flush_cache", True)):
            return _refuse_update(problem)
        if label == self.version and not self.receiving:
            return 200, {"success": True, "message": f"{label} is served already", "num_paused_requests": 0}
        return self.note_update(label, *await self.backend.request("/update_weights_from_disk", body))

    async def _switch(self, body: dict[str, Any]) -> Answer:
        """Pause, load and continue in one call: nobody has to end the pause if the caller has gone."""
        if problem := self._find_problem(
            body.get("weight_version"), body.get("flush_cache", True), str(body.get("pause_mode"))
        ):
            return _refuse_update(problem)
        began = time.monotonic()
        status, answer = await self.backend.request("/pause_generation", {"mode": body.get("pause_mode")})
        if status != 200:
            return status, answer
        self.pause_mode = str(body.get("pause_mode"))
        try:
            status, answer = await self._update(body)
        finally:
            resumed = 200, None
            if not self.receiving:  # else the weights are a mixture
                resumed = await self.backend.request("/continue_generation", {})
                self.pause_mode = "" if resumed[0] == 200 else self.pause_mode
            self._on_change()
        if status != 200 or resumed[0] != 200:
            return resumed if status == 200 else (status, answer)
        return 200, {**answer, "weight_version": self.version, "paused_s": time.monotonic() - began}

    def _find_problem(self, label: Any, flush_cache: bool, pause_mode: str = "") -> str:
        """Return why weights with this label can't be loaded, or ""."""
        if self.frozen:
            return FROZEN
        if self.held and label != self.held:
            return f"the server stays at weights {self.held} until their evaluation ends"
        least = self.held or self.version or "0.0"
        try:
            if not isinstance(label, str) or is_older(label, least):
                allowed = f"a label not older than {least!r}"
                return f"weight_version must be {allowed}, got {label!r}"
        except ValueError as error:
            return str(error)
        if "in_place" in (self.pause_mode, pause_mode) and flush_cache:
            return (
                "the KV cache can't be flushed, because requests paused with mode in_place use it: "
                "send flush_cache false, or pause with mode retract"
            )
        return ""

    def note_update(self, label: Any, status: int, answer: Any) -> Answer:
        """Note the outcome of loading weights; return it."""
        if status == 200:
            self.version, self.receiving = label, ""
            self._has_updated.set()
            self._has_updated = asyncio.Event()
            self.enter("serving")
            logger.info("the server is serving weights %s now", label)
        else:
            stays = (
                "has a mixture of old and new ones" if self.receiving else f"keeps weights {self.version!r}"
            )
            logger.warning("the server could not load weights %s and %s: %s", label, stays, answer)
        return status, answer

    async def _hold(self, body: dict[str, Any]) -> Answer:
        """Stay at a version, even an older one; running requests then continue on other servers."""
        label = str(body.get("weight_version", ""))
        before, self.held = self.held, label
        status, answer = 200, {"success": True, "weight_version": self.version}
        if label and (label != self.version or self.receiving):
            status, answer = await self._switch({**body, "flush_cache": True, "pause_mode": "abort"})
            if status != 200:
                self.held = before
        self._on_change()
        return status, answer

    async def _begin(self, body: dict[str, Any]) -> Answer:
        label = body.get("weight_version")
        if problem := self._find_problem(label, flush_cache=False):
            return _refuse_update(problem)
        if label == self.version and not self.receiving:
            return _refuse_update(f"the server has weights {label} already")
        if not self.pause_mode:
            return _refuse_update(
                "call /pause_generation first: running requests would use a mixture of old and new weights"
            )
        # from here on, also after a failure, the loaded weights may be a mixture
        self.receiving, self._has_last_bucket = str(label), False
        return await self.backend.request("/begin_weight_update", {})

    async def _receive(self, body: dict[str, Any]) -> Answer:
        label = body.get("weight_version")
        if not self.receiving or self._has_last_bucket:
            return _refuse_update("no weight update is open: call /begin_weight_update first")
        if label not in (None, self.receiving):
            return _refuse_update(
                f"weight_version must be {self.receiving!r}, as in /begin_weight_update, got {label!r}"
            )
        if problem := self._find_problem(self.receiving, flush_cache=body.get("flush_cache", True)):
            return _refuse_update(problem)
        answer = await self.backend.request("/update_weights_from_distributed", body)
        self._has_last_bucket = answer[0] == 200 and label is not None
        return answer

    async def _end(self, _body: dict[str, Any]) -> Answer:
        if not self._has_last_bucket:
            return _refuse_update(
                "the last part of the weights (the request with weight_version) has not arrived"
            )
        self._has_last_bucket = False
        return self.note_update(self.receiving, *await self.backend.request("/end_weight_update", {}))

    _UPDATES = {  # noqa: RUF012 (a table, never changed)
        "/update_weights_from_disk": _update,
        "/switch_weights": _switch,
        "/hold_weights": _hold,
        "/begin_weight_update": _begin,
        "/update_weights_from_distributed": _receive,
        "/end_weight_update": _end,
    }

    async def _shutdown(self, _request: web.Request) -> web.Response:
        self._on_shutdown()
        return _make_response(200, {"status": "ok"})


def _refuse_update(message: str) -> Answer:
    return 400, {"success": False, "message": message, "error": {"message": message}}


def _make_response(status: int, body: Any) -> web.Response:
    return web.Response(body=json.dumps(body).encode(), status=status, content_type="application/json")
