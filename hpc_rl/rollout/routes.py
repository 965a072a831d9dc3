"""The rollout role's HTTP service: its routes as a list, and an application that asks for the trial's tokens.

Other packages add routes of their own to the list (environments). A token travels as `Authorization: Bearer <token>`; the
data token may also be a path prefix, `/t/<data token>/...`, for clients that can't send headers.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from hpc_rl.errors import RoleFailed, Stale
from hpc_rl.rollout.batch_log.ledger import LedgerDamaged
from hpc_rl.rollout.service import Driver, OutOfStep, OutOfTime, RoleEnds, Trimmed
from hpc_rl.types import encode

logger = logging.getLogger(__name__)
LONG_POLL_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def routes(driver: Driver, num_servers: Callable[[], int] = lambda: 0) -> list[web.RouteDef]:
    """Batches, evaluations, counters and trimming."""

    async def batch(request: web.Request) -> web.Response:
        try:
            step, lineage = int(request.query["step"]), int(request.query["lineage"])
            wait_s = min(float(request.query.get("wait_s", LONG_POLL_S)), LONG_POLL_S)
        except (KeyError, ValueError):
            raise web.HTTPBadRequest(text="/batch?step=<int>&lineage=<int>[&wait_s=<seconds>]") from None
        if step < 1 or lineage < 0:
            raise web.HTTPBadRequest(text="steps count from 1, lineages from 0")
        try:
            body = await driver.batch(step, lineage, wait_s)
        except Stale as error:
            raise web.HTTPConflict(text=str(error)) from None
        except Trimmed as error:
            raise web.HTTPGone(text=str(error)) from None
        except OutOfStep as error:
            raise web.HTTPPreconditionFailed(text=str(error)) from None
        except OutOfTime as error:
            logger.info("%s", error)
            return web.Response(status=205)
        except RoleEnds as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from None
        except LedgerDamaged as error:
            raise web.HTTPInternalServerError(text=str(error)) from None
        return web.Response(status=204) if body is None else web.Response(body=body)

    async def evaluate(request: web.Request) -> web.Response:
        asked = await request.json()
        if driver.held_out is None:
            raise web.HTTPNotFound(text="there is no valid_dataset")
        try:
            wait_s = asked.get("wait_s")
            result = await driver.evaluate(asked["version"], None if wait_s is None else float(wait_s))
        except Stale as error:
            raise web.HTTPConflict(text=str(error)) from None
        except (KeyError, TypeError, ValueError) as error:
            raise web.HTTPBadRequest(text=f'{{"version": "<lineage>.<step>"}} is needed: {error}') from None
        except RoleFailed as error:
            raise web.HTTPInternalServerError(text=str(error)) from None
        return web.Response(status=204) if result is None else web.Response(body=encode(result))

    async def status(_request: web.Request) -> web.Response:
        return web.json_response({**driver.status(), "servers": num_servers()})

    async def retain(request: web.Request) -> web.Response:
        try:
            await driver.retain(int((await request.json())["step"]))
        except RoleEnds as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from None
        return web.json_response({"trimmed": driver.core.trimmed})

    return [
        web.get("/batch", batch),
        web.post("/evaluate", evaluate),
        web.get("/status", status),
        web.post("/retain", needs_control(retain)),
    ]


def needs_control(handler: Handler) -> Handler:
    """Mark a handler as one for the control token only."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        if not request["control"]:
            raise web.HTTPUnauthorized(text="the control token is needed")
        return await handler(request)

    return guarded


def application(defs: Iterable[web.RouteDef], tokens: dict[str, str]) -> web.Application:
    """All routes, with and without the token prefix, behind the check of tokens."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        control = _same(bearer, tokens["control"])
        if not (
            control
            or _same(bearer, tokens["data"])
            or _same(request.match_info.get("token", ""), tokens["data"])
        ):
            raise web.HTTPUnauthorized(text="a token of this trial is needed")
        request["control"] = control
        return await handler(request)

    app = web.Application(middlewares=[check], client_max_size=1 << 30)
    for route in defs:
        app.router.add_route(route.method, route.path, route.handler)
        app.router.add_route(route.method, "/t/{token}" + route.path, route.handler)
    return app


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
