"""The channel: what its messages carry, and what happens to requests when one side gives up or breaks."""

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web
from patience import extend

from hpc_rl.core.errors import ServerLost, ServerUnavailable
from hpc_rl.core.net import bind
from hpc_rl.servers import channel as channels
from hpc_rl.servers.channel import (
    CHANNEL,
    Channel,
    ChannelLost,
    ChannelRequest,
    ChannelServer,
    decode_parts,
    decode_request,
    encode_parts,
    encode_request,
    unpack,
)
from hpc_rl.servers.client import GenerateRequest, HttpServerClient, PartialTurn, open_session
from hpc_rl.servers.wire import Part

SAMPLING = {"max_new_tokens": 8, "temperature": 0.7, "stop_token_ids": [3]}


def make_request(inputs, **each):
    several = [{**SAMPLING, **{k: v[i] for k, v in each.items()}} for i in range(len(inputs))]
    rids = [f"r{index}" for index in range(len(inputs))]
    body = {"input_ids": inputs, "sampling_params": several, "rid": rids}
    return ChannelRequest(body, "0.3", True)


def make_part(index=0, ids=(5, 6), finish=None):
    return Part(index, [*ids], [-0.5] * len(ids), [("0.1", 0, len(ids))], finish, len(ids))


@pytest.mark.parametrize(
    "request_",
    [
        make_request([[5, 6, 7]] * 3, sampling_seed=[1 << 62, 2, 3]),
        make_request([[5], [6, 151_935], [7]], max_new_tokens=[1, 2, 3]),
        make_request([[5, 6]]),
        make_request([[5, 6], [5, 6], [7], [5, 6], [8], [8]], sampling_seed=[1, 2, 3, 4, 5, 6]),
        ChannelRequest({"input_ids": [[5], [6]], "sampling_params": [{}, {"n": 1}], "rid": ["a", "b"]}),
    ],
)
def test_a_request_arrives_as_it_was_sent(request_):
    got = decode_request(*unpack(encode_request(7, request_)))
    assert got.body == {**request_.body, "return_logprob": True}
    assert (got.least, got.exact) == (request_.least, request_.exact)


def test_samples_of_one_input_send_it_once():
    for inputs in ([[*range(1000)]] * 8, [[*range(500)]] * 4 + [[*range(1, 501)]] * 4):
        assert len(encode_request(1, make_request(inputs, sampling_seed=[*range(8)]))) < 4 * 1000 + 400


def test_parts_arrive_as_they_were_sent():
    end = {"type": "stop", "matched": 1}
    parts = [
        Part(2, [5, 151_935], [-0.25, -1e-3], [("0.1", 0, 1), ("0.2", 1, 2)], None, 9),
        Part(0, [], [], [], end, 4),
        Part(1, [7], [], [("", 0, 1)], None, 1),
    ]
    header, numbers = unpack(encode_parts(3, parts, 200))
    got = decode_parts(header, numbers)
    assert (header["id"], header["status"]) == (3, 200)
    assert got[0].logprobs == pytest.approx(parts[0].logprobs, rel=1e-6)
    got[0].logprobs = parts[0].logprobs
    assert got == parts


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0",
        b"\xff\0\0\0{}",
        channels._pack({}, []),
        channels._pack({"id": 1, "rids": ["a"]}, []),
        channels._pack({"id": 1, "rids": ["a"], "inputs": [[1, 2]], "sampling": [{}]}, [5]),
        channels._pack({"id": 1, "rids": ["a"], "inputs": [[1, 1], [1, 0]], "sampling": [{}]}, [5, 6]),
    ],
)
async def test_a_client_that_sends_something_else_is_disconnected(message):
    async with (
        serving(answer_at_once) as url,
        open_session() as session,
        session.ws_connect(url + CHANNEL) as socket,
    ):
        await socket.send_bytes(message)
        async with asyncio.timeout(extend(30)):
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE


async def answer_at_once(request, send):
    return 200, [make_part(index, finish={"type": "stop"}) for index in range(len(request.body["rid"]))]


@contextlib.asynccontextmanager
async def serving(generate):
    server = ChannelServer(generate, 1 << 20)
    async with listening(server, handler_cancellation=True, shutdown_timeout=0.1) as url:
        try:
            yield url
        finally:
            await server.close(0.1)


@contextlib.asynccontextmanager
async def listening(server, **options):
    """Serve a channel at the URL that this gives. `options` are those of the web.AppRunner."""
    app = web.Application()
    app.router.add_get(CHANNEL, server.handle)
    runner = web.AppRunner(app, **options)
    await runner.setup()
    listener = bind("127.0.0.1")
    await web.SockSite(runner, listener).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def connected(generate):
    async with serving(generate) as url, open_session() as session:
        channel = Channel(session, url, {})
        try:
            yield channel
        finally:
            await channel.close()


