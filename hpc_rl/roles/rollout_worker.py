"""An executor worker of the rollout role, which controls it over standard input and output."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import cast

from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.options.pools import PoolConfig
from hpc_rl.config.pool_view import (
    EVALUATION_POOL,
    find_teacher_pool,
    find_trained_pool,
    has_evaluation_pool,
    list_reward_models,
    view_pool,
)
from hpc_rl.config.rules.file_rules import find_context, find_vocab_size
from hpc_rl.core import log
from hpc_rl.core.algorithms import ALGORITHMS
from hpc_rl.core.collector import spare_collector
from hpc_rl.core.errors import ConfigError, ExitCode, HpcRlError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Trial
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.name_resolve import open_names
from hpc_rl.roles.role import parse_arguments
from hpc_rl.rollout import pipes
from hpc_rl.rollout.distillation import ScoringPool, Teacher, TextSource, make_demonstration
from hpc_rl.rollout.loop_watch import LoopWatch
from hpc_rl.rollout.pipes import EndpointState
from hpc_rl.rollout.rewards import BUILTINS, LIMITED, BatchReward, make_built_in, score_each, weight_rewards
from hpc_rl.rollout.rewards.judge import Judge, make_model_reward
from hpc_rl.rollout.rewards.reward_process import RewardProcess
from hpc_rl.rollout.rewards.tasks import length
from hpc_rl.rollout.server_pool import ChatPool, ServerPool
from hpc_rl.rollout.worker import Worker
from hpc_rl.rollout.workflows import load_workflow
from hpc_rl.servers.external import Endpoint
from hpc_rl.servers.router import Router


def main() -> int:
    pipes.die_with_parent()
    writer = pipes.PipeWriter(pipes.reserve_stdout())
    args = parse_arguments("rollout_worker")
    trial = Trial(args.trial_dir)
    try:
        tokens = trial.load_tokens()
        config = from_dict(json.loads(trial.config_json.read_bytes()))
        assert isinstance(config, GRPOConfig)
        keys = {name: os.environ.get(pool.api_key_env, "") for name, pool in config.pools.items()}
        log.configure("rollout-worker", args.index, [*trial.load_every_secret(), *keys.values()])
        asyncio.run(work(trial, config, tokens["data"], keys, writer.write))
    except HpcRlError as error:
        print(error, file=sys.stderr)
        writer.write(pipes.pack({"op": "ends", "error": log.redact(str(error))}))
        writer.close()
        return ExitCode.BAD_CONFIG if isinstance(error, ConfigError) else ExitCode.FAILED
    return ExitCode.DONE


async def work(
    trial: Trial,
    config: GRPOConfig,
    data_token: str,
    keys: dict[str, str],
    write: Callable[[bytes], None],
) -> None:
    """Serve the rollout role; `keys` are the API keys of external pools."""
    async with contextlib.AsyncExitStack() as stack:
        open_pool = partial(open_servers, stack, trial, config, data_token)
        worker = await open_worker(stack, config, keys, write, open_pool)
        LoopWatch(worker.tell_blocked).start()
        spare_collector()
        await worker.serve(await pipes.open_stdin())
    os._exit(ExitCode.DONE)  # the parent is gone: nobody waits for the rest


async def open_worker(
    stack: contextlib.AsyncExitStack,
    config: GRPOConfig,
    keys: Mapping[str, str],
    write: Callable[[bytes], None],
    open_pool: Callable[[str], Awaitable[ServerPool]],
) -> Worker:
    """Return the configured worker, with its pools, which the stack closes."""
    workflow = load_workflow(config)
    own = await open_pool(find_trained_pool(config))
    others: dict[str, ChatPool] = {}
    for name, pool in config.pools.items():
        if pool.url:
            others[name] = await stack.enter_async_context(
                make_endpoint(config, name, pool, keys[name], write)
            )
        else:
            others[name] = await open_pool(name)
    rewards = await open_rewards(config, others, own.tokenizer)
    answering = {name: pool for name, pool in others.items() if name not in list_reward_models(config)}
    vocab_size = find_vocab_size(config) or own.tokenizer.size
    teacher, source = find_teacher(config, own, others)
    if teacher is not None and isinstance(teacher.pool, Endpoint):
        await teacher.pool.check_scoring()
    evaluated = await open_pool(EVALUATION_POOL) if has_evaluation_pool(config) else None
    return Worker(config, own, answering, workflow, rewards, write, vocab_size, teacher, source, evaluated)


def find_teacher(
    config: GRPOConfig, own: ServerPool, others: Mapping[str, ChatPool]
) -> tuple[Teacher | None, ServerPool | TextSource | None]:
    """Return the teacher that scores samples, and the source of samples in place of the policy, if any."""
    section, name = config.distillation, find_teacher_pool(config)
    if section is None:
        return None, None
    pool = own if name is None else others[name]
    row = ALGORITHMS.get(config.actor.algorithm)
    if row is not None and row.sampled_by == "teacher":
        if isinstance(pool, Endpoint):
            return None, TextSource(pool, own.tokenizer, config.gconfig)
        return None, cast(ServerPool, pool)
    demonstration = make_demonstration(section, own.tokenizer)
    scores = cast(ScoringPool, pool)
    return Teacher(scores, demonstration, follows_trainer=name is None, top_k=section.top_k), None


async def open_servers(
    stack: contextlib.AsyncExitStack, trial: Trial, config: GRPOConfig, data_token: str, name: str
) -> ServerPool:
    """Return a pool of the trial's servers, which the stack closes."""
    view, rollout = view_pool(config, name), config.rollout
    router = Router(
        open_names(trial, config),  # one thread at a time may use it
        data_token,
        name,
        rollout.setup_timeout,
        rollout.request_timeout,
        rollout.request_retries,
        rollout.schedule_policy,
    )
    return ServerPool(
        name,
        await stack.enter_async_context(router),
        Tokenizer(view.tokenizer_path or view.actor.path),
        view.gconfig,
        find_context(config, name),
        config.pools[name].max_requests if name in config.pools else None,
        rollout.enable_rollout_tracing,
    )


