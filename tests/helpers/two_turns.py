"""A workflow of two turns with a reward for each: an even digit first, then an odd one."""

import asyncio
from typing import Any

from hpc_rl import Conversation, Trajectory, TrajectoryGroup, trajectory


async def play(prompt: dict[str, Any], generate: Any) -> TrajectoryGroup:
    games = (_play_one(prompt, generate, sample) for sample in range(generate.n_samples))
    return TrajectoryGroup(generate.index, list(await asyncio.gather(*games)))


async def _play_one(prompt: dict[str, Any], generate: Any, sample: int) -> Trajectory:
    async def take_turn(input_ids: list[int]) -> Any:
        return await generate(input_ids, sample)

    talk = Conversation(generate.tokenizer, take_turn, (), prompt["input_ids"])
    rewards = []
    for wanted in ("02468", "13579"):
        reply = await talk.reply()
        rewards.append(0.5 * (reply[:1] in wanted and bool(reply)))
        talk.say("=")
    return trajectory(talk.turns, sum(rewards), rewards)
