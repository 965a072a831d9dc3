"""A prompt's sampler without servers, for agents; and plain agents that use OpenAI's API by HTTP."""

import asyncio
from collections.abc import Callable
from typing import Any

from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.core.types import Turn
from hpc_rl.rollout.server_pool import ServerPool
from hpc_rl.rollout.workflow import Sampler
from hpc_rl.servers.client import GenerateRequest

# `ask(messages, **body)` returns the message of the answer; standard library alone, so that it starts fast
CLIENT = """
import json, os, sys, urllib.request
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
def ask(messages, **body):
    made = post("/chat/completions", {"model": "any", "messages": messages, **body})
    return made["choices"][0]["message"]
"""


class Texts:
    """Servers that answer with `reply(text of the prompt)`; `requests` are those that came."""

    def __init__(self, tokenizer: Any, reply: Callable[[str], str]) -> None:
        self.tokenizer, self.reply = tokenizer, reply
        self.requests: list[GenerateRequest] = []

    async def generate_many(self, requests: list[GenerateRequest]) -> list[Turn]:
        self.requests += requests
        await asyncio.sleep(0)
        return [self._make_turn(request) for request in requests]

    def _make_turn(self, request: GenerateRequest) -> Turn:
        text = self.reply(self.tokenizer.decode(request.input_ids, False))
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Turn(ids, [-(1 + at) / 64 for at in range(len(ids))], [("0.3", 0, len(ids))], "stop")


def make_sampler(
    servers: Texts, n_samples: int = 1, reward: Any = None, evaluate: bool = False, **gconfig: Any
) -> Sampler:
    """Return the sampler of prompt 5, whose reward is the length of a completion by default."""
    settings = GenerationHyperparameters(n_samples=n_samples, max_new_tokens=64, max_tokens=2048, **gconfig)
    pool = ServerPool("rollout", servers, servers.tokenizer, settings)  # type: ignore[arg-type]

    async def measure(_prompt: Any, completions: list[str], _columns: dict[str, Any]) -> list[float]:
        return [float(len(one)) for one in completions]

    async def keep(_key: str, value: bytes) -> bytes:
        return value

    prompt = {
        "op": "run", "ticket": 0, "index": 5, "epoch": 0, "row": 2, "columns": {}, "input_ids": [1],
        "version": "0.3", "evaluate": evaluate, "held_out_set": "", "notes": {},
    }  # fmt: skip
    return Sampler(prompt, 1, n_samples, pool, {}, reward or measure, keep)  # type: ignore[arg-type]
