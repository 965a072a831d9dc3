"""The rollout role's services for environments: the rollout API of Atropos, and the gateway."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from hpc_rl.atropos.api import AtroposApi, TrialFacts
from hpc_rl.atropos.intake import SequenceLimits
from hpc_rl.atropos.routes import make_batch_handler, make_routes
from hpc_rl.config.options.experiment import GRPOConfig, count_steps
from hpc_rl.config.pool_view import find_trained_pool
from hpc_rl.config.rules.file_rules import find_vocab_size
from hpc_rl.core.trial import Trial
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.gateway.balance import BalancingRouter
from hpc_rl.gateway.gateway import Gateway, GatewaySettings
from hpc_rl.gateway.gateway_log import GatewayLog
from hpc_rl.gateway.requests import Bounds
from hpc_rl.gateway.routes import make_gateway_routes
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.rollout.outside import OutsideGroups
from hpc_rl.rollout.routes import make_rollout_routes
from hpc_rl.rollout.service import RolloutService

CHECKPOINT_EVERY = 100  # steps between two files of an environment, if the trial saves by time


@contextlib.asynccontextmanager
async def host_environments(
    service: RolloutService,
    config: GRPOConfig,
    names: NameResolve,
    trial: Trial,
    context_length: int | None,
    num_servers: Callable[[], int],
) -> AsyncIterator[list[web.RouteDef]]:
    """Yield the routes of a rollout service that takes groups of environments, while their router runs.

    Args:
        service: Takes the groups.
        config: The trial's configuration, with a section `environments`.
        names: Name records; only the router uses them.
        trial: Gives its directory and its data token.
        context_length: Tokens of prompt and completion together; None if unknown.
        num_servers: Returns how many servers are alive.
    """
    section = config.environments
    assert section is not None
    tokenizer = Tokenizer(config.tokenizer_path or config.actor.path)
    longest = min(context_length or config.gconfig.max_tokens, config.gconfig.max_tokens)
    log = GatewayLog(trial.gateway)
    router = BalancingRouter(
        names,
        trial.load_tokens()["data"],
        find_trained_pool(config),
        config.rollout.setup_timeout,
        config.rollout.request_timeout,
        config.rollout.request_retries,
        config.rollout.schedule_policy,
        metrics_window=section.metrics_window,
    )

    try:
        async with router:
            gateway = Gateway(
                router,
                tokenizer,
                log,
                Bounds(config.gconfig.max_new_tokens, longest, tokenizer.size),
                GatewaySettings(
                    section.max_n_per_request,
                    section.max_requests,
                    section.max_eval_requests,
                    section.hold_s,
                ),
                Path(config.actor.path).name,
            )
            limits = SequenceLimits(find_vocab_size(config) or tokenizer.size, longest)
            facts = make_trial_facts(config, trial, len(service.prompts), limits)
            api = AtroposApi(OutsideGroups(service), log.match, facts, section.max_queued_batches)
            own = make_rollout_routes(service, num_servers, make_batch_handler(api))
            yield [*own, *make_routes(api), *make_gateway_routes(gateway)]
    finally:
        log.close()


def make_trial_facts(
    config: GRPOConfig, trial: Trial, num_prompts: int, limits: SequenceLimits
) -> TrialFacts:
    """Return the facts about a trial for environments."""
    wandb = config.stats_logger.wandb
    return TrialFacts(
        limits=limits,
        wandb_group=wandb.group or f"{config.experiment_name}_{config.trial_name}",
        wandb_project=wandb.project or config.experiment_name,
        checkpoint_dir=str(trial.dir / "environments"),
        checkpoint_interval=config.saver.freq_steps or CHECKPOINT_EVERY,
        num_steps=count_steps(config, num_prompts),
        temperature=0.0 if config.gconfig.greedy else config.gconfig.temperature,
    )
