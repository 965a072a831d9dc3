"""One suite for every backend: atroposlib's ServerManager and managed server against the gateway.

Subclass `Managed` and give a module-scoped fixture `served` (a ServedReplica). The server lives through the
whole class. What only one backend is tried with is in its file.
"""

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest
from conformance import Api
from gateways import open_gateway
from patience import extend

from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.gateway.requests import Bounds
from hpc_rl.name_resolve import open_names

CLIENT = Path(__file__).parent / "manager_client.py"
MASKED, NO_LOGPROB = -100, 1.0
FINISH_REASONS = {"stop", "length"}


@pytest.fixture
async def caller(served, tmp_path):
    bounds = Bounds(max_new_tokens=64, context=4096, vocab_size=16)
    names, tokenizer = open_names(served.trial), Tokenizer(served.models[0])
    async with open_gateway(names, tokenizer, tmp_path / "log", bounds=bounds, tokens=served.tokens) as made:
        made.model = served.models[0]
        yield made


async def start(python: str, scenario: str, caller, base: str = "/v1", token: str = "", length: int = 0):
    arguments = [CLIENT, scenario, caller.url + base, token or caller.token, caller.model]
    arguments += [str(length)] if length else []
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(python, *arguments, stdout=pipe, stderr=pipe, env=env)


async def result_of(process) -> dict:
    out, errors = await asyncio.wait_for(process.communicate(), extend(170))
    assert process.returncode == 0, errors.decode()[-3000:]
    return json.loads(out.decode().splitlines()[-1])


async def run(python: str, scenario: str, caller, *where: str) -> dict:
    return await result_of(await start(python, scenario, caller, *where))


def check_nodes(nodes: list[dict], caller) -> None:
    """Each token that counts has the log-probability that the gateway logged, and a version."""
    for node in nodes:
        assert len(node["tokens"]) == len(node["mask"]) == len(node["logprobs"])
        mask = [entry != MASKED for entry in node["mask"]]
        assert any(mask)
        for token, entry, value in zip(node["tokens"], node["mask"], node["logprobs"], strict=True):
            assert (entry == MASKED) == (value == NO_LOGPROB) and (entry == MASKED or value <= 0)
            assert entry in (MASKED, token)
        found = caller.gateway.log.match(node["tokens"], mask)
        assert found.has_logprob.tolist() == mask
        assert np.allclose(found.logprobs[mask], np.asarray(node["logprobs"])[mask], atol=1e-6)
        assert (found.steps[mask] >= 0).all() and (found.lineages[mask] == 0).all()


def check_counters(caller) -> None:
    counters = caller.gateway.counters
    assert (counters.refused, counters.unanswered, counters.abandoned) == (0, 0, 0)


class Managed:
    """The suite. LENGTH is how many tokens take a backend some seconds."""

    LENGTH = 1500

    async def test_server_manager_of_an_openai_server(self, caller, atropos_python):
        got = await run(atropos_python, "openai", caller)
        assert len(got["chat"]) == 20 and len(got["text"]) == 3 and len(got["eval"]) == 2
        assert {one["finish"] for one in got["chat"] + got["text"] + got["eval"]} <= FINISH_REASONS
        assert all("3" not in one["text"] for one in got["text"])
        assert got["eval"][0] == got["eval"][1]
        assert got["healthy"] == [True, True] and got["n_is_ignored"] == [False, False]
        assert not [text for text in got["warnings"] if "n kwarg" in text]
        assert caller.gateway.counters.probes >= 3
        check_counters(caller)

    async def test_managed_server_returns_what_was_sampled(self, caller, atropos_python):
        await check_managed(caller, atropos_python, "sglang")

    async def test_a_weight_update_is_invisible(self, caller, served, atropos_python):
        await check_update(caller, served, atropos_python, "abort", self.LENGTH)


async def check_managed(caller, python: str, kind: str) -> None:
    got = await run(python, kind, caller)
    assert len(got["samples"]) == 12 and got["healthy"][0]
    check_nodes(got["turns"] + got["samples"] + got["stops"], caller)
    for answers in got["answers"]:
        assert {one["finish"] for one in answers} <= FINISH_REASONS
    tokenizer = caller.gateway.tokenizer
    for node, answer in zip(got["samples"], got["answers"][2], strict=True):
        sampled = [
            token for token, entry in zip(node["tokens"], node["mask"], strict=True) if entry != MASKED
        ]
        assert tokenizer.decode(sampled) == answer["text"]
    check_counters(caller)


async def check_update(caller, served, python: str, mode: str, length: int) -> None:
    """Sample while the servers are paused for a while and get other weights."""
    api, before = Api(served, caller.session), served.step
    client = await start(python, "long", caller, length=length)
    while b"sampling" not in await client.stderr.readline():
        pass
    while not caller.gateway.train.running:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.4)
    await api.control("/pause_generation", {"mode": mode})
    await asyncio.sleep(1.5)
    await api.update(pause=False)
    await api.client.resume()
    got = await result_of(client)
    assert len(got["samples"]) == 4 and got["healthy"][0]
    check_nodes(got["samples"], caller)
    steps = set()
    for node in got["samples"]:
        mask = [entry != MASKED for entry in node["mask"]]
        assert sum(mask) == length
        steps |= set(caller.gateway.log.match(node["tokens"], mask).steps[mask].tolist())
    assert steps == {before, served.step}
    check_counters(caller)
