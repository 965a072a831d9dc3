"""One suite for every backend, through the proxy and with our client: what a trainer and a rollout role rely
on.

Subclass `Conformance` and give a module-scoped fixture `served` (a ServedReplica). The server lives through
the whole class.
"""

import asyncio
import contextlib
import json
import shutil
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from patience import extend, wait_until
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from version_history import publish_model

from hpc_rl.config.options.inference import GenerationHyperparameters
from hpc_rl.config.options.pools import PoolConfig
from hpc_rl.core.errors import (
    ConfigError,
    InputRefused,
    RequestRefused,
    RoleFailed,
    ServerStale,
    ServerUnavailable,
)
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.core.types import Turn, WeightVersion
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.examples.toy import make_tokenizer
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.rollout.distillation import TextSource
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.rollout.server_pool import ServerPool
from hpc_rl.servers.base import Backend
from hpc_rl.servers.client import GenerateRequest, HttpServerClient, PartialTurn, PauseMode, open_session
from hpc_rl.servers.external import Endpoint
from hpc_rl.servers.replica import Identity, Replica
from hpc_rl.servers.router import Router
from hpc_rl.servers.weight_group import Bucket, WeightGroup, make_body, open_store, pack
from hpc_rl.weight_files.model_copy import ModelCopy

PROMPT = [4, 13, 5, 13, 6, 14]
LONG = {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 1.0}
LOGPROB_TOLERANCE = 1e-4
MANY_TOKENS, LONG_TOLERANCE = 1000, 5e-4  # sums of float32 over 3,500 tokens differ by 1.1e-4


def make_model(folder: Path, seed: int) -> None:
    """A tiny Qwen3 with a long context, the toy's tokenizer and a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest of vLLM on a CPU
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # ones would hide a norm that is left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_reward_model(folder: Path, seed: int) -> None:
    """The same with one number as its head."""
    make_model(folder, seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)


def plain_scores(folder: Path, inputs: list[list[int]]) -> list[float]:
    """What transformers makes of each input, by itself; none ends with the padding token, which it leaves out."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in inputs]


async def check_failed_start(backend: Backend, model: Path) -> None:
    """A server that was given --no-such-flag does not start, and its own words are in the failure."""
    try:
        with pytest.raises(RoleFailed, match="no-such-flag"):
            await backend.start(str(model), "0.0")
    finally:
        await backend.stop()


def forward_logprobs(path: Path, ids: list[int], made: list[int], temperature: float) -> list[float]:
    """log p of the made tokens by a plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids + made])).logits[0, len(ids) - 1 : -1]
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, torch.tensor(made)[:, None])[:, 0].tolist()


def forward_all_logprobs(path: Path, ids: list[int]) -> torch.Tensor:
    """log p of every token after each position, float32 [T, V], by a plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)


class ServedReplica:
    """A replica in a thread of its own, for a trial directory with two checkpoints of one shape."""

    def __init__(self, folder: Path, make_backend: Callable[[Trial, Path], Backend]) -> None:
        self.trial = Trial(folder / "trial")
        self.trial.make_dirs()
        self.trial.make_secret()
        self.tokens = self.trial.load_tokens()
        self.models = [folder / "model-0", folder / "model-1"]
        for seed, path in enumerate(self.models):
            make_model(path, seed)
        self.tokenizer = make_tokenizer()
        self.step = 0
        self.model = self.models[0]
        self.point(self.model)
        self.names = open_names(self.trial)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._make_backend = make_backend
        self._thread = threading.Thread(target=self._main, name="replica")

    @property
    def label(self) -> str:
        return str(WeightVersion(0, self.step))

    def point(self, path: Path) -> None:
        """Publish, as far as files go."""
        record = {"label": self.label, "lineage": 0, "step": self.step, "path": str(path)}
        write_json(self.trial.current_weights, record)

    def start(self, timeout_s: float) -> None:
        self._thread.start()
        deadline = time.monotonic() + extend(timeout_s)
        while self.lease().get("state") != "serving":
            if self._failure:
                raise self._failure
            assert time.monotonic() < deadline, f"not serving after {timeout_s} s: {self.lease()}"
            time.sleep(0.1)

    def _main(self) -> None:
        async def life() -> None:
            backend = self._make_backend(self.trial, self.models[0])
            names = open_names(self.trial)
            await Replica(
                backend, self.trial, names, self.tokens, Identity(0, "1.0", 0), str(self.models[0])
            ).run(self._stopping)

        try:
            asyncio.run(life())
        except BaseException as error:
            self._failure = error

    def lease(self) -> dict[str, Any]:
        seen = self.names.list_leases(keys.servers("rollout")).get(keys.server("rollout", 0))
        return seen.value if seen else {}

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(extend(30))
        if self._failure:
            raise self._failure


