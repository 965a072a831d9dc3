"""What an environment does with its servers, by atroposlib's own ServerManager; run by atroposlib's interpreter.

manager_client.py SCENARIO URL TOKEN MODEL [LENGTH]     prints one JSON object
"""

import asyncio
import json
import resource
import sys
import warnings

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

MESSAGES = [{"role": "user", "content": "1+2"}]
OTHERS = [{"role": "user", "content": "8+1"}]


def manager(kind: str, url: str, token: str, model: str, **options) -> ServerManager:
    config = APIServerConfig(
        server_type=kind, base_url=url, api_key=token, model_name=model, tokenizer_name=model, timeout=120
    )
    return ServerManager([config, config.model_copy()], slurm=False, **options)


def choices(answer) -> list[dict]:
    texts = [one.message.content if hasattr(one, "message") else one.text for one in answer.choices]
    return [
        {"text": text, "finish": one.finish_reason} for one, text in zip(answer.choices, texts, strict=True)
    ]


def nodes(state) -> list[dict]:
    return [
        {"tokens": one.tokens, "mask": one.masked_tokens, "logprobs": one.logprobs, "text": one.full_text}
        for one in state["nodes"]
    ]


async def openai(url, token, model):
    servers = manager("openai", url, token, model, max_n_completions=8)
    chat = await servers.chat_completion(messages=MESSAGES, n=20, max_tokens=6, temperature=1.0, top_p=1.0)
    text = await servers.completion(
        prompt="1+2=", n=3, max_tokens=6, stop=["3"], extra_body={"reasoning": {}}
    )
    held_out = await servers.chat_completion(
        messages=MESSAGES, n=2, max_tokens=4, split="eval", temperature=0.0
    )
    await asyncio.sleep(3.5)  # some health checks, of chat and of completions
    return {
        "chat": choices(chat),
        "text": choices(text),
        "eval": choices(held_out),
        "healthy": [server.server_healthy for server in servers.servers],
        "n_is_ignored": [server.config.n_kwarg_is_ignored for server in servers.servers],
    }


async def managed(kind, url, token, model):
    servers = manager(kind, url, token, model)
    async with servers.managed_server() as session:
        first = await session.chat_completion(messages=MESSAGES, n=1, max_tokens=12, temperature=1.0)
        said = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}]
        said.append({"role": "user", "content": "+5"})
        second = await session.chat_completion(messages=said, n=1, max_tokens=12, temperature=1.0)
        turns = nodes(session.get_state())
    async with servers.managed_server() as session:
        # of another prompt: equal tokens of one prompt can't be told apart, whatever their temperature
        group = await session.chat_completion(messages=OTHERS, n=12, max_tokens=10, temperature=0.7)
        samples = nodes(session.get_state())
    async with servers.managed_server() as session:
        stopped = await session.completion(prompt="7+8=", n=2, max_tokens=30, stop=["1", "2", "3"], top_k=-1)
        stops = nodes(session.get_state())
    await asyncio.sleep(2.5)
    return {
        "turns": turns,
        "samples": samples,
        "stops": stops,
        "answers": [choices(one) for one in (first, second, group, stopped)],
        "healthy": [server.server_healthy for server in servers.servers],
    }


async def long(url, token, model, length):
    """Sample for some seconds, while weights are updated."""
    servers = manager("sglang", url, token, model)
    async with servers.managed_server() as session:
        print("sampling", file=sys.stderr, flush=True)
        calls = [
            session.chat_completion(
                messages=MESSAGES, n=2, max_tokens=int(length), temperature=1.0, ignore_eos=True
            )
            for _ in range(2)
        ]
        await asyncio.gather(*calls)
        made = nodes(session.get_state())
    return {"samples": made, "healthy": [server.server_healthy for server in servers.servers]}


async def many(url, token, model):
    """Play a thousand chats at once, each in a managed server of its own."""
    raise_limits()
    servers = manager("sglang", url, token, model)

    async def chat(number):
        async with servers.managed_server() as session:
            said = [{"role": "user", "content": f"{number % 10}+{number // 10 % 10}"}]
            answer = await session.chat_completion(messages=said, n=1, max_tokens=4, temperature=1.0)
            return answer.choices[0].finish_reason

    results = await asyncio.gather(*map(chat, range(1000)), return_exceptions=True)
    return {
        "answered": len([one for one in results if isinstance(one, str)]),
        "errors": [repr(one) for one in results if not isinstance(one, str)][:5],
    }


def raise_limits():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    scenario, *where = sys.argv[1:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if scenario in ("openai", "long", "many"):
            result = asyncio.run({"openai": openai, "long": long, "many": many}[scenario](*where))
        else:
            result = asyncio.run(managed(scenario, *where))
    ours = [str(one.message) for one in caught if "atroposlib" in one.filename]
    print(json.dumps({**result, "warnings": ours}))


main()