async def test_requests_share_a_connection_and_end_in_any_order():
    gates = [asyncio.Event() for _ in range(3)]

    async def generate(request, send):
        await send([make_part()])
        await gates[int(request.body["rid"][0])].wait()
        return 200, [make_part(0, (), {"type": "stop"})]

    taken = [[], [], []]
    async with connected(generate) as channel:
        calls = [asyncio.create_task(channel.ask(make_one(str(i)), taken[i].extend)) for i in range(3)]
        for index in (2, 0, 1):
            gates[index].set()
            assert await calls[index] == (200, None)
    assert [[part.finish for part in parts] for parts in taken] == [[None, {"type": "stop"}]] * 3


def make_one(rid="0"):
    return ChannelRequest({"input_ids": [[5]], "sampling_params": [{}], "rid": [rid]})


async def test_an_error_of_the_server_is_an_answer(caplog):
    async def generate(request, send):
        if request.body["rid"] == ["refused"]:
            return 503, {"error": "stale"}
        raise ZeroDivisionError("a bug")

    async with connected(generate) as channel:
        assert await channel.ask(make_one("refused"), print) == (503, {"error": "stale"})
        status, answer = await channel.ask(make_one(), print)
    assert status == 500 and "a bug" in answer["error"]["message"]
    assert "a request failed" in caplog.text


async def test_an_error_of_the_caller_is_its_own():
    def fail(parts):
        raise ZeroDivisionError("a bug")

    async with connected(answer_at_once) as channel:
        with pytest.raises(ZeroDivisionError):
            await channel.ask(make_one(), fail)
        assert (await channel.ask(make_one(), lambda parts: None))[0] == 200


async def test_a_request_that_is_given_up_is_cancelled_at_the_server():
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def generate(request, send):
        if request.body["rid"] == ["next"]:
            return await answer_at_once(request, send)
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with connected(generate) as channel:
        call = asyncio.create_task(channel.ask(make_one(), print))
        await begun.wait()
        call.cancel()
        async with asyncio.timeout(extend(30)):
            await cancelled.wait()
        assert (await channel.ask(make_one("next"), lambda parts: None))[0] == 200


async def test_a_lost_connection_ends_its_requests_and_the_next_one_connects_again():
    async def generate(request, send):
        if request.body["rid"] == ["cut"]:
            await send([make_part()])
            raise ConnectionResetError("cut by the test")
        return await answer_at_once(request, send)

    taken = []
    async with connected(generate) as channel:
        with pytest.raises(ChannelLost):
            await channel.ask(make_one("cut"), taken.extend)
        assert [part.ids for part in taken] == [[5, 6]]
        assert (await channel.ask(make_one(), taken.extend))[0] == 200


async def test_a_client_that_hangs_up_cancels_its_requests():
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def generate(request, send):
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(generate) as url, open_session() as session:
        call = asyncio.create_task(Channel(session, url, {}).ask(make_one(), print))
        await begun.wait()
        await session.close()
        async with asyncio.timeout(extend(30)):
            await cancelled.wait()
            with pytest.raises(ChannelLost):
                await call


async def test_a_server_that_closes_lets_its_requests_end():
    begun, ends = asyncio.Event(), asyncio.Event()

    async def generate(request, send):
        begun.set()
        await ends.wait()
        return await answer_at_once(request, send)

    server = ChannelServer(generate, 1 << 20)
    async with listening(server) as url, open_session() as session:
        channel = Channel(session, url, {})
        call = asyncio.create_task(channel.ask(make_one(), lambda parts: None))
        await begun.wait()
        closing = asyncio.create_task(server.close(extend(30)))
        ends.set()
        assert (await call)[0] == 200
        await closing
        await channel.close()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_server_that_closes_tells_whether_it_has_begun_the_request(has_begun):
    class Closing(ChannelServer):
        def _begin(self, *args):
            if has_begun:
                super()._begin(*args)
            self.closing = asyncio.create_task(self.close(0.01))

    async def generate(request, send):
        await asyncio.Event().wait()

    server = Closing(generate, 1 << 20)
    async with listening(server) as url, open_session() as session:
        client = HttpServerClient(session, url, "data")
        client._tokens_per_s = 1e6
        partial = PartialTurn(GenerateRequest([5], {"max_new_tokens": 8}, "r0"))
        with pytest.raises(ServerUnavailable) as caught:
            await client.finish([partial])
        assert isinstance(caught.value, ServerLost) == has_begun
        assert (partial.turn.num_regenerated > 0) == has_begun
        await server.closing
        await client.close()