class Api:
    """Client and raw HTTP for one test."""

    def __init__(self, served: ServedReplica, session: aiohttp.ClientSession) -> None:
        self.served, self.session = served, session
        self.url = served.lease()["url"]
        self.client = HttpServerClient(
            session, self.url, served.tokens["data"], served.tokens["control"], extend(60)
        )

    async def turn(self, ids: list[int] | None = None, min_version: str = "", **sampling: Any) -> Turn:
        given = {"max_new_tokens": 16, "temperature": 1.0, **sampling}
        request = GenerateRequest(ids or PROMPT, given, uuid.uuid4().hex, min_version)
        return (await self.client.generate_many([request]))[0]

    async def post(self, path: str, body: Any, token: str | None = "data") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.served.tokens.get(token, token)}"} if token else {}
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if raw else None

    async def control(self, path: str, body: dict[str, Any]) -> None:
        status, answer = await self.post(path, body, "control")
        assert status == 200, answer

    async def update(self, pause: bool = True) -> None:
        """Publish the other model as the next version."""
        served = self.served
        served.step += 1
        served.model = served.models[served.step % 2]
        served.point(served.model)
        if pause:
            await self.client.pause()
        await self.client.update_weights(str(served.model), served.label)
        if pause:
            await self.client.resume()

    def next_buckets(self) -> list[tuple[Bucket, torch.Tensor]]:
        """Name the other model as the next version; return its weights in three buckets."""
        served = self.served
        served.step += 1
        served.model = served.models[served.step % 2]
        return make_buckets(served.model)

    def describe(
        self, group: WeightGroup, bucket: tuple[Bucket, torch.Tensor], last: bool, keep_cache: bool = False
    ) -> dict[str, Any]:
        return make_body(bucket[0], group.name, self.served.label, last, keep_cache)

    async def send_bucket(
        self, group: WeightGroup, bucket: tuple[Bucket, torch.Tensor], last: bool, keep_cache: bool = False
    ) -> None:
        work = group.broadcast(bucket[1])
        await self.client.receive_bucket(self.describe(group, bucket, last, keep_cache))
        await asyncio.to_thread(work.wait)

    async def load_checksums(self) -> dict[str, str]:
        """Checksums of the weights in use, by the engine's names."""
        status, answer = await self.post("/weights_checker", {"action": "checksum"}, "control")
        assert status == 200, answer
        [rank] = answer["ranks"]
        return rank["checksums"]

    async def publish_copy(self, copy: ModelCopy, mode: PauseMode) -> None:
        """Publish the current version from the node's copy, with requests paused in a mode."""
        version = WeightVersion.parse(self.served.label)
        await asyncio.to_thread(copy.bring_to, version)
        await self.client.pause(mode)
        with copy.hold(version) as folder:
            await self.client.update_weights(str(folder), self.served.label, keep_cache=mode == "in_place")
        await self.client.resume()

    async def publish_buckets(self, group: WeightGroup, mode: PauseMode) -> None:
        """Publish the current version over a group, with requests paused in a mode."""
        *others, last = make_buckets(self.served.model)
        await self.client.pause(mode)
        await self.client.begin_update(self.served.label)
        for bucket in others:
            await self.send_bucket(group, bucket, False, keep_cache=mode == "in_place")
        await self.send_bucket(group, last, True, keep_cache=mode == "in_place")
        await self.client.end_update()
        await self.client.resume()


def make_buckets(model: Path) -> list[tuple[Bucket, torch.Tensor]]:
    """Pack the weights of a checkpoint into three buckets."""
    tensors = sorted(load_file(model / "model.safetensors").items())
    return [pack(tensors[at::3]) for at in range(3)]


