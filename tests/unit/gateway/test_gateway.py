"""The gateway over small servers that are slow, wrong or away: what a client sees of that."""

import asyncio
import contextlib
import json

import aiohttp
import pytest
from gateways import FakeServer, answer, open_gateway
from patience import until

from hpc_rl.core.gate import Gate
from hpc_rl.gateway.gateway import GatewaySettings
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve

pytestmark = pytest.mark.waits

PROMPT = [4, 13, 5]
CHAT = {"model": "any", "messages": [{"role": "user", "content": "1+2"}], "max_tokens": 8}
NATIVE = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}


@contextlib.asynccontextmanager
async def gateway_of(tokenizer, folder, count=1, settings=None, announced=True):
    names = NameResolve(folder / "names")
    fakes = [FakeServer() for _ in range(count)]
    for index, fake in enumerate(fakes):
        await fake.start()
        if announced:
            fake.announce(names, index)
    try:
        async with open_gateway(names, tokenizer, folder, settings) as caller:
            yield caller, fakes, names
    finally:
        for fake in fakes:
            await fake.stop()


async def test_chat_in_openais_format(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path) as (caller, (fake,), _names):
        fake.reply = lambda _body: answer([6, 7, 1], "0.4")
        status, got = await caller.post("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True})
        assert status == 200 and got["object"] == "chat.completion" and got["model"] == "any"
        assert [choice["message"]["content"] for choice in got["choices"]] == [tokenizer.decode([6, 7])] * 2
        entries = got["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == [-56 / 64, -57 / 64, -51 / 64]
        assert got["choices"][1]["finish_reason"] == "stop" and got["choices"][1]["index"] == 1
        assert got["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
        assert got["metadata"]["weight_version"] == "0.4"


async def test_completions_in_openais_format(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path) as (caller, (fake,), _names):
        fake.reply = lambda body: answer([6, 7][: len(body["input_ids"])], "0.4", "length")
        body = {"prompt": ["1+2=", "3"], "max_tokens": 2, "logprobs": 1, "return_token_ids": True}
        status, got = await caller.post("/v1/completions", body)
        first, second = got["choices"]
        assert status == 200 and got["object"] == "text_completion"
        assert first["logprobs"]["token_logprobs"] == [-56 / 64, -57 / 64]
        assert first["logprobs"]["text_offset"] == [0, 1]
        assert first["finish_reason"] == "length" and first["token_ids"] == [6, 7]
        assert second["index"] == 1 and second["prompt_token_ids"] == tokenizer.encode("3")


async def test_generate_in_sglangs_and_in_vllms_format(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path) as (caller, (fake,), _names):
        fake.reply = lambda _body: answer([6, 1], "0.4")
        status, got = await caller.post("/generate", {**NATIVE, "rid": "mine"})
        assert status == 200 and got["output_ids"] == [6, 1] and got["text"] == tokenizer.decode([6])
        meta = got["meta_info"]
        assert (
            meta["output_token_logprobs"] == [[-56 / 64, 6, None], [-51 / 64, 1, None]]
            and meta["id"] == "mine"
        )
        assert meta["finish_reason"] == {"type": "stop", "matched": 1} and meta["completion_tokens"] == 2
        assert meta["weight_versions"] == [{"version": "0.4", "start": 0, "end": 2}]
        several = {
            **NATIVE,
            "sampling_params": {"max_new_tokens": 8, "n": 3},
            "return_text_in_logprobs": True,
        }
        status, got = await caller.post("/generate", several)
        assert len(got) == 3 and got[2]["meta_info"]["output_token_logprobs"][0][2] == tokenizer.decode([6])
        body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 2, "max_tokens": 4}
        status, got = await caller.post("/generate", body)
        assert got["logprobs"] == [[[{"6": -56 / 64}], [{"1": -51 / 64}]]] * 2
        assert got["finish_reasons"] == ["stop"] * 2


async def test_all_completions_come_split_into_calls_and_spread_over_servers(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path, 2) as (caller, fakes, _names):
        for fake in fakes:
            fake.gate.clear()
        call = asyncio.create_task(caller.post("/v1/chat/completions", {**CHAT, "n": 20, "seed": 100}))
        await until(lambda: sum(len(body["rid"]) for fake in fakes for body in fake.bodies) == 20)
        sizes = sorted(len(body["rid"]) for fake in fakes for body in fake.bodies)
        assert sizes == [4, 8, 8] and min(len(fake.bodies) for fake in fakes) == 1
        for fake in fakes:
            fake.gate.set()
        _, got = await call
    assert [choice["index"] for choice in got["choices"]] == list(range(20))
    parts = [part for fake in fakes for body in fake.bodies for part in body["sampling_params"]]
    assert sorted(part["sampling_seed"] for part in parts) == list(range(100, 120))


async def test_an_interrupted_completion_is_one_answer(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path) as (caller, (fake,), _names):
        replies = [answer([6, 7], "0.4", "abort"), answer([], "0.5", "abort"), answer([8, 1], "0.5")]
        fake.reply = lambda _body: replies.pop(0)
        status, got = await caller.post("/generate", NATIVE)
        assert status == 200 and got["output_ids"] == [6, 7, 8, 1]
        assert got["meta_info"]["finish_reason"]["type"] == "stop"
        assert [span["version"] for span in got["meta_info"]["weight_versions"]] == ["0.4", "0.5"]
        assert fake.bodies[-1]["input_ids"] == [*PROMPT, 6, 7]
        found = caller.gateway.log.match([*PROMPT, 6, 7, 8, 1], [False] * 3 + [True] * 4)
        assert found.steps.tolist() == [-1] * 3 + [4, 4, 5, 5]
        assert found.logprobs[3:].tolist() == pytest.approx([-56 / 64, -57 / 64, -58 / 64, -51 / 64])


async def test_requests_wait_while_servers_are_away(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path, announced=False) as (caller, (fake,), names):
        calls = [asyncio.create_task(caller.post("/v1/chat/completions", CHAT)) for _ in range(3)]
        await asyncio.sleep(1.0)
        assert not any(call.done() for call in calls)
        assert (await caller.get("/health"))[0] == 200
        failures = [503, 500, 503]
        fake.reply = lambda _body: failures.pop() if failures else answer([6, 1], "0.4")
        fake.announce(names)
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3
        assert caller.gateway.get_status()["held_s"] > 0 and caller.gateway.counters.held == 0


async def test_requests_wait_for_a_server_that_restarts(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path, announced=False) as (caller, (fake,), names):
        lease = fake.announce(names)
        assert (await caller.post("/generate", NATIVE))[0] == 200
        fake.gate.clear()
        call = asyncio.create_task(caller.post("/generate", NATIVE))
        await asyncio.sleep(0.1)
        await fake.stop()
        lease.renew(
            {
                **names.list_leases(keys.servers("rollout"))[keys.server("rollout", 0)].value,
                "state": "loading",
            }
        )
        await asyncio.sleep(0.5)
        assert not call.done()
        again = FakeServer("0.9")
        await again.start()
        again.announce(names)
        status, got = await call
        assert status == 200 and got["meta_info"]["weight_version"] == "0.9"
        await again.stop()


async def test_what_no_server_answers_in_time_is_503_and_says_when(tokenizer, tmp_path):
    settings = GatewaySettings(hold_s=0.0)
    async with gateway_of(tokenizer, tmp_path, settings=settings, announced=False) as (caller, _, _names):
        headers = {"Authorization": f"Bearer {caller.token}"}
        async with caller.session.post(caller.url + "/generate", json=NATIVE, headers=headers) as response:
            assert response.status == 503 and response.headers["Retry-After"]
            assert (await response.json())["error"]["type"] == "server_error"


async def test_a_stop_string_ends_at_its_token_with_any_server(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path) as (caller, (fake,), _names):
        made = tokenizer.encode("12+34+5") * 20
        fake.reply = lambda body: _next_of(made, body)
        body = {**NATIVE, "sampling_params": {"max_new_tokens": 30, "stop": ["+5", "99"]}}
        _, got = await caller.post("/generate", body)
        assert got["text"] == "12+34" and got["output_ids"] == tokenizer.encode("12+34+5")
        assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": "+5"}
        assert len(got["meta_info"]["output_token_logprobs"]) == 7
        found = caller.gateway.log.match(PROMPT + got["output_ids"], [False] * 3 + [True] * 7)
        assert found.has_logprob[3:].all()
        body["sampling_params"] = {"max_new_tokens": 20, "stop": "99", "no_stop_trim": True}
        _, got = await caller.post("/generate", body)
        assert got["output_ids"] == made[:20] and got["meta_info"]["finish_reason"]["type"] == "length"
        assert [body["sampling_params"]["max_new_tokens"] for body in fake.bodies[-2:]] == [16, 4]


def _next_of(made, body):
    done = len(body["input_ids"]) - len(PROMPT)
    part = made[done : done + body["sampling_params"]["max_new_tokens"]]
    return answer(part, "0.4", "length")


async def test_streams_in_each_format(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path) as (caller, (fake,), _names):
        made = tokenizer.encode("12+34+5") * 20
        fake.reply = lambda body: _next_of(made, body)
        native = {**NATIVE, "sampling_params": {"max_new_tokens": 40}}
        *events, end = await caller.stream("/generate", native)
        answers = [json.loads(one) for one in events]
        assert end == "[DONE]" and [len(one["output_ids"]) for one in answers] == [16, 40]
        assert answers[0]["meta_info"]["finish_reason"] is None
        assert answers[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
        assert answers[1]["text"] == tokenizer.decode(made[:40])

        body = {"prompt": PROMPT, "max_tokens": 40, "logprobs": 0, "stop": ["+5"], "n": 2}
        *events, end = await caller.stream("/v1/completions", body)
        choices = [json.loads(one)["choices"][0] for one in events]
        for index in range(2):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == "12+34" and own[-1]["finish_reason"] == "stop"

        usage = {"stream_options": {"include_usage": True}}
        body = {"messages": [{"role": "user", "content": ""}, *CHAT["messages"]], "max_tokens": 40, **usage}
        fake.reply = lambda body: _next_of([0, *made], body)
        *events, last, end = await caller.stream("/v1/chat/completions", body)
        chunks = [json.loads(one)["choices"][0] for one in events]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        assert text == tokenizer.decode(made[:40]) and chunks[-1]["finish_reason"] == "length"
        assert json.loads(last)["usage"]["completion_tokens"] == 40 and json.loads(last)["choices"] == []


async def test_limits_of_training_and_of_evaluation_are_separate(tokenizer, tmp_path):
    settings = GatewaySettings(max_requests=3, max_eval_requests=1)
    async with gateway_of(tokenizer, tmp_path, settings=settings) as (caller, (fake,), _names):
        await asyncio.sleep(0.1)
        fake.gate.clear()
        train = [asyncio.create_task(caller.post("/generate", NATIVE)) for _ in range(5)]
        evals = [asyncio.create_task(caller.post("/eval/generate", NATIVE)) for _ in range(2)]
        header = {"X-Hpc-Rl-Split": "eval"}
        evals.append(asyncio.create_task(caller.post("/v1/chat/completions", CHAT, **header)))
        wanted = {"train": {"running": 3, "waiting": 2}, "eval": {"running": 1, "waiting": 2}}
        await until(lambda: wanted.items() <= caller.gateway.get_status().items() and len(fake.bodies) >= 4)
        assert len(fake.bodies) == 4
        fake.gate.set()
        assert {status for status, _ in await asyncio.gather(*train, *evals)} == {200}


async def test_a_gate_survives_callers_that_give_up():
    gate = Gate(lambda: 1)
    first, second, third = (asyncio.create_task(_hold(gate)) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()
    await asyncio.sleep(0.01)
    assert gate.running == 1 and gate.waiting == 0
    third.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert gate.running == 0


async def _hold(gate):
    async with gate:
        await asyncio.sleep(10)


async def test_health_is_answered_without_a_generation(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path, announced=False) as (caller, (fake,), _names):
        hi = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        status, got = await caller.post("/v1/chat/completions", hi)
        assert status == 200 and got["choices"][0]["finish_reason"] == "length"
        status, got = await caller.post("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 1})
        assert status == 200 and got["choices"][0]["text"] == ""
        status, got = await caller.get("/v1/models")
        assert got["data"][0]["id"] == "toy" and got["data"][0]["max_model_len"] == 4096
        for path in ("/health", "/health_generate", "/eval/health", "/model_info", "/gateway"):
            assert (await caller.get(path))[0] == 200
        assert not fake.bodies and caller.gateway.counters.probes == 2


async def test_malformed_requests_are_400_and_name_the_field(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path) as (caller, (fake,), _names):
        status, got = await caller.post("/v1/chat/completions", {**CHAT, "temperature": []})
        assert status == 400
        assert got["error"]["type"] == "invalid_request_error" and got["error"]["param"] == "temperature"
        for raw in (b"", b"[1]", b"{" * 500, b'{"prompt": "\\ud800"}'):
            headers = {"Authorization": f"Bearer {caller.token}"}
            async with caller.session.post(caller.url + "/generate", data=raw, headers=headers) as response:
                assert response.status == 400 and (await response.json())["error"]["param"] == "body"
        fake.reply = lambda _body: 400
        status, got = await caller.post("/generate", NATIVE)
        assert status == 400 and got["error"]["message"]
        assert caller.gateway.counters.refused == 6


async def test_bodies_are_bounded(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_rl.gateway.routes.MAX_BODY_BYTES", 1000)
    async with gateway_of(tokenizer, tmp_path) as (caller, _fakes, _names):
        status, got = await caller.post("/generate", {"input_ids": [4] * 1000})
        assert status == 400 and got["error"]["param"] == "body"


async def test_only_the_trials_tokens_are_served(tokenizer, tmp_path):
    async with gateway_of(tokenizer, tmp_path) as (caller, _fakes, _names):
        token, caller.token = caller.token, "wrong"
        assert (await caller.post("/generate", NATIVE))[0] == 401
        assert (await caller.post("/t/wrong/generate", NATIVE))[0] == 401
        assert (await caller.post(f"/t/{token}/generate", NATIVE))[0] == 200
        assert (await caller.post(f"/t/{token}/eval/v1/chat/completions", CHAT))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_generation(tokenizer, tmp_path, monkeypatch, stream):
    monkeypatch.setattr("hpc_rl.gateway.routes.CONNECTION_POLL_S", 0.05)
    async with gateway_of(tokenizer, tmp_path) as (caller, (fake,), _names):
        fake.gate.clear()
        async with aiohttp.ClientSession() as session:
            url = f"{caller.url}/t/{caller.token}/generate"
            call = asyncio.create_task(session.post(url, json={**NATIVE, "stream": stream}))
            await until(lambda: fake.bodies)
            assert not call.done()
            call.cancel()
            await asyncio.wait({call})
        await until(lambda: fake.cancelled and not caller.gateway.train.running)
        assert fake.cancelled == 1 and caller.gateway.counters.abandoned == 1


async def test_tool_calls_in_openais_format(tokenizer, tmp_path, monkeypatch):
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    monkeypatch.setattr(tokenizer, "decode", lambda ids, skip_special_tokens=True: text if ids else "")
    tools = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    async with gateway_of(tokenizer, tmp_path) as (caller, (fake,), _names):
        fake.reply = lambda _body: answer([6, 7, 1], "0.4")
        _, got = await caller.post("/v1/chat/completions", {**CHAT, **tools})
        (choice,) = got["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "so"
        function = choice["message"]["tool_calls"][0]["function"]
        assert function == {"name": "add", "arguments": '{"a": 1}'}
        *events, _end = await caller.stream("/v1/chat/completions", {**CHAT, **tools})
        (choice,) = json.loads(events[-1])["choices"]
        assert choice["delta"]["tool_calls"][0]["function"] == function
        assert choice["finish_reason"] == "tool_calls"
        _, got = await caller.post("/v1/chat/completions", CHAT)
        assert got["choices"][0]["message"]["content"] == text
