"""Answers in parts, through HTTP: what a lost server has sent survives it, and another one continues."""

import contextlib

import pytest
from conformance import check_logprobs, make_model

from hpc_rl.config.options.inference import EmbeddedConfig, GenerationHyperparameters
from hpc_rl.core.net import bind
from hpc_rl.core.types import REGENERATED, Turn
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.rollout.server_pool import ServerPool
from hpc_rl.rollout.workflow import trajectory
from hpc_rl.servers import client as client_module
from hpc_rl.servers.client import GenerateRequest, PartialTurn, open_session
from hpc_rl.servers.embedded import backend as backend_module
from hpc_rl.servers.embedded.backend import EmbeddedBackend
from hpc_rl.servers.embedded.decode_batch import Sequence
from hpc_rl.servers.proxy import Proxy
from hpc_rl.servers.router import Router
from hpc_rl.servers.wire import Part, SamplingParams, cut_spans, split_lines

TOKENS = {"control": "c" * 8, "data": "d" * 8}
PROMPT = [4, 13, 5, 13, 6, 14]
SHORT, LONG = 20, 240


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = {f"0.{step}": folder / str(step) for step in (1, 2)}
    for seed, path in enumerate(paths.values()):
        make_model(path, seed)
    return paths


class Served(EmbeddedBackend):
    """An embedded engine behind a proxy. `on_parts` is called after parts are sent, and may raise."""

    on_parts = None

    async def generate(self, body, send):
        self.bodies.append(body)

        async def send_and_call(parts):
            await send(parts)
            if self.on_parts:
                await self.on_parts(parts)

        return await super().generate(body, send_and_call)


@contextlib.asynccontextmanager
async def served(model, names=None, index=0):
    backend = Served(EmbeddedConfig(batch_invariant=True))
    backend.bodies = []
    await backend.start(str(model), "0.1")
    backend.proxy = proxy = Proxy(backend, TOKENS, "7.1", 0)
    proxy.version, proxy.lifecycle = "0.1", "serving"
    sock = bind("127.0.0.1")
    await proxy.serve(sock)
    backend.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    if names is not None:
        process = {"attempt": "7.1", "incarnation": 0, "pid": 1, "host": "h"}
        value = {"url": backend.url, "version": "0.1", "state": "serving", **process}
        names.lease(keys.server("rollout", index), value, 60.0)
    try:
        yield backend
    finally:
        await proxy.close()
        await backend.stop()


@pytest.fixture
async def pair(models, tmp_path):
    """Two servers, and a router that knows them."""
    names = NameResolve(tmp_path)
    async with (
        served(models["0.1"], names, 0) as one,
        served(models["0.1"], names, 1) as other,
        Router(names, TOKENS["data"], poll_s=0.02) as router,
    ):
        yield one, other, router


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(backend_module, "PART_S", 0.002)


def requests(*lengths):
    return [
        GenerateRequest(
            PROMPT,
            {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 7 + index},
            f"rid-{index}",
        )
        for index, length in enumerate(lengths)
    ]


class Meter:
    """Counts the tokens that a server has sent of each sample, and calls `act` once all of LONG have some."""

    def __init__(self, act, least=10):
        self.act, self.least, self.sent, self.ended = act, least, {}, set()

    async def __call__(self, parts):
        for part in parts:
            self.sent[part.index] = self.sent.get(part.index, 0) + len(part.ids)
            if part.finish:
                self.ended.add(part.index)
        if 0 in self.ended and min(self.sent.get(index, 0) for index in (1, 2)) >= self.least:
            await self.act()


