"""A game of several turns: guess a number; the answer to each guess is `higher` or `lower`."""

import re
from typing import Any

from hpc_rl.atropos import Environment
from hpc_rl.rollout.conversation import Conversation

LARGEST = 32
MAX_GUESSES = 6
RULES = f"I think of a number from 1 to {LARGEST}. Guess it: reply with a number, and nothing else."


class GuessNumber(Environment):
    """The score falls from 1 for the first guess to 0 for none; a reply without a number ends the game."""

    items = range(1, LARGEST + 1)
    eval_items = range(1, LARGEST + 1, 4)

    def conversation(self, item: Any, evaluate: bool = False) -> Conversation:
        return super().conversation({"messages": [{"role": "user", "content": RULES}]}, evaluate)

    async def episode(self, item: Any, conversation: Conversation) -> float:
        for guesses in range(MAX_GUESSES):
            numbers = re.findall(r"\d+", await conversation.reply())
            if not numbers or conversation.was_cut_off:
                break
            guess = int(numbers[-1])
            if guess == item:
                return 1.0 - guesses / MAX_GUESSES
            conversation.say("higher" if guess < item else "lower")
        return 0.0
