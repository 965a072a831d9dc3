"""An endpoint elsewhere: what it is asked, what is tried again, and what its errors show."""

import asyncio
import io
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import pytest
from aiohttp import web

from hpc_rl.config.options.inference import InferenceEngineConfig
from hpc_rl.config.options.pools import PoolConfig
from hpc_rl.core.errors import ConfigError, EndpointUnavailable, InputRefused, ServerUnavailable
from hpc_rl.core.types import Reply, decode, encode
from hpc_rl.roles import rollout_worker
from hpc_rl.rollout import pipes
from hpc_rl.servers import external
from hpc_rl.servers.external import Endpoint

pytestmark = pytest.mark.waits

CHAT = [{"role": "user", "content": "1+2"}]
KEY = "sk-very-secret"


class Elsewhere:
    """An endpoint that answers with what it is given first: (status, body, headers); else with its choices."""

    def __init__(self, models=("m",), choices_at_most=9):
        self.models, self.choices_at_most = models, choices_at_most
        self.failures, self.asked, self.keys = [], [], []
        self.hangs_s, self.flagged_seed = 0.0, None

    async def list(self, request):
        if self.models is None:
            raise web.HTTPNotFound(text="nothing here")
        return self._failure() or web.json_response({"data": [{"id": name} for name in self.models]})

    async def chat(self, request):
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        await asyncio.sleep(self.hangs_s)
        if body["seed"] == self.flagged_seed:
            return web.Response(status=403, text="flagged")
        if failure := self._failure():
            return failure
        num = min(body["n"], self.choices_at_most)
        choices = [
            {"message": {"content": f"{body['seed']}.{i}"}, "finish_reason": "length"} for i in range(num)
        ]
        return web.json_response({"choices": choices, "usage": {"completion_tokens": 7 * num}})

    def _failure(self):
        if not self.failures:
            return None
        status, body, *headers = self.failures.pop(0)
        return web.Response(status=status, text=body, headers=headers[0] if headers else None)

    @asynccontextmanager
    async def opened(self, key=KEY, patience_s=5.0, request_timeout_s=5.0, **options):
        app = web.Application()
        app.add_routes([web.get("/v1/models", self.list), web.post("/v1/chat/completions", self.chat)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        pool = PoolConfig(url=f"http://127.0.0.1:{port}/v1", **options)
        try:
            async with Endpoint("judge", pool, key, request_timeout_s, patience_s) as endpoint:
                yield endpoint
        finally:
            await runner.cleanup()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(external, "FIRST_PAUSE_S", 0.01)


async def test_a_chat_is_asked_in_openais_words():
    elsewhere = Elsewhere()
    options = {"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9}
    async with elsewhere.opened(**options) as endpoint:
        assert endpoint.model == "m"
        replies = await endpoint.ask(CHAT, [5, 6])
        await endpoint.ask(CHAT, [1 << 62], max_new_tokens=2, temperature=0.0)
    assert replies == [Reply("5.0", 7, "length"), Reply("5.1", 7, "length")]
    first, second = elsewhere.asked
    sampling = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
    assert first == {"model": "m", "messages": CHAT, "n": 2, "seed": 5, **sampling}
    assert (second["max_tokens"], second["temperature"]) == (2, 0.0) and second["seed"] < 1 << 31
    assert elsewhere.keys == [f"Bearer {KEY}"] * 2


async def test_tracing_logs_each_chat_and_its_answer(caplog):
    with caplog.at_level("INFO"):
        async with Elsewhere().opened() as endpoint:
            await endpoint.ask(CHAT, [5])
            assert "pool judge" not in caplog.text
            endpoint.trace = True
            await endpoint.ask(CHAT, [5, 6], max_new_tokens=3)
    asked = "chat 5 asks pool judge for 2 answers to 1 messages, at most 3 tokens each, temperature 1"
    assert asked in caplog.text
    assert "chat 5 has answers from pool judge: 7 tokens (length), 7 tokens (length)" in caplog.text


def test_an_executor_worker_passes_the_options_on():
    config = SimpleNamespace(
        rollout=InferenceEngineConfig(enable_rollout_tracing=True, request_timeout=9.0, setup_timeout=7.0)
    )
    sent = io.BytesIO()
    made = rollout_worker.make_endpoint(config, "judge", PoolConfig(url="http://h/v1"), "", sent.write)
    assert made.trace and (made.request_timeout_s, made.patience_s) == (9.0, 7.0)
    made.on_change("answered 503")
    told = pipes.receive_frame_blocking(io.BytesIO(sent.getvalue()))
    assert told == {"op": "endpoint", "pool": "judge", "problem": "answered 503"}


async def test_an_endpoint_that_makes_one_answer_is_asked_for_the_others():
    elsewhere = Elsewhere(choices_at_most=1)
    async with elsewhere.opened(key="") as endpoint:
        assert [one.text for one in await endpoint.ask(CHAT, [5, 6, 7])] == ["5.0", "6.0", "7.0"]
    assert [body["n"] for body in elsewhere.asked] == [3, 2, 1] and elsewhere.keys == [None] * 3


async def test_what_may_pass_is_tried_again(caplog):
    async with (elsewhere := Elsewhere()).opened() as endpoint:
        elsewhere.failures = [(429, "slow down"), (503, "busy"), (408, ""), (200, "no JSON")]
        with caplog.at_level("INFO"):
            assert len(await endpoint.ask(CHAT, [5])) == 1
    assert len(elsewhere.asked) == 5
    assert caplog.text.count("answered 429: slow down; trying again") == 1 and "answers again" in caplog.text


@pytest.mark.parametrize("kind", ["seconds", "date"])
async def test_an_endpoint_may_say_when(kind):
    async with (elsewhere := Elsewhere()).opened() as endpoint:
        later = format_datetime(datetime.now(UTC) + timedelta(seconds=2.5), usegmt=True)
        elsewhere.failures = [(429, "", {"Retry-After": "1" if kind == "seconds" else later})]
        start = time.monotonic()
        await endpoint.ask(CHAT, [5])
    assert time.monotonic() - start >= 0.9


async def test_what_does_not_pass_is_given_up():
    async with (elsewhere := Elsewhere()).opened(patience_s=0.3) as endpoint:
        elsewhere.failures = [(500, "broken")] * 100
        words = r"pool judge: http://.*/chat/completions answered 500: broken"
        with pytest.raises(ServerUnavailable, match=words):
            await endpoint.ask(CHAT, [5])
        assert 2 < len(elsewhere.asked) < 60


async def test_a_pause_longer_than_the_patience_ends_with_it():
    async with (elsewhere := Elsewhere()).opened(patience_s=0.3) as endpoint:
        elsewhere.failures = [(503, "", {"Retry-After": "3600"})]
        assert len(await endpoint.ask(CHAT, [5])) == 1
        elsewhere.failures = [(503, "", {"Retry-After": "3600"})] * 9
        with pytest.raises(ServerUnavailable, match=r"given up after [23] tries"):
            await endpoint.ask(CHAT, [5])


async def test_without_chance_one_answer_stands_for_all():
    async with (elsewhere := Elsewhere()).opened(temperature=0.0) as endpoint:
        replies = await endpoint.ask(CHAT, [5, 6, 7])
        assert [one.text for one in replies] == ["5.0"] * 3 and [one["n"] for one in elsewhere.asked] == [1]
        assert len(await endpoint.ask(CHAT, [5, 6], temperature=0.5)) == 2 and elsewhere.asked[-1]["n"] == 2
        assert await endpoint.ask(CHAT, []) == []


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, InputRefused), (422, InputRefused), (403, EndpointUnavailable), (302, EndpointUnavailable)],
)
async def test_a_refusal_shows_no_key_and_one_of_the_input_is_not_tried_again(
    status, error, caplog, monkeypatch
):
    monkeypatch.setattr(external, "FIRST_PATIENCE_S", 0.0)  # of what never worked
    async with (elsewhere := Elsewhere()).opened() as endpoint:
        elsewhere.failures = [(status, f"your key {KEY} " + "x" * 5000, {"Location": "http://127.0.0.1:1/"})]
        with pytest.raises(error, match=rf"pool judge: .* answered {status}: your key \*\*\*") as raised:
            await endpoint.ask(CHAT, [5])
    assert len(elsewhere.asked) == 1 and len(str(raised.value)) < 600
    assert KEY not in str(raised.value) + caplog.text