async def test_another_server_continues_what_a_lost_one_has_sent(pair, often):
    one, other, router = pair
    whole = await router.generate_many(requests(SHORT, LONG, LONG))
    for server in pair[:2]:
        server.bodies.clear()
    lost = []

    async def cut():
        lost.append(meter.sent)
        one.on_parts = other.on_parts = None
        raise ConnectionResetError("cut by the test")

    one.on_parts = other.on_parts = meter = Meter(cut)
    turns = await router.generate_many(requests(SHORT, LONG, LONG))
    assert [turn.output_ids for turn in turns] == [turn.output_ids for turn in whole]
    for turn, uncut in zip(turns, whole, strict=True):
        assert turn.output_logprobs == pytest.approx(uncut.output_logprobs, abs=1e-4)
        assert turn.finish_reason == "length" and turn.versions == [("0.1", 0, len(turn.output_ids))]
    (first,), (second,) = sorted((one.bodies, other.bodies), key=lambda bodies: len(bodies[0]["rid"]))[::-1]
    assert first["rid"] == ["rid-0", "rid-1", "rid-2"] and second["rid"] == ["rid-1", "rid-2"]
    sent = [len(ids) - len(PROMPT) for ids in second["input_ids"]]
    assert sent == [lost[0][1], lost[0][2]] and min(sent) >= 10
    assert turns[0].num_regenerated == 0


async def test_several_chats_in_one_request_survive_a_lost_server_and_get_the_answers_of_one_each(
    pair, models, often
):
    one, other, router = pair
    sampling = GenerationHyperparameters(max_new_tokens=LONG, min_new_tokens=LONG)
    pool = ServerPool("rollout", router, Tokenizer(models["0.1"]), sampling)
    chats = [[{"role": "user", "content": text}] for text in ("1+2", "3", "4+5+6")]
    seeds = [[7, 8], [9, 10], [11, 12]]
    apart = [await pool.ask(chat, own) for chat, own in zip(chats, seeds, strict=True)]
    for server in (one, other):
        server.bodies.clear()

    async def cut(parts):
        if all(part.ids for part in parts):
            one.on_parts = other.on_parts = None
            raise ConnectionResetError("cut by the test")

    one.on_parts = other.on_parts = cut
    assert await pool.ask_many(chats, seeds) == apart
    (first,), (second,) = sorted(
        (one.bodies, other.bodies), key=lambda bodies: len(bodies[0]["input_ids"][0])
    )
    lengths = [len(ids) for ids in first["input_ids"]]
    assert lengths == [4, 4, 2, 2, 6, 6] and first["rid"] == second["rid"]
    longer = [len(ids) for ids in second["input_ids"]]  # by the tokens that came
    assert longer != lengths and all(one >= other for one, other in zip(longer, lengths, strict=True))


async def test_each_token_has_the_version_that_sampled_it(pair, models, often):
    """The weights change in the middle; then the connection is lost, and a server with old weights continues."""
    one, other, router = pair

    async def update():
        server = one if one.bodies else other
        meter.act, meter.least = cut, max(meter.sent.values()) + 60
        body = {"model_path": str(models["0.2"]), "weight_version": "0.2", "flush_cache": True}
        assert (await server.request("/update_weights_from_disk", body))[0] == 200

    async def cut():
        one.on_parts = other.on_parts = None
        raise ConnectionResetError("cut by the test")

    one.on_parts = other.on_parts = meter = Meter(update)
    turns = await router.generate_many(requests(SHORT, LONG, LONG))
    for turn in turns[1:]:
        assert [label for label, *_ in turn.versions] == ["0.1", "0.2", "0.1"]
        check_logprobs(turn, models, 1.0, PROMPT)
    assert turns[0].versions == [("0.1", 0, SHORT)]


async def test_a_server_that_drains_generates_nothing_in_vain(pair, often):
    one, other, router = pair

    async def drain():
        one.on_parts = other.on_parts = None
        server = one if one.bodies else other
        server.proxy.enter("stopping")
        await server.request("/pause_generation", {"mode": "abort"})

    one.on_parts = other.on_parts = Meter(drain)
    turns = await router.generate_many(requests(SHORT, LONG, LONG))
    assert [len(turn.output_ids) for turn in turns] == [SHORT, LONG, LONG]
    assert one.bodies and other.bodies
    assert one.engine.num_tokens + other.engine.num_tokens == SHORT + 2 * LONG
    assert [turn.num_regenerated for turn in turns] == [0, 0, 0]


async def test_more_servers_may_be_lost_than_retries_as_long_as_tokens_come(pair, often):
    one, other, router = pair
    router.request_retries = 1
    cuts = []

    async def cut(parts):
        if len(cuts) < 3 and any(part.ids for part in parts):
            cuts.append(parts)
            raise ConnectionResetError("cut by the test")

    one.on_parts = other.on_parts = cut
    (turn,) = await router.generate_many(requests(LONG))
    assert len(cuts) == 3 and len(turn.output_ids) == LONG


