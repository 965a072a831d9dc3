"""The gateway over the embedded engine: all formats return what the model gave, and the log agrees."""

import asyncio
import json

import numpy as np
import pytest

pytest.register_assert_rewrite("conformance")

from conformance import LOGPROB_TOLERANCE, Api, ServedReplica, forward_logprobs  # noqa: E402
from gateways import open_gateway  # noqa: E402
from recipes import make_run  # noqa: E402

from hpc_rl.atropos.intake import SequenceLimits, make_group  # noqa: E402
from hpc_rl.config.options.dataset import PromptDatasetConfig  # noqa: E402
from hpc_rl.config.options.experiment import GRPOConfig  # noqa: E402
from hpc_rl.config.options.inference import EmbeddedConfig, GenerationHyperparameters  # noqa: E402
from hpc_rl.config.options.training import OptimizerConfig, PPOActorConfig, TrainEngineConfig  # noqa: E402
from hpc_rl.core.types import Batch  # noqa: E402
from hpc_rl.datasets.tokenizer import Tokenizer  # noqa: E402
from hpc_rl.engines.fsdp.engine import FSDPEngine  # noqa: E402
from hpc_rl.name_resolve import open_names  # noqa: E402
from hpc_rl.servers.embedded.backend import EmbeddedBackend  # noqa: E402
from hpc_rl.trainers.grpo_recipe import GRPO  # noqa: E402

PROMPT = "1+2="
CHAT = {"messages": [{"role": "user", "content": "1+2"}]}
SAMPLING = {"temperature": 0.8, "top_p": 1.0}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedded")
    replica = ServedReplica(folder, lambda _trial, _model: EmbeddedBackend(EmbeddedConfig()))
    replica.start(60)
    yield replica
    replica.stop()


@pytest.fixture
async def caller(served, tmp_path):
    names, tokenizer = open_names(served.trial), Tokenizer(served.models[0])
    async with open_gateway(names, tokenizer, tmp_path / "log", tokens=served.tokens) as made:
        yield made


def check(caller, served, output, logprobs, temperature=0.8):
    """Compare with a forward pass, and with the log."""
    prompt = caller.gateway.tokenizer.encode(PROMPT)
    wanted = forward_logprobs(served.model, prompt, output, temperature)
    assert np.allclose(wanted, logprobs, atol=LOGPROB_TOLERANCE)
    found = caller.gateway.log.match(prompt + output, [False] * len(prompt) + [True] * len(output))
    assert np.allclose(found.logprobs[len(prompt) :], logprobs, atol=1e-6)
    assert (found.steps[len(prompt) :] == served.step).all()