def copy_with_changes(model: Path, target: Path, seed: int) -> Path:
    """Write a checkpoint in which 2 % of the values of each tensor differ."""
    shutil.copytree(model, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(model / "model.safetensors")
    for tensor in tensors.values():
        hits = torch.rand(tensor.shape, generator=generator) < 0.02
        hits.view(-1)[seed % hits.numel()] = True
        tensor[hits] *= 1.25
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@contextlib.asynccontextmanager
async def open_group(api: Api) -> AsyncIterator[WeightGroup]:
    """A process group of this process and the server."""
    name, store = uuid.uuid4().hex, open_store("127.0.0.1", 60)
    joining = asyncio.create_task(api.client.join_group(name, ("127.0.0.1", store.port), 2, "gloo"))
    group = await asyncio.to_thread(WeightGroup, store, 0, 2, name, address="127.0.0.1", timeout_s=60)
    await joining
    try:
        yield group
    finally:
        group.close()
        await api.client.leave_group(name)


@pytest.fixture
async def api(served: ServedReplica):
    async with open_session() as session:
        yield Api(served, session)


def check_logprobs(
    turn: Turn, paths: dict[str, Path], temperature: float, prompt: list[int] = PROMPT
) -> None:
    """Every token's logprob is that of a plain forward pass of the model that its span names."""
    assert [span[1] for span in turn.versions[1:]] == [span[2] for span in turn.versions[:-1]]
    assert (turn.versions[0][1], turn.versions[-1][2]) == (0, len(turn.output_ids))
    assert len(turn.output_logprobs) == len(turn.output_ids)
    for label, start, end in turn.versions:
        wanted = forward_logprobs(paths[label], prompt, turn.output_ids, temperature)[start:end]
        worst = max(abs(a - b) for a, b in zip(wanted, turn.output_logprobs[start:end], strict=True))
        tolerance = LOGPROB_TOLERANCE if end < MANY_TOKENS else LONG_TOLERANCE
        assert worst < tolerance, f"{label}: {worst}"


TRUNCATED = [{"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 4}]


PENALTIES = [{"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}, {"min_new_tokens": 24}]


def named(sampling: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in sampling.items())


class Conformance:
    """The suite."""

    long = LONG  # what takes long enough to be interrupted
    lacks_penalties = False

    async def test_generate_makes_the_tokens_that_were_asked_for(self, api):
        turn = await api.turn(max_new_tokens=9, ignore_eos=True)
        assert len(turn.output_ids) == len(turn.output_logprobs) == 9
        assert turn.finish_reason == "length"
        assert turn.versions == [(api.served.label, 0, 9)]

    @pytest.mark.parametrize(
        "sampling",
        [
            {"temperature": 1.0},
            {"temperature": 0.7},
            {"temperature": 1.3},
            {"temperature": 0.0},
            {"temperature": 0.0, "top_p": 0.8},
        ],
        ids=named,
    )
    async def test_logprobs_are_those_of_a_forward_pass(self, api, sampling):
        await self.check_forward_pass(api, sampling)

    @pytest.mark.parametrize("sampling", TRUNCATED, ids=named)
    async def test_tokens_that_are_left_out_count_in_logprobs(self, api, sampling):
        await self.check_forward_pass(api, sampling)

    async def check_forward_pass(self, api, sampling):
        turns = await asyncio.gather(
            *(api.turn(PROMPT[:n], max_new_tokens=40, ignore_eos=True, **sampling) for n in (2, 4, 6))
        )
        for n, turn in zip((2, 4, 6), turns, strict=True):
            check_logprobs(turn, {api.served.label: api.served.model}, sampling["temperature"], PROMPT[:n])

    async def test_greedy_takes_the_likeliest(self, api):
        turns = [await api.turn(max_new_tokens=12, temperature=0.0, ignore_eos=True) for _ in range(2)]
        assert turns[0].output_ids == turns[1].output_ids
        model = AutoModelForCausalLM.from_pretrained(api.served.model, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + turns[0].output_ids])).logits[0]
        assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == turns[0].output_ids

    async def test_n_and_batches_answer_with_lists(self, api):
        sampling = {"max_new_tokens": 5, "ignore_eos": True}
        status, answer = await api.post(
            "/generate", {"input_ids": PROMPT, "sampling_params": {**sampling, "n": 3}}
        )
        assert status == 200 and [len(one["output_ids"]) for one in answer] == [5, 5, 5]
        status, answer = await api.post(
            "/generate", {"input_ids": [PROMPT, PROMPT[:3]], "sampling_params": sampling}
        )
        assert status == 200 and [one["meta_info"]["prompt_tokens"] for one in answer] == [6, 3]

    async def test_samples_of_one_prompt_in_one_call(self, api):
        makes = [{"max_new_tokens": 3 + i, "ignore_eos": True, "temperature": 1.0} for i in range(4)]
        turns = await api.client.generate_many(
            [GenerateRequest(PROMPT, make, uuid.uuid4().hex) for make in makes]
        )
        assert [len(turn.output_ids) for turn in turns] == [3, 4, 5, 6]
        for turn in turns:
            check_logprobs(turn, {api.served.label: api.served.model}, 1.0)

    async def test_stop_token_ends_and_is_part_of_the_output(self, api):
        free = await api.turn(max_new_tokens=30, temperature=0.0, ignore_eos=True)
        token = free.output_ids[7]
        at = free.output_ids.index(token)
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 30, "temperature": 0.0, "stop_token_ids": [token]},
        }
        _, answer = await api.post("/generate", body)
        eos_at = free.output_ids.index(1) if 1 in free.output_ids else 30
        assert answer["output_ids"] == free.output_ids[: min(at, eos_at) + 1]
        assert answer["meta_info"]["finish_reason"] == {
            "type": "stop",
            "matched": token if at < eos_at else 1,
        }
        ignored = await api.turn(max_new_tokens=30, temperature=0.0, ignore_eos=True, stop_token_ids=[token])
        assert len(ignored.output_ids) == 30

    async def test_min_new_tokens_holds_stop_tokens_back(self, api):
        every = list(range(8))
        turns = await asyncio.gather(*(api.turn(min_new_tokens=6, stop_token_ids=every) for _ in range(8)))
        assert all(len(turn.output_ids) >= 6 for turn in turns)

    async def test_unknown_sampling_key_is_refused(self, api):
        with pytest.raises(RequestRefused, match="400"):
            await api.turn(max_tokens=4)

    async def test_too_long_is_refused(self, api):
        with pytest.raises(InputRefused, match="400"):
            await api.turn([4] * 4096)

    async def test_log_probabilities_of_given_tokens_are_those_of_a_forward_pass(self, api):
        """Of inputs of several lengths and starts, in one call, with the likely tokens at each position."""
        served, tokenizer = api.served, Tokenizer(api.served.model)
        inputs = [[*PROMPT, 3, 7, 9], [*PROMPT, 14] * 30, [5, 6]]
        starts = [len(PROMPT), 100, 1]
        async with Router(open_names(served.trial), served.tokens["data"]) as router:
            pool = ServerPool("rollout", router, tokenizer, GenerationHyperparameters(), context=4096)
            scored = await pool.compute_logprobs(inputs, starts, top_k=3, min_version=served.label)
            plain = await pool.compute_logprobs(inputs, starts)
            with pytest.raises(Rejection, match="4097 tokens, the model's context is 4096"):
                await pool.compute_logprobs([[4] * 4097], [1])
        for ids, start, one, other in zip(inputs, starts, scored, plain, strict=True):
            expected_TV = forward_all_logprobs(served.model, ids)[start - 1 : -1]
            own_T = expected_TV.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
            assert one.logprobs == pytest.approx(own_T.tolist(), abs=1e-3)
            assert other.logprobs == pytest.approx(own_T.tolist(), abs=1e-3) and not other.top_ids
            best_TK = expected_TV.gather(1, torch.tensor(one.top_ids))
            assert torch.allclose(best_TK, torch.tensor(one.top_logprobs), atol=1e-3)
            assert torch.allclose(best_TK, expected_TV.topk(3).values, atol=1e-3)
        for body in ({"input_ids": [[1, 2]], "starts": [0]}, {"input_ids": [[1, 2]], "starts": []}):
            assert (await api.post("/logprobs", body))[0] == 400
        assert (await api.post("/logprobs", {"input_ids": [[1, 2]], "starts": [1]}, None))[0] == 401

    @pytest.mark.parametrize("option", PENALTIES, ids=named)
    async def test_a_penalty_is_in_the_log_probabilities_or_refused(self, api, option):
        """So the trainer, which has no penalty, can't compute them: submission warns of it, or refuses it."""
        sampling = {"temperature": 0.7, "max_new_tokens": 24, **option}
        if self.lacks_penalties and "min_new_tokens" not in option:
            with pytest.raises(InputRefused, match="can't serve"):
                await api.turn(**sampling)
            return
        turn = await api.turn(**sampling)
        with pytest.raises(AssertionError, match=rf"^{api.served.label}: "):
            check_logprobs(turn, {api.served.label: api.served.model}, 0.7)

    async def test_pause_abort_returns_what_was_made_and_the_client_goes_on(self, api):
        sampling, wanted = self.long, self.long["max_new_tokens"]
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        raw = asyncio.create_task(api.post("/generate", body))
        # once this one has tokens, so has the one before it, which shows them at its end only
        request, _ = await self.begin_running(api)
        await api.control("/pause_generation", {"mode": "abort"})
        status, answer = await raw
        assert status == 200 and answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < wanted
        await api.client.resume()
        (turn,) = await request
        assert turn.finish_reason == "length" and len(turn.output_ids) == wanted
        check_logprobs(turn, {api.served.label: api.served.model}, 1.0)

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    async def test_pause_holds_requests_until_continue(self, api, mode):
        running = asyncio.create_task(api.turn(**self.long))
        await asyncio.sleep(0.4)
        await api.control("/pause_generation", {"mode": mode})
        newcomer = asyncio.create_task(api.turn())
        await asyncio.sleep(1.0)
        assert not running.done() and not newcomer.done()
        await api.client.resume()
        turn = await running
        assert len(turn.output_ids) == self.long["max_new_tokens"] and turn.finish_reason == "length"
        check_logprobs(turn, {api.served.label: api.served.model}, 1.0)
        assert (await newcomer).output_ids

    async def test_unknown_pause_mode_is_refused(self, api):
        assert (await api.post("/pause_generation", {"mode": "gently"}, "control"))[0] == 400
        assert (await api.turn()).output_ids

    async def test_health_is_immediate_while_paused(self, api):
        await api.client.pause()
        try:
            begin = time.monotonic()
            health = await api.client.health()
            assert time.monotonic() - begin < extend(1.0)
            assert health["state"] == "paused"
            assert health["weight_version"] == api.served.label and health["epoch"] >= 1
        finally:
            await api.client.resume()
        assert (await api.client.health())["state"] == "serving"

    async def test_running_request_goes_on_under_the_new_weights(self, api):
        old = (api.served.label, api.served.model)
        running, _ = await self.begin_running(api)
        await api.update()
        (turn,) = await running
        assert [span[0] for span in turn.versions] == [old[0], api.served.label]
        check_logprobs(turn, {old[0]: old[1], api.served.label: api.served.model}, 1.0)

    async def test_tokens_of_a_running_request_come_in_parts(self, api):
        finishing, partials = await self.begin_running(api, 3)
        assert not finishing.done() and all(partial.is_unfinished for partial in partials)
        self.check_partials(api, partials, [api.served.label])
        await finishing
        assert [len(partial.turn.output_ids) for partial in partials] == [self.long["max_new_tokens"]] * 3
        self.check_partials(api, partials, [api.served.label])

    async def test_parts_have_the_versions_that_sampled_them(self, api):
        """Before and after an update, for a client that never receives the end."""
        old = api.served.label
        finishing, partials = await self.begin_running(api, 2)
        await api.update()
        new = api.served.label
        await self.until(lambda: all(partial.turn.versions[-1][0] == new for partial in partials), finishing)
        finishing.cancel()
        self.check_partials(api, partials, [old, new])

    async def begin_running(self, api, count=1):
        """Begin long requests, and wait until each has tokens; return the call that finishes them, and them."""
        partials = [PartialTurn(GenerateRequest(PROMPT, self.long, uuid.uuid4().hex)) for _ in range(count)]
        finishing = asyncio.create_task(api.client.finish(partials))
        await self.until(lambda: all(partial.turn.output_ids for partial in partials), finishing)
        return finishing, partials

    async def until(self, holds, finishing):
        async with asyncio.timeout(extend(60)):
            while not holds() and not finishing.done():
                await asyncio.sleep(0.01)

    def check_partials(self, api, partials, labels):
        served = api.served
        paths = {label: served.models[WeightVersion.parse(label).step % 2] for label in labels}
        for partial in partials:
            assert [span[0] for span in partial.turn.versions] == labels
            check_logprobs(partial.turn, paths, 1.0)

    async def test_update_changes_label_and_weights(self, api):
        before = await api.turn(max_new_tokens=20, temperature=0.0, ignore_eos=True)
        await api.update(pause=False)
        after = await api.turn(max_new_tokens=20, temperature=0.0, ignore_eos=True)
        assert before.output_ids != after.output_ids
        assert (await api.client.model_info())["weight_version"] == api.served.label == after.versions[0][0]
        check_logprobs(after, {api.served.label: api.served.model}, 0.0)
        # the lease follows in the background
        await asyncio.to_thread(wait_until, lambda: api.served.lease()["version"] == api.served.label)

    async def test_weights_arrive_over_a_process_group(self, api):
        old = (api.served.label, api.served.model)
        running, _ = await self.begin_running(api)
        async with open_group(api) as group:
            for _ in range(2):
                buckets = api.next_buckets()
                await api.client.pause()
                await api.client.begin_update(api.served.label)
                with pytest.raises(RequestRefused, match="only a part of weights"):
                    await api.client.resume()
                for index, bucket in enumerate(buckets):
                    await api.send_bucket(group, bucket, index == len(buckets) - 1)
                await api.client.end_update()
                await api.client.resume()
                check_logprobs(await api.turn(ignore_eos=True), {api.served.label: api.served.model}, 1.0)
            (turn,) = await running
            assert turn.versions[0][0] == old[0]
            paths = {str(WeightVersion(0, step)): api.served.models[step % 2] for step in range(99)}
            check_logprobs(turn, paths, 1.0)
            assert (await api.client.model_info())["weight_version"] == api.served.label

    async def test_checksums_follow_twenty_publications(self, api, tmp_path):
        """Ten versions, by differences and over a group in turn; each is then loaded whole, as the next one."""
        served, last, base = api.served, {}, None
        copy = ModelCopy(tmp_path / "copy", tmp_path / "versions")
        running = asyncio.create_task(api.turn(**self.long))
        modes: list[PauseMode] = ["retract", "in_place", "abort"]
        async with open_group(api) as group:
            for number in range(10):
                before = served.model
                served.step += 1
                served.model = copy_with_changes(before, tmp_path / f"model-{number}", number)
                version = WeightVersion(0, served.step)
                publish_model(copy.versions, version, base, before if base else None, served.model)
                base = version
                mode = modes[number // 2 % 3]
                if number % 2:
                    await api.publish_buckets(group, mode)
                else:
                    await api.publish_copy(copy, mode)
                checksums = await api.load_checksums()
                assert checksums != last
                served.step += 1
                await api.client.switch_weights(str(served.model), served.label, "retract")
                assert await api.load_checksums() == checksums, (number, mode)
                last = checksums
        check_logprobs(await api.turn(ignore_eos=True), {served.label: served.model}, 1.0)
        assert (await running).output_ids
        await api.update()

    async def test_a_group_that_breaks_does_not_mix_weights(self, api):
        async with open_group(api) as group:
            first, *_ = api.next_buckets()
            served = api.served
            with pytest.raises(RequestRefused, match="pause"):
                await api.client.begin_update(served.label)
            await api.client.pause()
            await api.client.begin_update(served.label)
            await api.send_bucket(group, first, False)
            receiving = asyncio.create_task(api.client.receive_bucket(api.describe(group, first, False)))
            await asyncio.sleep(0.2)
            group.close()
            with pytest.raises((RequestRefused, ServerUnavailable)):
                await receiving
            with pytest.raises(RequestRefused):
                await api.client.end_update()
            with pytest.raises(RequestRefused):
                await api.client.resume()
            await api.client.update_weights(str(served.model), served.label)
            await api.client.resume()
            check_logprobs(await api.turn(ignore_eos=True), {served.label: served.model}, 1.0)
        await self.test_weights_arrive_over_a_process_group(api)

    async def test_failed_update_keeps_the_old_weights(self, api, tmp_path):
        for path in (tmp_path / "nowhere", tmp_path):
            with pytest.raises(RequestRefused):
                await api.client.update_weights(str(path), str(WeightVersion(0, api.served.step + 1)))
        turn = await api.turn(ignore_eos=True)
        assert turn.versions[0][0] == api.served.label
        check_logprobs(turn, {api.served.label: api.served.model}, 1.0)

    async def test_older_label_is_refused(self, api):
        if api.served.step == 0:
            await api.update()
        with pytest.raises(RequestRefused, match="older"):
            await api.client.update_weights(str(api.served.model), "0.0")

    async def test_missed_update_is_loaded_by_itself(self, api):
        served = api.served
        served.step += 1
        served.model = served.models[served.step % 2]
        served.point(served.model)
        deadline = time.monotonic() + extend(20)
        while (await api.client.health())["weight_version"] != served.label:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        check_logprobs(await api.turn(ignore_eos=True), {served.label: served.model}, 1.0)

    async def test_min_version_is_refused_until_it_is_there(self, api):
        with pytest.raises(ServerStale):
            await api.turn(min_version=str(WeightVersion(0, api.served.step + 1)))
        with pytest.raises(ServerStale):
            await api.turn(min_version=str(WeightVersion(1, 0)))
        assert (await api.turn(min_version=api.served.label)).output_ids

    async def test_abort_by_rid_spares_the_others(self, api):
        rids = [uuid.uuid4().hex for _ in range(2)]
        bodies = [{"input_ids": PROMPT, "sampling_params": self.long, "rid": rid} for rid in rids]
        calls = [asyncio.create_task(api.post("/generate", body)) for body in bodies]
        await self.abort_until_it_ends(api, {"rid": rids[0]}, calls[0])
        _, first = await calls[0]
        assert first["meta_info"]["finish_reason"]["type"] == "abort" and not calls[1].done()
        await self.abort_until_it_ends(api, {"abort_all": True}, calls[1])
        _, second = await calls[1]
        assert second["meta_info"]["finish_reason"]["type"] == "abort"

    async def abort_until_it_ends(self, api, body, call):
        """Abort a request again and again: it may not have arrived yet."""
        while not call.done():
            await api.control("/abort_request", body)
            await asyncio.wait({call}, timeout=0.2)

    async def test_flush_cache(self, api):
        deadline = time.monotonic() + extend(20)
        # SGLang refuses for as long as a request that was aborted is not gone
        while (await api.post("/flush_cache", {}, "control"))[0] != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)

    async def test_tokens_of_both_kinds(self, api):
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert (await api.post("/generate", body, None))[0] == 401
        assert (await api.post("/generate", body, "wrong"))[0] == 401
        assert (await api.post("/generate", body, "control"))[0] == 200
        for path in ("/pause_generation", "/update_weights_from_disk", "/shutdown"):
            assert (await api.post(path, {}, "data"))[0] == 401
        data, control = (api.served.tokens[name] for name in ("data", "control"))
        assert (await api.post(f"/t/{data}/generate", body, None))[0] == 200
        assert (await api.post("/t/wrong/generate", body, None))[0] == 401
        assert (await api.post(f"/t/{control}/pause_generation", {"mode": "retract"}, None))[0] == 401
        assert (await api.post(f"/t/{data}/pause_generation", {"mode": "retract"}, None))[0] == 404
        async with api.session.get(f"{api.url}/t/{data}/health") as response:
            assert response.status == 200
        async with api.session.get(f"{api.url}/health") as response:
            assert response.status == 401

    async def test_chat_completions(self, api):
        body = {
            "model": "any",
            "messages": [{"role": "user", "content": "1+2"}],
            "max_tokens": 6,
            "temperature": 1.0,
            "n": 2,
        }
        status, answer = await api.post("/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["object"] == "chat.completion" and len(answer["choices"]) == 2
        assert all(set(choice["message"]["content"]) <= set("0123456789+=;") for choice in answer["choices"])
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["metadata"]["weight_version"] == api.served.label

    async def test_a_pool_asks_it_by_router_or_as_an_endpoint_elsewhere(self, api):
        served, messages = api.served, [{"role": "user", "content": "1+2"}]
        tokenizer = Tokenizer(served.model)
        sampling = GenerationHyperparameters(max_new_tokens=6, temperature=0.0)
        elsewhere = PoolConfig(url=f"{api.url}/v1/", model="any", max_new_tokens=6, temperature=0.0)
        async with (
            Router(open_names(served.trial), served.tokens["data"]) as router,
            Endpoint("student", elsewhere, served.tokens["data"]) as endpoint,
        ):
            servers = ServerPool("rollout", router, tokenizer, sampling, context=4096, max_requests=1)
            greedy = await servers.ask(messages, [1, 2], min_version=served.label)
            assert await endpoint.ask(messages, [1]) == greedy[:1] == greedy[1:]
            assert len(await servers.ask(messages, [1], max_new_tokens=1, temperature=1.0)) == 1
            longer = [{"role": "user", "content": "1+2+3"}]
            joined = await servers.ask_many([messages, longer], [[1, 2], [3]], min_version=served.label)
            assert joined == [greedy, await servers.ask(longer, [3], min_version=served.label)]
            several = await endpoint.ask(messages, [5, 6, 7], 3, temperature=1.0)
            assert len(several) == 3 and max(len(one.text) for one in several) <= 3
            answers = await TextSource(endpoint, tokenizer, sampling).sample({"prompt": "1+2"}, 3, [5], "0.7")
            assert [tokenizer.decode(one.output_ids) for one in answers] == [greedy[0].text]
            assert answers[0].versions == [("0.7", 0, len(answers[0].output_ids))]
            with pytest.raises(ConfigError, match=r"/v1/completions returns no log-probabilities"):
                await endpoint.check_scoring()  # our servers score by their own path
            with pytest.raises(InputRefused, match=r"pool student: .*/v1/chat/completions answered 400"):
                await endpoint.ask([{"role": "user", "content": "1" * 5000}], [1])
            unlimited = ServerPool("rollout", router, tokenizer, sampling)
            chats = [messages, [{"role": "user", "content": "1" * 5000}]]
            answered, refused = await unlimited.ask_many(chats, [[1], [2]])
            assert answered == greedy[:1] and isinstance(refused, InputRefused)
            with pytest.raises(Rejection, match="5001 tokens, the model's context is 4096"):
                await servers.ask([{"role": "user", "content": "1" * 5000}], [1])
        with pytest.raises(ConfigError, match=r"pool student: .*/v1/models answered 401"):
            async with Endpoint("student", elsewhere, "wrong"):
                pass


async def check_drain(served: ServedReplica, sampling: dict[str, Any]) -> None:
    """A server that is asked to stop returns the tokens of its running requests."""
    requests = [GenerateRequest(PROMPT, sampling, uuid.uuid4().hex) for _ in range(3)]
    partials = [PartialTurn(request) for request in requests]
    async with open_session() as session:
        finishing = asyncio.create_task(Api(served, session).client.finish(partials))
        async with asyncio.timeout(extend(60)):
            while not all(partial.turn.output_ids for partial in partials):
                await asyncio.sleep(0.01)
        before = [len(partial.turn.output_ids) for partial in partials]
        await asyncio.to_thread(served.stop)
        with pytest.raises(ServerUnavailable):  # the rest is for another server
            await finishing
    for partial, num_before in zip(partials, before, strict=True):
        assert num_before < len(partial.turn.output_ids) < sampling["max_new_tokens"]
        assert partial.is_unfinished and partial.turn.num_regenerated == 0
        check_logprobs(partial.turn, {served.label: served.model}, 1.0)
