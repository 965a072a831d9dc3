"""The HTTP routes of the rollout role, as a list, and the application that checks the tokens (auth.py)."""

import math
from collections.abc import Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Handler

from hpc_rl.core import http_service
from hpc_rl.core.auth import Access, Tokens, parse_json_object
from hpc_rl.core.errors import RoleFailed, Stale
from hpc_rl.core.http_service import find_access, receive_body
from hpc_rl.core.types import WeightVersion, encode
from hpc_rl.rollout.batch_client import SCORED_HEADER
from hpc_rl.rollout.batch_log.ledger import LedgerDamaged
from hpc_rl.rollout.report import collect_counters
from hpc_rl.rollout.service import Refused, RolloutService

LONG_POLL_S = 10.0
MAX_BODY_BYTES = 1 << 20  # for routes without a limit


def make_rollout_routes(
    service: RolloutService,
    num_servers: Callable[[], int] = lambda: 0,
    atropos_batch: Handler | None = None,
) -> list[web.RouteDef]:
    """Return the routes of batches, evaluations, counters and trimming.

    The control token belongs to the trainer: only its requests cut a batch, begin a lineage or start an
    evaluation. A request with the data token reads existing results. `atropos_batch` answers `GET /batch`
    without a step.
    """

    async def batch(request: web.Request) -> web.StreamResponse:
        if atropos_batch is not None and "step" not in request.query:
            return await atropos_batch(request)
        try:
            step, lineage = int(request.query["step"]), int(request.query["lineage"])
            wait_s = min(float(request.query.get("wait_s", LONG_POLL_S)), LONG_POLL_S)
            version = int(request.query.get("version", step - 1))
        except (KeyError, ValueError, OverflowError):
            form = "/batch?step=<int>&lineage=<int>[&wait_s=<seconds>][&version=<int>]"
            raise web.HTTPBadRequest(text=form) from None
        if step < 1 or lineage < 0 or math.isnan(wait_s):
            raise web.HTTPBadRequest(
                text="step must be at least 1, lineage at least 0, wait_s a number of seconds"
            )
        if not 0 <= version <= step - 1 <= version + 1:
            allowed = f"batch {version + 1} or {version + 2}, not {step}"
            raise web.HTTPBadRequest(
                text=f"a trainer at weights version {version} can request only {allowed}"
            )
        if find_access(request) == Access.CONTROL:
            body = await service.batch(step, lineage, wait_s, version)
        else:
            body = await service.get_sealed_batch(step, lineage, wait_s)
        return web.Response(status=204) if body is None else web.Response(body=body)

    async def evaluate(request: web.Request) -> web.Response:
        try:
            asked = parse_json_object(await receive_body(request, MAX_BODY_BYTES))
            version = WeightVersion.parse(asked["version"])
            name, together = str(asked.get("set", "")), [str(one) for one in asked.get("together", ())]
            trainer = WeightVersion.parse(asked.get("trainer", asked["version"]))
            wait_s = None if asked.get("wait_s") is None else float(asked["wait_s"])
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            form = '{"version": "<lineage>.<step>"}'
            raise web.HTTPBadRequest(text=f"the body of the request must be {form}: {error}") from None
        if not {name, *together} <= service.evaluations.sets.keys():
            known = ", ".join(one or "valid_dataset" for one in service.evaluations.sets) or "none"
            raise web.HTTPNotFound(text=f"unknown held-out set in {[name, *together]}; known are {known}")
        key, is_trainer = (version, name), find_access(request) == Access.CONTROL
        result = await service.evaluate(key, wait_s, trainer if is_trainer else None, together)
        if result is not None:
            return web.Response(body=encode(result))
        return web.Response(status=204, headers={SCORED_HEADER: str(service.evaluations.count_scored(key))})

    async def status(_request: web.Request) -> web.Response:
        return web.json_response({**collect_counters(service), "servers": num_servers()})

    async def retain(request: web.Request) -> web.Response:
        if find_access(request) < Access.CONTROL:
            raise web.HTTPUnauthorized(text="this request needs the control token of the trial")
        try:
            step = int(parse_json_object(await receive_body(request, MAX_BODY_BYTES))["step"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise web.HTTPBadRequest(
                text=f'the body of the request must be {{"step": <int>}}: {error}'
            ) from None
        await service.retain(step)
        return web.json_response({"trimmed": service.sequencer.log.trimmed})

    return [
        web.get("/batch", batch),
        web.post("/evaluate", evaluate),
        web.get("/status", status),
        web.post("/retain", retain),
    ]


def make_application(defs: Iterable[web.RouteDef], tokens: dict[str, str]) -> web.Application:
    """Return an application with all routes, also below the token prefix, behind the check of tokens."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let requests with a token in; answer the service's refusals with their status."""
        if find_access(request) < Access.DATA:
            raise web.HTTPUnauthorized(text="this request needs a token of the trial")
        try:
            return await handler(request)
        except Refused as error:
            return web.Response(status=error.status, text=str(error))
        except Stale as error:
            return web.Response(status=409, text=str(error))
        except (RoleFailed, LedgerDamaged) as error:
            return web.Response(status=500, text=str(error))

    app = http_service.make_application(Tokens(tokens), check, MAX_BODY_BYTES)
    for route in defs:
        app.router.add_route(route.method, route.path, route.handler)
        app.router.add_route(route.method, "/t/{token}" + route.path, route.handler)
    return app