async def test_generate(caller, served):
    body = {"text": PROMPT, "sampling_params": {**SAMPLING, "max_new_tokens": 20, "n": 10}}
    status, answers = await caller.post("/generate", {**body, "return_logprob": True})
    assert status == 200 and len(answers) == 10
    for one in answers:
        entries = one["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in entries] == one["output_ids"]
        check(caller, served, one["output_ids"], [entry[0] for entry in entries])
        assert one["text"] == caller.gateway.tokenizer.decode(one["output_ids"])


async def test_chat_and_completions(caller, served):
    body = {**SAMPLING, "max_tokens": 20, "n": 3, "logprobs": True, "return_token_ids": True}
    _, chat = await caller.post("/v1/chat/completions", {**body, **CHAT})
    _, text = await caller.post("/v1/completions", {**body, "prompt": PROMPT, "logprobs": 1})
    assert chat["metadata"]["weight_version"] == served.label
    for one in chat["choices"]:
        logprobs = [entry["logprob"] for entry in one["logprobs"]["content"]]
        check(caller, served, one["token_ids"], logprobs)
        assert one["message"]["content"] == caller.gateway.tokenizer.decode(one["token_ids"])
    for one in text["choices"]:
        check(caller, served, one["token_ids"], one["logprobs"]["token_logprobs"])


async def test_environments_at_any_temperature_are_on_policy(caller, served, tmp_path):
    """The trainer's log-probabilities of fresh tokens are the servers', whatever an environment samples at."""
    model = {"path": str(served.model), "attn_impl": "sdpa", "dtype": "float32"}
    engine = FSDPEngine(TrainEngineConfig(**model, optimizer=OptimizerConfig()))
    engine.initialize(1)
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        train_dataset=PromptDatasetConfig(path="", batch_size=3),
        gconfig=GenerationHyperparameters(n_samples=8, temperature=1.0),
        actor=PPOActorConfig(path=str(served.model), ppo_n_minibatches=1, kl_ctl=0),
    )
    run = make_run(tmp_path, config, engine)
    recipe = GRPO(run, None, None, num_prompts=100)
    prompt, groups = caller.gateway.tokenizer.encode(PROMPT), []
    for number, temperature in enumerate((0.1, 0.7, 1.0)):
        params = {"temperature": temperature, "max_new_tokens": 20, "n": 8}
        _, made = await caller.post("/generate", {"text": PROMPT, "sampling_params": params})
        outputs = [one["output_ids"] for one in made]
        body = {
            "tokens": [prompt + ids for ids in outputs],
            "masks": [[-100] * len(prompt) + ids for ids in outputs],
            "scores": [float(i) for i in range(8)],
        }
        group = make_group(body, caller.gateway.log.match, (0, served.step), SequenceLimits(16, 64))
        assert all(row.has_logprobs for row in group.trajectories)
        assert (group.trajectories[0].temperatures is None) == (temperature == 1.0)
        group.index = number
        groups.append(group)
    recipe.update(served.step + 1, Batch(served.step + 1, groups))
    numbers = run.stats.take()
    assert abs(numbers["behave_approx_kl"]) < 1e-3 and numbers["clip_ratio"] == 0.0
    assert numbers["behave_imp_weight"] == pytest.approx(1.0, abs=1e-3)


async def test_a_stream_and_stop_strings_change_nothing_of_a_seeded_completion(caller, served):
    body = {**CHAT, "seed": 3, "max_tokens": 100, "logprobs": True, "ignore_eos": True, **SAMPLING}
    _, whole = await caller.post("/v1/chat/completions", body)
    text = whole["choices"][0]["message"]["content"]
    entries = whole["choices"][0]["logprobs"]["content"]
    *events, _end = await caller.stream("/v1/chat/completions", body)
    choices = [json.loads(one)["choices"][0] for one in events]
    assert len(choices) > 3 and "".join(one["delta"].get("content") or "" for one in choices) == text
    streamed = [entry for one in choices for entry in (one["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
    assert np.allclose([e["logprob"] for e in streamed], [e["logprob"] for e in entries], atol=1e-4)
    stop = text[40:43]
    _, cut = await caller.post("/v1/chat/completions", {**body, "stop": [stop]})
    assert cut["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


async def test_a_weight_update_in_the_middle_of_a_stream(caller, served):
    sampling = {"max_new_tokens": 1500, "ignore_eos": True}
    body = {"text": PROMPT, "sampling_params": sampling, "return_logprob": True}
    call = asyncio.create_task(caller.stream("/generate", body))
    while not caller.gateway.train.running:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    before = served.label
    await Api(served, caller.session).update()
    *events, _end = await call
    meta = json.loads(events[-1])["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == [before, served.label]
    assert meta["completion_tokens"] == 1500 and meta["finish_reason"]["type"] == "length"


async def test_what_the_engine_can_not_do_is_refused_and_the_rest_is_not(caller):
    status, got = await caller.post("/v1/completions", {"prompt": PROMPT, "min_p": 0.2})
    assert status == 400 and "min_p" in got["error"]["message"]
    neutral = {"min_p": 0, "frequency_penalty": 0, "repetition_penalty": 1.0, "top_k": 0, "verbosity": "low"}
    assert (await caller.post("/v1/completions", {"prompt": PROMPT, **neutral}))[0] == 200
