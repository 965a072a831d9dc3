"""An executor worker of the rollout role, which starts it and talks to it over standard input and output."""

import asyncio
import json
import os
import sys

from hpc_rl import log
from hpc_rl.app.role import arguments
from hpc_rl.config.loading.stored import from_dict
from hpc_rl.config.pool_view import trained_pool
from hpc_rl.config.rules.file_rules import context_of
from hpc_rl.config.sections.experiment import GRPOConfig
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.errors import ConfigError, ExitCode, HpcRlError
from hpc_rl.name_resolve import open_names
from hpc_rl.rollout import pipes
from hpc_rl.rollout.rewards import BUILTINS, Reward, built_in
from hpc_rl.rollout.rewards.reward_process import RewardProcess
from hpc_rl.rollout.worker import Worker
from hpc_rl.rollout.workflows import load_workflow
from hpc_rl.servers.router import Router
from hpc_rl.trial import Trial


def main() -> int:
    pipes.die_with_parent()
    out = pipes.reserve_stdout()
    args = arguments("rollout_worker")
    trial = Trial(args.trial_dir)
    tokens = trial.tokens()
    log.setup("rollout-worker", args.index, list(tokens.values()))
    try:
        config = from_dict(json.loads(trial.config_json.read_bytes()))
        assert isinstance(config, GRPOConfig)
        asyncio.run(work(trial, config, tokens["data"], out))
    except HpcRlError as error:
        print(error, file=sys.stderr)
        os.write(out, pipes.pack({"op": "ends", "error": str(error)}))
        return ExitCode.BAD_CONFIG if isinstance(error, ConfigError) else ExitCode.FAILED
    return ExitCode.DONE


async def work(trial: Trial, config: GRPOConfig, data_token: str, out: int) -> None:
    tokenizer = Tokenizer(config.tokenizer_path or config.actor.path)
    rollout = config.rollout
    workflow = load_workflow(rollout.workflow)
    reward = await open_reward(rollout.reward_fn, rollout.reward_timeout_s)
    router = Router(
        open_names(trial, config),
        data_token,
        trained_pool(config),
        rollout.setup_timeout,
        rollout.request_timeout,
        rollout.request_retries,
        rollout.schedule_policy,
    )
    async with router:
        write = await pipes.pipe_writer(out)
        worker = Worker(config, tokenizer, router, workflow, reward, write, context_of(config))
        await worker.serve(await pipes.stdin_reader())
    os._exit(ExitCode.DONE)  # the parent is gone: nobody waits for what still runs


async def open_reward(path: str, timeout_s: float) -> Reward:
    if path in BUILTINS:
        return built_in(path)
    process = RewardProcess(path, timeout_s)
    await process.start()
    return process.reward


if __name__ == "__main__":
    sys.exit(main())
