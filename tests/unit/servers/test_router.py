"""Router and client against small servers that can be slow, wrong or dead."""

import asyncio
import contextlib

import pytest
from aiohttp import web
from channels import add_channel, flatten

from hpc_rl.core.errors import RequestRefused, RoleFailed, ServerUnavailable
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.servers import router as router_module
from hpc_rl.servers.client import GenerateRequest, HttpServerClient, open_session
from hpc_rl.servers.router import Router, is_older


class FakeServer:
    """Answers with `reply(body)`, which may be a status."""

    def __init__(self, version="0.1"):
        self.version, self.bodies, self.requests = version, [], []
        self.reply = lambda body: answer_of([1, 2], self.version)
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self):
        app = web.Application()
        self._channel = add_channel(app, self._generate)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self):
        await self._channel.close(0.1)
        await self._runner.cleanup()

    async def _generate(self, request):
        self.bodies.append(flatten(request.body))
        self.requests.append(request)
        await self.gate.wait()
        return self.reply(self.bodies[-1])

    async def _health(self, _request):
        return web.json_response({"state": "serving", "epoch": 1, "weight_version": self.version})


def answer_of(ids, version, finish="stop", logprob=-0.5):
    spans = [{"version": version, "start": 0, "end": len(ids)}]
    logprobs = [[logprob, token, None] for token in ids]
    versions = {"weight_version": version, "weight_versions": spans}
    meta = {"finish_reason": {"type": finish}, "output_token_logprobs": logprobs, **versions}
    return {"output_ids": ids, "meta_info": meta}


@pytest.fixture
def names(tmp_path):
    return NameResolve(tmp_path)


@contextlib.asynccontextmanager
async def servers(count, names=None):
    """They run, and are announced where names are given."""
    fakes = [FakeServer() for _ in range(count)]
    for index, fake in enumerate(fakes):
        await fake.start()
        if names is not None:
            announce(names, index, fake)
    try:
        yield fakes
    finally:
        for fake in fakes:
            await fake.stop()


def announce(names, index, fake, state="serving"):
    process = {"attempt": "1.0", "incarnation": 0, "pid": 1, "host": "h"}
    value = {"url": fake.url, "version": fake.version, "state": state, **process}
    return names.lease(keys.server("rollout", index), value, 60.0)


def request(min_version=""):
    return GenerateRequest([5, 6], {"max_new_tokens": 8, "temperature": 1.0}, "r" * 32, min_version)


async def test_an_exact_request_goes_to_a_server_that_is_held_at_its_version(names):
    async with servers(3, names) as fakes:
        for index, held in ((1, "0.1"), (2, "0.2")):
            value = {"url": fakes[index].url, "version": "0.1", "state": "serving", "held": held}
            names.lease(keys.server("rollout", index), value, 60.0)
        async with Router(names, "data", poll_s=0.02) as router:
            asked = [request("0.1") for _ in range(6)]
            for one in asked:
                one.exact = True
            await asyncio.gather(*(router.generate_many([one]) for one in asked))
    assert [len(fake.bodies) for fake in fakes] == [0, 6, 0]
    assert (fakes[1].requests[0].least, fakes[1].requests[0].exact) == ("0.1", True)


async def test_abort_is_resubmitted_with_what_was_made():
    async with servers(1) as (fake,), open_session() as session:
        replies = [answer_of([7, 8], "0.1", "abort"), answer_of([], "0.2", "abort"), answer_of([9], "0.2")]
        fake.reply = lambda _body: replies.pop(0)
        (turn,) = await HttpServerClient(session, fake.url, "data").generate_many([request()])
    assert turn.output_ids == [7, 8, 9] and len(turn.output_logprobs) == 3
    assert turn.versions == [("0.1", 0, 2), ("0.2", 2, 3)]
    assert turn.finish_reason == "stop"
    assert [body["input_ids"] for body in fake.bodies] == [[5, 6], [5, 6, 7, 8], [5, 6, 7, 8]]
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.bodies] == [8, 6, 6]


async def test_the_next_server_continues_with_what_a_server_made_before_it_failed(names):
    async with servers(2, names) as fakes:
        asked = []

        def reply(body):
            asked.append((body["input_ids"], body["sampling_params"]["max_new_tokens"]))
            return [answer_of([7, 8], "0.1", "abort"), 503, answer_of([9], "0.2")][len(asked) - 1]

        for fake in fakes:
            fake.reply = reply
        async with Router(names, "data", poll_s=0.02) as router:
            (turn,) = await router.generate_many([request()])
    assert asked == [([5, 6], 8), ([5, 6, 7, 8], 6), ([5, 6, 7, 8], 6)]
    assert (turn.output_ids, turn.versions) == ([7, 8, 9], [("0.1", 0, 2), ("0.2", 2, 3)])
    assert sorted(len(fake.bodies) for fake in fakes) == [1, 2]


