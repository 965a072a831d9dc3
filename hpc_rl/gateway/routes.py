"""The HTTP routes of the gateway, as a list; rollout.routes.make_application checks the tokens.

    POST /v1/chat/completions, /v1/completions   OpenAI's
    POST /generate                               SGLang's; vLLM's if the body has `prompt`
    GET  /health, /health_generate, /v1/models, /model_info
    GET  /gateway                                counters, and metrics of each server

All but the last also exist below /eval, with the limit for evaluation; the header `X-Hpc-Rl-Split: eval` has
the same effect. Clients give the data token as their API key, or a base URL that begins with `/t/<data
token>`: `http://host:port/t/<data token>/eval/v1`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from hpc_rl.core.auth import parse_json_object
from hpc_rl.core.errors import InputRefused, RequestRefused, RoleFailed
from hpc_rl.core.http_service import receive_body
from hpc_rl.gateway.answers import AnswerWriter, format_event, make_error, make_probe_answer
from hpc_rl.gateway.completions import Completion
from hpc_rl.gateway.gateway import Gateway
from hpc_rl.gateway.requests import FieldRefused, Wire, is_probe

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 20
SPLIT_HEADER = "X-Hpc-Rl-Split"
CONNECTION_POLL_S = 1.0
KEEP_ALIVE_S = 10.0  # of a stream without an event
RETRY_AFTER_S = 5
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ClientGone(Exception):
    """The client hung up."""


def make_gateway_routes(gateway: Gateway) -> list[web.RouteDef]:
    """Return the routes of a gateway."""
    posts = {
        "/v1/chat/completions": Wire.CHAT,
        "/v1/completions": Wire.COMPLETION,
        "/generate": Wire.SGLANG,
    }

    async def healthy(_request: web.Request) -> web.Response:
        # also without any live server: requests wait then, but a client that waits for health sends none
        return web.json_response({"status": "ok", "servers": gateway.router.num_servers})

    async def models(_request: web.Request) -> web.Response:
        return web.json_response(describe_models(gateway))

    async def model_info(_request: web.Request) -> web.Response:
        versions = [server["version"] for server in gateway.router.describe_servers()]
        info = {"model_path": gateway.model_name, "tokenizer_path": str(gateway.tokenizer.folder)}
        return web.json_response(
            {**info, "is_generation": True, "weight_version": versions[0] if versions else ""}
        )

    async def status(_request: web.Request) -> web.Response:
        return web.json_response(gateway.get_status())

    defs = [web.get("/gateway", status)]
    for prefix in ("", "/eval"):
        for path, wire in posts.items():
            handler = make_generate_handler(lambda _request: gateway, wire, evaluation=bool(prefix))
            defs.append(web.post(prefix + path, handler))
        defs += [web.get(prefix + path, healthy) for path in ("/health", "/health_generate")]
        defs += [web.get(f"{prefix}/v1/models", models), web.get(f"{prefix}/model_info", model_info)]
    return defs


def describe_models(gateway: Gateway) -> dict[str, Any]:
    """Return the answer to /v1/models."""
    model = {"id": gateway.model_name, "object": "model", "created": 0, "owned_by": "hpc-rl"}
    return {"object": "list", "data": [{**model, "max_model_len": gateway.reader.bounds.context}]}


def make_generate_handler(
    find_gateway: Callable[[web.Request], Gateway], of_path: Wire, evaluation: bool = False
) -> Handler:
    """Return the handler of requests in a schema, which `find_gateway`'s gateway answers."""

    async def generate(request: web.Request) -> web.StreamResponse:
        gateway = find_gateway(request)
        try:
            body = await _load_body(request)
            wire = Wire.VLLM if of_path is Wire.SGLANG and "prompt" in body else of_path
            if gateway.answers_probes and wire in (Wire.CHAT, Wire.COMPLETION) and is_probe(body):
                gateway.counters.probes += 1
                return web.json_response(make_probe_answer(wire, gateway.model_name))
            order = gateway.reader.parse(wire, body)
            of_evaluation = evaluation or request.headers.get(SPLIT_HEADER, "").lower() == "eval"
            completions, writer = gateway.make_completions(order), AnswerWriter(order, gateway.tokenizer)
            if order.stream:
                return await _stream(gateway, request, writer, completions, of_evaluation)
            await _await_while_connected(request, _unwrap(gateway.make(completions, of_evaluation)))
            return web.json_response(writer.make_whole(completions))
        except (FieldRefused, InputRefused) as error:
            gateway.counters.refused += 1
            logger.info("the gateway refused a request: %s", error)
            return _answer_error(400, error)
        except (RoleFailed, RequestRefused) as error:
            gateway.counters.unanswered += 1
            logger.warning("the gateway could not answer a request, so the client gets an error: %s", error)
            return _answer_error(503 if isinstance(error, RoleFailed) else 500, error)
        except ClientGone:
            gateway.counters.abandoned += 1
            return web.Response(status=499)

    return generate


async def _load_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request. Raises FieldRefused."""
    try:
        return parse_json_object(await receive_body(request, MAX_BODY_BYTES))
    except web.HTTPRequestEntityTooLarge:
        raise FieldRefused("body", f"of the request has more than {MAX_BODY_BYTES >> 20} MiB") from None
    except ValueError as error:
        raise FieldRefused("body", str(error).removeprefix("the body ")) from error


async def _stream(
    gateway: Gateway,
    request: web.Request,
    writer: AnswerWriter,
    completions: list[Completion],
    evaluation: bool,
) -> web.StreamResponse:
    """Answer with events. A failure before the first event gives an ordinary answer."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    changed = asyncio.Event()
    making = asyncio.ensure_future(_unwrap(gateway.make(completions, evaluation, changed)))
    making.add_done_callback(lambda _made: changed.set())

    async def send(data: bytes) -> None:
        if not response.prepared:
            await response.prepare(request)
            for opening in writer.begin(completions):
                await response.write(format_event(opening))
        await response.write(data)

    async def send_news() -> None:
        for content in [content for completion in completions for content in writer.make_next(completion)]:
            await send(format_event(content))

    try:
        silent_s = 0.0
        while not making.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECTION_POLL_S):
                    await changed.wait()
            _check_connection(request)
            silent_s = 0.0 if changed.is_set() else silent_s + CONNECTION_POLL_S
            changed.clear()
            await send_news()
            if silent_s > KEEP_ALIVE_S:
                silent_s = 0.0
                await send(b": the request is held or running\n\n")
        try:
            await making
            await send_news()
        except (InputRefused, RequestRefused, RoleFailed) as error:
            if not response.prepared:
                raise
            await send(format_event(make_error(str(error), "server_error")))
        for content in writer.end(completions):
            await send(format_event(content))
        await send(format_event("[DONE]"))
        return response
    except ConnectionResetError:
        raise ClientGone from None
    finally:
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)


async def _await_while_connected(request: web.Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it once the client is gone. Raises ClientGone."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=CONNECTION_POLL_S)
            if done:
                return task.result()
            _check_connection(request)
    finally:
        task.cancel()


def _check_connection(request: web.Request) -> None:
    if request.transport is None or request.transport.is_closing():
        raise ClientGone


async def _unwrap(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Raises the first of a group of exceptions, because all have one cause."""
    try:
        return await work
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


def _answer_error(status: int, error: Exception) -> web.Response:
    kind = "invalid_request_error" if status == 400 else "server_error"
    name, code = (error.field, error.code) if isinstance(error, FieldRefused) else (None, None)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return web.json_response(make_error(str(error), kind, name, code), status=status, headers=headers)
