"""Conversation: several turns with a model as one token sequence.

The model's tokens stay as sampled; only the messages between two turns are tokenized. So the
log-probabilities of a trajectory belong to exactly the tokens that the model saw. Tokenizing the whole
conversation again would not guarantee this.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hpc_rl.core.types import Turn
from hpc_rl.datasets.continuation import encode_continuation
from hpc_rl.datasets.tokenizer import Tokenizer

Sample = Callable[[list[int]], Awaitable[Turn]]


class Conversation:
    """The turns of one trajectory.

    Args:
        tokenizer: The model's tokenizer.
        sample: Returns one generation for the ids of the conversation so far.
        messages: The first messages, rendered by the chat template.
        input_ids: Begin with these tokens instead; then `messages` are only for people to read, and `say`
            adds plain text, without a template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample: Sample,
        messages: Sequence[dict[str, Any]] = (),
        input_ids: Sequence[int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.messages = [dict(message) for message in messages]
        self.turns: list[tuple[list[int], Turn]] = []
        self._sample = sample
        self._is_chat = input_ids is None
        self._context = list(input_ids or ())
        self._unsaid = list(self.messages) if self._is_chat else []

    @property
    def ids(self) -> list[int]:
        """All tokens so far, the input of the next turn."""
        tokens = [token for context, turn in self.turns for token in (*context, *turn.output_ids)]
        return tokens + self._context

    def say(self, content: str, role: str = "user", **fields: Any) -> None:
        """Add a message for the model to answer, for instance of role `user` or `tool`."""
        message = {"role": role, "content": content, **fields}
        self.messages.append(message)
        if self._is_chat:
            self._unsaid.append(message)
        else:
            self._context += self.tokenizer.encode(content, add_special_tokens=False)

    async def reply(self) -> str:
        """Let the model answer; return its text without special tokens. Raises the same as `sample`."""
        if self._unsaid:
            self._context += self._encode_unsaid()
            self._unsaid = []
        turn = await self._sample(self.ids)
        self.turns.append((self._context, turn))
        self._context = []
        text = self.tokenizer.decode(turn.output_ids)
        self.messages.append({"role": "assistant", "content": text})
        return text

    @property
    def was_cut_off(self) -> bool:
        """Whether the last reply ended at its limit of tokens."""
        return bool(self.turns) and self.turns[-1][1].finish_reason == "length"

    def _encode_unsaid(self) -> list[int]:
        if not self.turns:
            return self.tokenizer.encode(self.tokenizer.chat(self._unsaid), add_special_tokens=False)
        before = [{"role": "user", "content": "."}]
        return encode_continuation(self.tokenizer, before, self._unsaid, self.turns[-1][1].output_ids)
