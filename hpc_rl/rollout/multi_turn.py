"""The workflow `multi_turn`: the model tries again after feedback, and may call tools in between.

`rollout.workflow_args` sets its numbers and tools:

    rollout:
      workflow: multi_turn
      workflow_args: {max_turns: 4, turn_discount: 0.9, tools: ["my_module:search"]}
"""

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from hpc_rl.config.row_shapes import get_messages
from hpc_rl.core.types import Trajectory, TrajectoryGroup, Turn
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.conversation import Conversation
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.rollout.tool_call import ToolFailed, call_tool
from hpc_rl.rollout.workflow import Sampler, trajectory

logger = logging.getLogger(__name__)
FEEDBACK = "Your answer is either wrong or can't be read. Please try again."
# the format of calls in Qwen and Hermes models
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class MultiTurn:
    """Several turns for each trajectory, until the reward of one is above 0.

    A trajectory's reward is the sum over its turns t of reward(t) * `turn_discount` ** t. A turn that only
    calls tools has no reward, and does not count as a turn for the discount.

    Args:
        max_turns: Replies of the model, including replies that call tools.
        turn_discount: Factor for each further turn.
        max_tokens_per_trajectory: Most tokens of a trajectory, prompt included; None means
            gconfig.max_tokens.
        feedback: Message to the model after a reward of 0 or less.
        tools: Functions that the model may call, as `package.module:name`; a call has the name and keyword
            arguments as JSON between <tool_call> and </tool_call>. Each runs in a separate process.
        tool_timeout_s: Seconds that one call may take.
        credit_by_turn: Let the reward of a turn count for this turn and earlier ones only, not for later
            ones; with a critic each turn then has its own return.
    """

    def __init__(
        self,
        max_turns: int = 2,
        turn_discount: float = 1.0,
        max_tokens_per_trajectory: int | None = None,
        feedback: str = FEEDBACK,
        tools: Sequence[str] = (),
        tool_timeout_s: float = 10.0,
        credit_by_turn: bool = False,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.max_tokens = max_tokens_per_trajectory
        self.feedback = feedback
        self.tools = {path.rpartition(":")[2]: path for path in tools}
        self.tool_timeout_s = tool_timeout_s
        self.credit_by_turn = credit_by_turn
        self._logged: set[str] = set()  # tracebacks of tools

    async def run(self, prompt: dict[str, Any], generate: Sampler) -> TrajectoryGroup:
        """Return a group of n_samples trajectories."""
        samples = (self._trajectory(prompt, generate, sample) for sample in range(generate.n_samples))
        return TrajectoryGroup(generate.index, list(await asyncio.gather(*samples)))

    async def _trajectory(self, prompt: dict[str, Any], generate: Sampler, sample: int) -> Trajectory:
        async def turn_of(input_ids: list[int]) -> Turn:
            return await generate(input_ids, sample, max_tokens=self.max_tokens)

        messages = get_messages(prompt)
        conversation = Conversation(
            generate.tokenizer, turn_of, messages or (), None if messages else prompt["input_ids"]
        )
        total, answers, by_turn = 0.0, 0, list[float]()
        for _ in range(self.max_turns):
            try:
                reply = await conversation.reply()
            except Rejection as rejection:
                if rejection.reason != RejectReason.TOO_LONG or not conversation.turns:
                    raise
                break
            if calls := TOOL_CALL.findall(reply) if self.tools else []:
                for result in await asyncio.gather(*(self._result(call) for call in calls)):
                    conversation.say(result, role="tool")
                by_turn.append(0.0)
                continue
            reward = await generate.reward(prompt, reply)
            by_turn.append(self.turn_discount**answers * reward)
            total += by_turn[-1]
            answers += 1
            if reward > 0 or conversation.was_cut_off:
                break
            conversation.say(self.feedback)
        made = trajectory(conversation.turns, total, by_turn if self.credit_by_turn else None)
        made.stats |= {"turns": float(len(conversation.turns)), "answers": float(answers)}
        return made

    async def _result(self, call: str) -> str:
        """Return a tool's result, or an error for the model to read."""
        try:
            content = json.loads(call)
            name, arguments = content["name"], content.get("arguments") or {}
            path = self.tools[name]
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"error: a call has a name and arguments; the tools are {', '.join(self.tools)}"
        try:
            return await call_tool(path, arguments, self.tool_timeout_s)
        except ToolFailed as error:
            if error.frames and error.frames not in self._logged:
                self._logged.add(error.frames)
                form = "tool %s failed, and the model gets the error as its result (logged once): %s\n%s"
                logger.warning(form, path, error, error.frames)
            return f"error: {error}"