async def test_an_answer_without_choices_is_given_up_soon_where_there_never_was_one(monkeypatch):
    monkeypatch.setattr(external, "FIRST_PATIENCE_S", 0.1)
    elsewhere = Elsewhere(choices_at_most=0)
    async with elsewhere.opened() as endpoint:
        with pytest.raises(EndpointUnavailable, match="without choices"):
            await endpoint.ask(CHAT, [5])


ERROR = '{"error": {"message": "no credit"}}'


@pytest.mark.parametrize("status", [200, 302, 401, 403, 404])
async def test_what_worked_before_is_tried_again_whatever_it_says(status, caplog, monkeypatch):
    monkeypatch.setattr(external, "FIRST_PATIENCE_S", 0.0)
    async with (elsewhere := Elsewhere()).opened(patience_s=0.5) as endpoint:
        await endpoint.ask(CHAT, [5])
        elsewhere.failures = [(status, ERROR)] * 4
        await endpoint.ask(CHAT, [5])
        assert not elsewhere.failures and caplog.text.count("no credit") == 1
        elsewhere.failures = [(status, ERROR)] * 999
        with pytest.raises(EndpointUnavailable, match=r"no credit.*given up after"):
            await endpoint.ask(CHAT, [5])


async def test_one_request_that_fails_while_others_are_answered_may_be_to_blame():
    async with (elsewhere := Elsewhere()).opened(patience_s=2.0) as endpoint:
        await endpoint.ask(CHAT, [5])
        elsewhere.flagged_seed = 6
        asked = asyncio.create_task(endpoint.ask(CHAT, [6]))
        while len(elsewhere.asked) < 2:
            await asyncio.sleep(0.01)
        await endpoint.ask(CHAT, [7])
        with pytest.raises(ServerUnavailable) as raised:
            await asked
    assert not isinstance(raised.value, EndpointUnavailable)


