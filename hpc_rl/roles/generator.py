"""The rollout role of a trial that generates or evaluates: one pass over the prompts, then the results."""

import asyncio
import logging
import sys

from hpc_rl.config.held_out import list_held_out_sets
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.pool_view import find_trained_pool
from hpc_rl.datasets.curriculum import Curriculum
from hpc_rl.datasets.encode import Prompts
from hpc_rl.datasets.held_out import open_held_out_sets
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.name_resolve import open_names
from hpc_rl.roles import role
from hpc_rl.roles.rollout import make_worker_argv
from hpc_rl.roles.rollout_duties import work
from hpc_rl.rollout.batch_log.judged import Judged
from hpc_rl.rollout.executor import Executor
from hpc_rl.rollout.results import write_results
from hpc_rl.rollout.single_pass import SinglePass
from hpc_rl.supervise.ownership import end_when_fenced
from hpc_rl.trials.user_code import fingerprint_judges

logger = logging.getLogger(__name__)

PROMPTS_PER_SERVER = 64  # at once, unless rollout.max_concurrent_rollouts is set


def generate(context: role.Context) -> int:
    assert isinstance(context.config, GRPOConfig), "only its plan has a rollout role"
    end_when_fenced(open_names(context.trial, context.config), context.attempt)
    return asyncio.run(_generate(context, context.config))


async def _generate(context: role.Context, config: GRPOConfig) -> int:
    tokenizer = Tokenizer(config.tokenizer_path or config.actor.path)
    pool = find_trained_pool(config)
    num_servers = sum(unit.pool == pool for unit in context.plan.units)
    executor = Executor(lambda number: make_worker_argv(context, number), config.rollout.num_workers)
    held_out = list_held_out_sets(config) if config.purpose == "evaluate" else {}
    made = SinglePass(
        context.trial.rollout,
        open_parts(config, tokenizer),
        config.rollout.max_concurrent_rollouts or PROMPTS_PER_SERVER * num_servers,
        config.rollout.prompt_retries,
        executor,
        list(held_out),
    )

    judged = Judged(context.trial.rollout, await asyncio.to_thread(fingerprint_judges, config, sys.path))
    judged.write()

    async def finish() -> None:
        await made.run()
        options, is_evaluation = config.evaluator, config.purpose == "evaluate"
        scores = await asyncio.to_thread(
            write_results,
            context.trial.results,
            made,
            tokenizer,
            options.pass_reward,
            options.sets_column if is_evaluation else None,
            config.keep_best_samples,
            {name: one.pass_reward for name, one in options.sets.items()} if is_evaluation else None,
        )
        means = ", ".join(f"{name} {scores[name]:g}" for name in scores if name.endswith("reward"))
        logger.info("the results are in %s; mean rewards: %s", context.trial.results, means)

    await executor.start()
    try:
        tasks = finish(), executor.wait_for_failure()
        return await work(context, config, *tasks, describe=made.describe_progress)
    finally:
        await executor.close()
        await made.close()


def open_parts(config: GRPOConfig, tokenizer: Tokenizer) -> list[Prompts]:
    """Return the prompts of each data set of the pass. Raises ConfigError."""
    if config.purpose == "generate":
        return Curriculum(config.train_dataset, tokenizer, config.seed).parts
    return [*open_held_out_sets(config, tokenizer).values()]


if __name__ == "__main__":
    role.run("rollout", generate)
