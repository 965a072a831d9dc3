"""Sums of three digits, one reply each: the task of the quickstart as an environment."""

import random
from typing import Any

from hpc_rl.atropos import Environment
from hpc_rl.rollout.conversation import Conversation

ITEMS = [
    {"prompt": f"{a}+{b}+{c}=", "answer": str(a + b + c)}
    for a in range(10)
    for b in range(10)
    for c in range(10)
]
NUM_HELD_OUT = 200


class Arithmetic(Environment):
    """The score is 1 for the right sum, else 0."""

    async def setup(self) -> None:
        items = list(ITEMS)
        random.Random(0).shuffle(items)
        self.eval_items, self.items = items[:NUM_HELD_OUT], items[NUM_HELD_OUT:]

    async def episode(self, item: Any, conversation: Conversation) -> float:
        reply = await conversation.reply()
        return float(reply.strip() == item["answer"])
