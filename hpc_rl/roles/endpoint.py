"""The rollout role of a trial that serves: OpenAI's API in front of its servers, until a request to stop."""

import asyncio
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.pool_view import find_trained_pool
from hpc_rl.config.rules.file_rules import find_context
from hpc_rl.core import net
from hpc_rl.core.http_service import HttpService
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.gateway.balance import BalancingRouter
from hpc_rl.gateway.gateway import Gateway
from hpc_rl.gateway.requests import Bounds
from hpc_rl.gateway.routes import make_gateway_routes
from hpc_rl.name_resolve import open_names
from hpc_rl.roles import role
from hpc_rl.roles.rollout_duties import work
from hpc_rl.roles.rollout_front import listen
from hpc_rl.rollout.routes import make_application
from hpc_rl.supervise.ownership import end_when_fenced


def serve_endpoint(context: role.Context) -> int:
    assert isinstance(context.config, GRPOConfig), "only its plan has a rollout role"
    end_when_fenced(open_names(context.trial, context.config), context.attempt)
    return asyncio.run(_serve(context, context.config))


async def _serve(context: role.Context, config: GRPOConfig) -> int:
    router = BalancingRouter(
        open_names(context.trial, config),
        context.tokens["data"],
        find_trained_pool(config),
        config.rollout.setup_timeout,
        config.rollout.request_timeout,
        config.rollout.request_retries,
        config.rollout.schedule_policy,
    )
    async with router:
        gateway = make_gateway(config, router)
        app = make_application(make_gateway_routes(gateway), context.tokens)
        http = HttpService(app, close_timeout_s=1.0)
        listener = listen(context.trial, 0)
        await http.start(listener)
        url = net.make_http_url(context.address, listener.getsockname()[1])
        try:
            return await work(context, config, describe=lambda: describe_gateway(gateway, url), url=url)
        finally:
            await http.close()


def make_gateway(config: GRPOConfig, router: BalancingRouter) -> Gateway:
    """Return the gateway with the model's limits; it logs no completions."""
    tokenizer = Tokenizer(config.tokenizer_path or config.actor.path)
    longest = find_context(config) or config.gconfig.max_tokens
    bounds = Bounds(config.gconfig.max_new_tokens, longest, tokenizer.size)
    return Gateway(router, tokenizer, None, bounds, model_name=name_model(Path(config.actor.path)))


def name_model(folder: Path) -> str:
    """Return the name of a model for clients: of its folder, with the trial if training exported it."""
    is_export = folder.parent.name == "exports" and folder.name.startswith(("best", "final", "step-"))
    return f"{folder.parent.parent.name}-{folder.name}" if is_export else folder.name


def describe_gateway(gateway: Gateway, url: str) -> dict[str, Any]:
    """Return the report for `hpc-rl status`."""
    counters = gateway.counters
    return {
        "url": f"{url}/v1",
        "progress": counters.completions + gateway.router.num_servers,
        "running": gateway.train.running + gateway.eval.running,
        "accepted": counters.requests,
        "rejected": {"unanswered": counters.unanswered} if counters.unanswered else {},
    }


if __name__ == "__main__":
    role.run("rollout", serve_endpoint)
