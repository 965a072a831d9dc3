"""The routes of the rollout API of Atropos, as a list; rollout.routes.make_application checks the tokens.

Bodies may be compressed with gzip. A GET may have a body: environments poll `/status-env` so.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hpc_rl.atropos.api import UNREGISTERED, AtroposApi, QueueFull
from hpc_rl.atropos.intake import MalformedRequest
from hpc_rl.atropos.registry import RegisteredEnvironment
from hpc_rl.core.auth import parse_json_value
from hpc_rl.core.http_service import receive_body
from hpc_rl.rollout.service import Refused

COMPRESS_FROM_BYTES = 1000
RETRY_AFTER_S = 5
UNNAMED = "environment"
MAX_NAME_CHARS = 100
MAX_BODY_BYTES = 64 << 20  # of groups, decompressed
MAX_SMALL_BODY_BYTES = 1 << 20  # for all other bodies
MAX_BODIES = 8  # bodies that are read at the same time
BODY_TIMEOUT_S = 60.0
GROUP_FIELDS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params",
    "inference_logprobs", "overrides", "group_overrides", "images", "env_id",
)  # fmt: skip
TRAINER_FIELDS = {
    **dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), str),
    **dict.fromkeys(
        ("batch_size", "max_token_len", "save_checkpoint_interval", "starting_step", "num_steps"), int
    ),
}
Handler = Callable[[web.Request], Awaitable[Any]]


class Unreadable(Exception):
    """A body that can't be decompressed."""


def make_routes(api: AtroposApi) -> list[web.RouteDef]:
    """Return the routes of a rollout API."""

    async def root(_request: web.Request) -> dict[str, Any]:
        return {"message": "AtroposLib API"}

    async def wandb_info(_request: web.Request) -> dict[str, Any]:
        return api.get_wandb_info()

    async def info(_request: web.Request) -> dict[str, Any]:
        return api.get_trainer_info()

    async def sampling(_request: web.Request) -> dict[str, float]:
        return api.get_sampling()

    async def register(request: web.Request) -> dict[str, Any]:
        return api.register_trainer(_check_fields(await _load_body(request), **TRAINER_FIELDS)["batch_size"])

    async def register_env(request: web.Request) -> dict[str, Any]:
        body = await _load_body(request)
        if isinstance(body, dict) and body.get("desired_name", "") is None:
            body["desired_name"] = UNNAMED  # the name of environments without a wandb_name
        _check_fields(body, max_token_length=int, desired_name=str, weight=float, group_size=int)
        shown = "".join(one if one.isprintable() else "_" for one in body["desired_name"][:MAX_NAME_CHARS])
        share = body.get("min_batch_allocation")
        if share is not None and not _is_a(share, float):
            raise MalformedRequest("min_batch_allocation", "must be a number or null")
        asked = RegisteredEnvironment(
            env_id=UNREGISTERED,
            desired_name=shown,
            group_size=body["group_size"],
            weight=body["weight"],
            max_token_length=body["max_token_length"],
            min_batch_allocation=share,
        )
        return await api.register(asked)

    async def disconnect_env(request: web.Request) -> dict[str, Any]:
        return await api.disconnect(_check_fields(await _load_body(request), env_id=int)["env_id"])

    async def status_env(request: web.Request) -> dict[str, Any]:
        return api.get_queue_view(_check_fields(await _load_body(request), env_id=int)["env_id"])

    async def reset_data(_request: web.Request) -> dict[str, Any]:
        raise web.HTTPForbidden(text="an environment can't discard the groups of a trial")

    return [
        web.get("/", _answer_errors(root)),
        web.get("/wandb_info", _answer_errors(wandb_info)),
        web.get("/info", _answer_errors(info)),
        web.get("/sampling", _answer_errors(sampling)),
        web.post("/register", _answer_errors(register)),
        web.post("/register-env", _answer_errors(register_env)),
        web.post("/disconnect-env", _answer_errors(disconnect_env)),
        web.get("/status-env", _answer_errors(status_env)),
        web.get("/reset_data", _answer_errors(reset_data)),
        *_make_group_routes(api),
    ]


