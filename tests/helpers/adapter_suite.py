"""The suite for servers that load adapters alone: each token is from the version that its label names."""

import asyncio
from pathlib import Path

import peft
import plain_lora
import plain_training
import pytest
import torch
from conformance import PROMPT, Api, ServedReplica, check_logprobs, forward_logprobs
from transformers import AutoModelForCausalLM

from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.servers.client import GenerateRequest


def make_actor(model: Path) -> PPOActorConfig:
    """Return the options of the policy whose adapters the suite publishes."""
    return PPOActorConfig(path=str(model), **plain_lora.ADAPTER)


def make_adapters(model: Path, folder: Path) -> tuple[list[Path], list[Path]]:
    """Return two adapters as the FSDP engine exports them, and the models with them merged by peft."""
    adapters, merged = [], []
    for seed in (1, 2):
        plain_lora.write_adapter(model, folder / f"start-{seed}", seed=seed)
        options = {**plain_lora.OPTIONS, "lora_path": str(folder / f"start-{seed}")}
        engine = FSDPEngine(plain_training.config_of(model, **options))
        engine.initialize(1)
        adapters.append(folder / f"adapter-{seed}")
        engine.export(adapters[-1])
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        merged.append(folder / f"merged-{seed}")
        peft.PeftModel.from_pretrained(base, adapters[-1]).merge_and_unload().save_pretrained(merged[-1])
    return adapters, merged


async def check_adapters(served: ServedReplica, api: Api, folder: Path, long: dict) -> None:
    """Publish adapters to a server that has started with the base model."""
    base, short = served.models[0], {"max_new_tokens": 30, "ignore_eos": True}
    check_logprobs(await api.turn(**short), {"0.0": base}, 1.0)
    adapters, merged = make_adapters(base, folder)
    served.models = adapters
    paths = {f"0.{step}": merged[step % 2] for step in range(1, 7)}

    await api.update()
    turn = await api.turn(**short)
    assert turn.versions == [("0.1", 0, 30)]
    check_logprobs(turn, paths, 1.0)

    running = asyncio.create_task(api.turn(**long))
    await api.turn(**short)
    await api.update(pause=False)  # a running request keeps its version
    turn = await api.turn(**short)
    assert turn.versions == [("0.2", 0, 30)]
    check_logprobs(turn, paths, 1.0)
    assert not running.done()

    # paused, it ends with its tokens, and its rest is from the newest version
    await api.update()
    turn = await running
    assert [label for label, *_ in turn.versions] == ["0.1", "0.3"]
    check_logprobs(turn, paths, 1.0)

    for _ in range(3):  # older versions are unloaded
        await api.update()
    (scored,) = await api.client.logprobs_many([GenerateRequest(turn.output_ids, {}, "", "0.6")], [1])
    expected = forward_logprobs(paths["0.6"], turn.output_ids[:1], turn.output_ids[1:], 1.0)
    assert scored.logprobs == pytest.approx(expected, abs=1e-3)
    body = {"input_ids": PROMPT, "sampling_params": short, "return_logprob": True}
    status, answer = await api.post("/generate", {**body, "sampling_params": {**short, "n": 2}})
    assert status == 200
    for one in answer:
        assert [span["version"] for span in one["meta_info"]["weight_versions"]] == ["0.6"]
    status, answer = await api.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "1+1"}], "max_tokens": 4}
    )
    assert (status, answer["metadata"]["weight_version"]) == (200, "0.6"), answer