def test_a_part_does_not_change_while_the_engine_goes_on():
    sequence = Sequence(PROMPT, SamplingParams(), 1, "rid")
    sample = backend_module._Sample(sequence)
    sequence.tokens += [5, 6]
    sequence.logprobs += [-0.5, -0.25]
    sequence.spans.append(("0.1", 0, 2))
    first = sample.take(0)
    sequence.tokens += [7]
    sequence.logprobs += [-1.0]
    sequence.spans[-1] = ("0.1", 0, 3)
    assert (first.ids, first.logprobs, first.spans) == ([5, 6], [-0.5, -0.25], [("0.1", 0, 2)])
    rest = sample.take(0)
    assert (rest.ids, rest.logprobs, rest.spans, rest.num_made) == ([7], [-1.0], [("0.1", 0, 1)], 3)


async def test_a_client_of_http_gets_no_parts(models, often):
    async with served(models["0.1"]) as server, open_session() as session:
        headers = {"Authorization": f"Bearer {TOKENS['data']}"}
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
        async with session.post(f"{server.url}/generate", json=body, headers=headers) as response:
            answer = await response.json()
        assert len(answer["output_ids"]) == LONG and not server.bodies
        assert answer["meta_info"]["weight_versions"] == [{"version": "0.1", "start": 0, "end": LONG}]


def part(ids, made=None, finish=None):
    made = len(ids) if made is None else made
    return Part(0, ids, [-0.5] * len(ids), [("0.1", 0, len(ids))], finish, made)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(client_module, "time", clock)
    return clock


def test_the_tokens_of_a_lost_server_are_estimated_by_its_speed(clock):
    partial = PartialTurn(requests(400)[0])
    partial.body()
    clock.now += 2.0
    partial.absorb(part([5] * 100))
    assert partial.tokens_per_s == 50
    clock.now += 0.2
    partial.count_lost(7.0)
    assert partial.turn.num_regenerated == 10
    clock.now += 100.0  # parts come every half second: a longer silence has no tokens
    partial.count_lost(7.0)
    assert partial.turn.num_regenerated == 10 + 25
    partial.body()  # on another server, whose speed is known from other requests
    clock.now += 0.3
    partial.count_lost(50.0)
    assert partial.turn.num_regenerated == 10 + 25 + 15
    clock.now += 60.0  # it was waiting all the time
    partial.count_lost(50.0)
    assert partial.turn.num_regenerated == 10 + 25 + 15


def test_tokens_that_were_announced_only_count_as_lost(clock):
    partial = PartialTurn(requests(400)[0])
    partial.body()
    clock.now += 1.0
    partial.absorb(part([5] * 20, made=20))
    clock.now += 1.0
    partial.absorb(part([], made=60))
    partial.count_lost(0.0)
    assert partial.turn.num_regenerated == 40 and len(partial.turn.output_ids) == 20
    partial.absorb(part([6] * 40, made=60))
    partial.count_lost(0.0)
    assert partial.turn.num_regenerated == 40


def test_trajectories_carry_the_count():
    turn = Turn([5, 6], [-0.5, -0.5], [("0.1", 0, 2)], "stop")
    assert trajectory([(PROMPT, turn)], 1.0).stats == {}
    turn.num_regenerated = 12
    assert trajectory([(PROMPT, turn), ([7], turn)], 1.0).stats == {REGENERATED: 24}


def test_spans_are_cut_at_a_token():
    spans = [("0.1", 0, 4), ("0.2", 4, 6)]
    assert cut_spans(spans, 0) == spans
    assert cut_spans(spans, 2) == [("0.1", 0, 2), ("0.2", 2, 4)]
    assert cut_spans(spans, 4) == [("0.2", 0, 2)] and cut_spans(spans, 6) == []


async def test_lines_have_any_length_and_the_last_one_must_be_whole():
    async def chunks():
        for chunk in (b"a\nb", b"c" * 200_000, b"\n\n", b"d"):
            yield chunk

    assert [line async for line in split_lines(chunks())] == [b"a", b"b" + b"c" * 200_000, b""]