def make_endpoint(
    config: GRPOConfig, name: str, pool: PoolConfig, key: str, write: Callable[[bytes], None]
) -> Endpoint:
    """Return the pool of an external endpoint. Raises ConfigError if its key is missing."""
    if pool.api_key_env and not key:
        option, why = (
            f"pools.{name}.api_key_env",
            "is not set in the environment of the job, or is empty; export it before you submit",
        )
        raise ConfigError(Refusal(option=option, value=pool.api_key_env, kind=Kind.MACHINE, why=why))
    rollout = config.rollout
    waits = (rollout.request_timeout, rollout.setup_timeout)

    def tell(problem: str) -> None:
        write(pipes.pack(EndpointState(op="endpoint", pool=name, problem=problem)))

    return Endpoint(name, pool, key, *waits, rollout.enable_rollout_tracing, on_change=tell)


async def open_rewards(
    config: GRPOConfig, pools: Mapping[str, ChatPool], tokenizer: Tokenizer
) -> BatchReward:
    """Return `rollout.reward_fn`, weighted by `rollout.reward_weights`."""
    rollout = config.rollout
    opened = {name: await _open_reward(name, config, pools, tokenizer) for name in rollout.reward_functions}
    weights = rollout.reward_weights or [1.0] * len(opened)
    if list(weights) == [1.0]:
        return next(iter(opened.values()))
    short = [name.rpartition(":")[2] for name in opened]
    names = short if len({*short}) == len(short) else list(opened)
    return weight_rewards(dict(zip(names, zip(opened.values(), weights, strict=True), strict=True)))


async def _open_reward(
    name: str, config: GRPOConfig, pools: Mapping[str, ChatPool], tokenizer: Tokenizer
) -> BatchReward:
    """Return one function: a reward model or a judge in one of the pools, built-in, or the user's."""
    rollout = config.rollout
    if name in list_reward_models(config):
        return make_model_reward(cast(ServerPool, pools[name]))
    if name == "length":
        return score_each(length(tokenizer.encode, config.gconfig.max_new_tokens))
    if name in BUILTINS:
        return score_each(make_built_in(name))
    if name == "judge" and rollout.judge is not None:
        judge = Judge(pools[rollout.judge.pool], rollout.judge, config.seed, rollout.enable_rollout_tracing)
        return score_each(judge.reward)
    options = None
    if name == "code_tests":
        options = {"timeout_s": rollout.reward_timeout_s, "sandbox": rollout.sandbox}
    process = RewardProcess(LIMITED.get(name, name), rollout.reward_timeout_s, options=options)
    await process.start()
    return process.rewards


if __name__ == "__main__":
    sys.exit(main())
