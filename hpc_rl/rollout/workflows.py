"""The table of built-in workflows, and the user's by import path."""

import asyncio
from typing import Any

from hpc_rl.errors import ConfigError
from hpc_rl.rollout.multi_turn import MultiTurn
from hpc_rl.rollout.rewards import import_object
from hpc_rl.rollout.workflow import Sampler, Workflow, trajectory
from hpc_rl.types import TrajectoryGroup


async def single_turn(prompt: dict[str, Any], generate: Sampler) -> TrajectoryGroup | None:
    """n_samples completions of the prompt, each scored."""
    ids = prompt["input_ids"]
    turns = await generate.samples(ids)
    texts = [generate.tokenizer.decode(turn.output_ids) for turn in turns]
    rewards = await asyncio.gather(*(generate.reward(prompt, text) for text in texts))
    scored = zip(turns, rewards, strict=True)
    return TrajectoryGroup(generate.index, [trajectory([(ids, turn)], reward) for turn, reward in scored])


WORKFLOWS: dict[str, Workflow] = {"single_turn": single_turn, "multi_turn": MultiTurn().run}


def load_workflow(path: str) -> Workflow:
    """A built-in or the user's workflow. Raises ConfigError."""
    if path in WORKFLOWS:
        return WORKFLOWS[path]
    found = import_object("rollout.workflow", path)
    if isinstance(found, type):
        found = found()
    run = getattr(found, "run", found)
    if not callable(run):
        allowed = "a function, or an object with a method `async run(prompt, generate)`"
        raise ConfigError(f"rollout.workflow: {path!r} must be {allowed}.")
    return run
