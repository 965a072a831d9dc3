"""Finds the earlier call of an episode that a chat continues, by its messages.

Clients send back the whole conversation as messages, and the text of a reply may be tokenized in another way
than the model made it. So the earlier call is found by its messages, and gives the tokens.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hpc_rl.gateway.requests import Chat
from hpc_rl.rollout.agent.joining import Call


class ChatHistory:
    """The chats of an episode, each with its reply."""

    def __init__(self) -> None:
        self._calls: dict[bytes, Call] = {}

    @property
    def is_used(self) -> bool:
        """Whether it has a call."""
        return bool(self._calls)

    def add(self, chat: Chat, reply: dict[str, Any], call: Call) -> None:
        """Remember a call; of equal ones the latest counts."""
        *_, digest = _digest_beginnings(Chat([*chat.messages, reply], chat.variables))
        self._calls[digest] = call

    def find(self, chat: Chat) -> tuple[Call, int] | None:
        """Return the call with the longest messages and reply at the beginning of a chat, and their number.

        Return None if there is none.
        """
        if not self._calls:  # most calls are the first
            return None
        for number, digest in reversed(list(enumerate(_digest_beginnings(chat), 1))):
            if digest in self._calls:
                return self._calls[digest], number
        return None


def has_reply(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether one of the messages is of the model."""
    return any(message["role"] == "assistant" for message in messages)


def _digest_beginnings(chat: Chat) -> Iterator[bytes]:
    """Yield a digest of the first 1, 2, … messages together with the variables of the template."""
    digest = hashlib.blake2b(_dump(chat.variables))
    for message in chat.messages:
        digest.update(b"\0" + _dump(_normalize(message)))
        yield digest.digest()


def _normalize(message: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a message that matter: clients leave out, add or reformat others of a reply."""
    if message["role"] != "assistant":
        return {name: value for name, value in message.items() if value is not None}
    calls = message.get("tool_calls") or []
    functions = [call["function"] for call in calls if isinstance(call, dict) and "function" in call]
    named = [[function.get("name"), _parse(function.get("arguments"))] for function in functions]
    return {"role": "assistant", "content": (message.get("content") or "").strip(), "calls": named}


def _parse(arguments: Any) -> Any:
    """Return the arguments of a tool call as an object, whether a client sent them as text or not."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode(errors="replace")