def make_batch_handler(api: AtroposApi) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the handler of `GET /batch` without a step."""

    async def batch(_request: web.Request) -> dict[str, Any]:
        return api.answer_batch_request()

    return _answer_errors(batch)


def _make_group_routes(api: AtroposApi) -> list[web.RouteDef]:
    reading = asyncio.Semaphore(MAX_BODIES)

    async def take(request: web.Request, is_list: bool) -> list[dict[str, Any]]:
        def is_connected() -> bool:
            return request.transport is not None and not request.transport.is_closing()

        async with reading:
            content = await _receive_content(request, MAX_BODY_BYTES)
            bodies = _parse(content)
        if not is_list:
            bodies = [bodies]
        elif not isinstance(bodies, list):
            raise MalformedRequest("body", "must be a list of groups")
        return await api.take(bodies, request.headers.get("Idempotency-Key", ""), content, is_connected)

    async def post_scored_data(request: web.Request) -> dict[str, Any]:
        return (await take(request, is_list=False))[0]

    async def post_scored_data_list(request: web.Request) -> dict[str, Any]:
        answers = await take(request, is_list=True)
        result: dict[str, Any] = {"status": "received", "groups_processed": len(answers)}
        buffered = [answer["buffer_size"] for answer in answers if answer["status"] == "buffered"]
        if buffered:
            result |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
        if ignored := sorted({name for answer in answers for name in answer.get("ignored", ())}):
            result["ignored"] = ignored
        if rejected := [answer["reason"] for answer in answers if answer["status"] == "rejected"]:
            result["rejected"] = rejected
        return result

    async def latest_example(_request: web.Request) -> dict[str, Any]:
        empty: dict[str, Any] = {name: [] for name in GROUP_FIELDS[:4]}
        return {name: api.latest.get(name, empty.get(name)) for name in GROUP_FIELDS}

    return [
        web.post("/scored_data", _answer_errors(post_scored_data)),
        web.post("/scored_data_list", _answer_errors(post_scored_data_list)),
        web.get("/latest_example", _answer_errors(latest_example)),
    ]


def _answer_errors(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Answer with JSON; 422 for malformed requests (FastAPI's format), 503 for requests to retry."""

    async def answer(request: web.Request) -> web.Response:
        headers: dict[str, str] = {}
        try:
            content, status = await handler(request), 200
        except Unreadable as error:
            response = web.json_response({"detail": str(error)}, status=400)
            response.force_close()  # the rest of this connection can't be separated into requests
            return response
        except MalformedRequest as error:
            detail = [{"loc": ["body", error.place], "msg": error.message, "type": "value_error"}]
            content, status = {"detail": detail}, 422
        except ValueError as error:
            content, status = {"detail": str(error)}, 422
        except (QueueFull, Refused) as error:
            content, status = (
                {"detail": str(error) or "the queue of groups is full; send the group again later"},
                503,
            )
            headers = {"Retry-After": str(RETRY_AFTER_S)}
        response = web.Response(
            body=json.dumps(content).encode(), status=status, content_type="application/json", headers=headers
        )
        if len(response.body) >= COMPRESS_FROM_BYTES:  # type: ignore[arg-type]
            response.enable_compression()
        return response

    return answer


async def _load_body(request: web.Request) -> Any:
    """Return the JSON of a small request. Raises the same as _receive_content and _parse."""
    return _parse(await _receive_content(request, MAX_SMALL_BODY_BYTES))


async def _receive_content(request: web.Request, max_bytes: int) -> bytes:
    """Return the body, decompressed. Raises Unreadable, HTTPRequestEntityTooLarge."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await receive_body(request, max_bytes)
    except TimeoutError:
        raise Unreadable(f"the body of the request did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise Unreadable(f"the body of the request can't be read: {error}") from None


def _parse(content: bytes) -> Any:
    """Return the JSON of a body. Raises MalformedRequest."""
    try:
        return parse_json_value(content)
    except ValueError as error:
        raise MalformedRequest("body", str(error).removeprefix("the body of the request ")) from None


def _check_fields(body: Any, **kinds: type) -> dict[str, Any]:
    """Return an object that has these fields. Raises MalformedRequest."""
    if not isinstance(body, dict):
        raise MalformedRequest("body", f"must be an object, got {type(body).__name__}")
    for name, kind in kinds.items():
        if name not in body:
            raise MalformedRequest(name, "field required")
        if not _is_a(body[name], kind):
            raise MalformedRequest(name, f"must be of type {kind.__name__}, got {body[name]!r:.80}")
    return body


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)