async def test_an_error_with_status_200_may_have_the_true_one_inside():
    async with (elsewhere := Elsewhere()).opened() as endpoint:
        elsewhere.failures = [(200, '{"error": {"code": 400, "message": "too long"}}')]
        with pytest.raises(InputRefused, match="too long"):
            await endpoint.ask(CHAT, [5])
    assert len(elsewhere.asked) == 1


async def test_a_page_instead_of_json_is_shown(caplog):
    async with (elsewhere := Elsewhere()).opened() as endpoint:
        elsewhere.failures = [(200, "<html>log in")]
        await endpoint.ask(CHAT, [5])
    assert "answered 200 without JSON: <html>log in; trying again" in caplog.text
    assert "reached" not in caplog.text


async def test_half_of_a_surrogate_pair_is_replaced():
    async with (elsewhere := Elsewhere()).opened() as endpoint:
        said = r'{"choices": [{"message": {"content": "a\ud83d b \ud83d\ude00"}}]}'
        elsewhere.failures = [(200, said)]
        (reply,) = await endpoint.ask(CHAT, [5])
    assert reply.text == "a\ufffd b \U0001f600" and decode(encode(reply)) == reply


async def test_an_endpoint_that_hangs_is_told_of_again_and_again(caplog, monkeypatch):
    monkeypatch.setattr(external, "HANGS_S", 0.1)
    monkeypatch.setattr(external, "REPEAT_S", 0.25)
    async with (elsewhere := Elsewhere()).opened() as endpoint:
        elsewhere.hangs_s = 1.5
        with caplog.at_level("INFO"):
            await asyncio.gather(*(endpoint.ask(CHAT, [seed]) for seed in range(5)))
    assert 2 <= caplog.text.count("has answered nothing for") <= 8 and "answers again" in caplog.text


async def test_what_lasts_is_told_again(caplog, monkeypatch):
    monkeypatch.setattr(external, "REPEAT_S", 0.1)
    monkeypatch.setattr(external, "MAX_PAUSE_S", 0.05)
    async with (elsewhere := Elsewhere()).opened(patience_s=1.0) as endpoint:
        elsewhere.failures = [(503, "busy")] * 999
        with pytest.raises(EndpointUnavailable):
            await endpoint.ask(CHAT, [5])
    assert 2 <= caplog.text.count("busy; trying again") <= 11


async def test_the_model_is_the_configured_one_or_the_only_one(caplog):
    chosen = [(("a", "b"), "b", "b"), (None, "c", "c"), (("a",), "", "a"), (("a",), "d", "d")]
    for models, model, found in chosen:
        async with Elsewhere(models).opened(model=model) as endpoint:
            assert endpoint.model == found
    assert "does not list the model 'd' of pools.judge.model" in caplog.text
    refused = [
        (("a", "b"), "pools.judge.model: .* lists a, b; set this option"),
        ((), "lists no model"),
        (None, "set this option"),
    ]
    for models, words in refused:
        with pytest.raises(ConfigError, match=words):
            async with Elsewhere(models).opened():
                pass


async def test_a_wrong_key_ends_the_start():
    elsewhere = Elsewhere()
    elsewhere.failures = [(401, "who are you?")]
    with pytest.raises(ConfigError, match=r"answered 401: who are you\?. Is the key in JUDGE_KEY right\?"):
        async with elsewhere.opened(api_key_env="JUDGE_KEY"):
            pass


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:9", "can't be reached: Connection refused;"),
        ("https://{plain}", r"can't be reached: ClientConnector\w*Error: .*\[SSL"),
    ],
)
async def test_the_reason_of_a_connection_that_fails_is_told(url, reason):
    async with Elsewhere().opened() as judge:
        plain = judge.pool.url.removeprefix("http://")
        endpoint = Endpoint("judge", PoolConfig(url=url.format(plain=plain), model="m"), patience_s=0.2)
        with pytest.raises(ServerUnavailable, match=reason):
            async with endpoint:
                pass


async def test_an_endpoint_out_of_reach_is_awaited_then_given_up():
    endpoint = Endpoint("judge", PoolConfig(url="http://127.0.0.1:9"), patience_s=0.2)
    with pytest.raises(ServerUnavailable, match=r"pool judge: http://127.0.0.1:9/models can't be reached"):
        async with endpoint:
            pass