async def test_spans_of_one_version_are_joined():
    async with servers(1) as (fake,), open_session() as session:
        replies = [answer_of([7], "0.1", "abort"), answer_of([8], "0.1")]
        fake.reply = lambda _body: replies.pop(0)
        (turn,) = await HttpServerClient(session, fake.url, "data").generate_many([request()])
    assert turn.versions == [("0.1", 0, 2)]


async def test_requests_spread_over_servers(names):
    async with servers(2, names) as fakes:
        for fake in fakes:
            fake.gate.clear()
        async with Router(names, "data", poll_s=0.02) as router:
            calls = [asyncio.create_task(router.generate_many([request()])) for _ in range(10)]
            await asyncio.sleep(0.3)
            assert [len(fake.bodies) for fake in fakes] == [5, 5]
            for fake in fakes:
                fake.gate.set()
            assert all(turn.output_ids == [1, 2] for (turn,) in await asyncio.gather(*calls))


async def test_round_robin_takes_one_after_the_other(names):
    behind = Router(names, "data", poll_s=0.02, policy="round_robin")
    async with servers(2, names) as fakes, behind as router:
        await asyncio.sleep(0.1)
        for _ in range(4):
            await router.generate_many([request()])
            await router.generate_many([request()])
            assert len(fakes[0].bodies) == len(fakes[1].bodies)


async def test_dead_server_is_left_out_and_comes_back(names):
    async with servers(2) as (good, bad):
        announce(names, 0, good)
        bad.reply = lambda _body: 500
        announce(names, 1, bad)
        async with Router(names, "data", poll_s=0.02) as router:
            await asyncio.gather(*(router.generate_many([request()]) for _ in range(6)))
            assert len(good.bodies) == 6
            bad.reply = lambda body: answer_of([3], "0.1")
            await asyncio.sleep(0.2)  # /health answers: it is taken back
            await asyncio.gather(*(router.generate_many([request()]) for _ in range(6)))
            assert len(bad.bodies) > 1


async def test_waits_for_a_server_and_gives_up_in_words(names):
    async with servers(1) as (fake,):
        lease = announce(names, 0, fake, state="waiting")
        async with Router(names, "data", poll_s=0.02, setup_timeout_s=0.2) as router:
            with pytest.raises(RoleFailed, match="server 0 of pool rollout is waiting"):
                await router.generate_many([request()])
        async with Router(names, "data", poll_s=0.02) as router:
            call = asyncio.create_task(router.generate_many([request()]))
            await asyncio.sleep(0.2)
            assert not call.done()
            lease.renew(
                {
                    **names.list_leases(keys.servers("rollout"))[keys.server("rollout", 0)].value,
                    "state": "serving",
                }
            )
            assert (await call)[0].output_ids == [1, 2]


async def test_gives_up_after_its_retries(names, monkeypatch):
    monkeypatch.setattr(router_module, "MAX_PAUSE_S", 0.01)
    async with servers(1, names) as (fake,):
        fake.reply = lambda _body: 500
        async with Router(names, "data", poll_s=0.02, request_retries=2) as router:
            with pytest.raises(ServerUnavailable):
                await router.generate_many([request()])
        assert len(fake.bodies) == 3


async def test_a_bad_request_is_not_tried_again(names):
    async with servers(1, names) as (fake,):
        fake.reply = lambda _body: 400
        async with Router(names, "data", poll_s=0.02) as router:
            with pytest.raises(RequestRefused):
                await router.generate_many([request()])
        assert len(fake.bodies) == 1


async def test_new_enough_servers_are_preferred(names):
    async with servers(2) as (old, new):
        old.version, new.version = "0.9", "1.2"
        announce(names, 0, old)
        announce(names, 1, new)
        async with Router(names, "data", poll_s=0.02) as router:
            await asyncio.gather(*(router.generate_many([request("1.2")]) for _ in range(4)))
    assert (len(old.bodies), len(new.bodies)) == (0, 4)
    assert (new.requests[0].least, new.requests[0].exact) == ("1.2", False)


def test_labels_order_by_lineage_then_step():
    assert is_older("", "0.0") and is_older("0.9", "0.10") and is_older("0.99", "1.0")
    assert not is_older("1.0", "0.99") and not is_older("0.3", "0.3") and not is_older("0.3", "")
