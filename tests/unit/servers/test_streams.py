"""Streamed requests of servers that report versions at the end only: which tokens are passed on, and as what."""

import asyncio

import pytest

from hpc_rl.servers import sglang, streams, vllm
from hpc_rl.servers.client import GenerateRequest, PartialTurn
from hpc_rl.servers.streams import Streams, is_continuable


@pytest.fixture
def registry():
    registry = Streams()
    registry.start("0.1")
    return registry


def make_token(sample, *ids):
    sample.ids += ids
    sample.logprobs += [-0.5] * len(ids)


def end(sample, *spans, kind="length"):
    versions = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    sample.end = {"finish_reason": {"type": kind}, "weight_versions": versions}


def absorb(parts, count=1):
    """What a client has after these parts."""
    request = GenerateRequest([1], {"max_new_tokens": 90}, "r")
    partials = [PartialTurn(request) for _ in range(count)]
    for partial in partials:
        partial.body()
    for part in parts:
        partials[part.index].absorb(part)
    return partials


async def test_tokens_have_the_label_of_the_weights(registry):
    async with registry.open(["a", "b"], True) as stream:
        first, second = stream.samples
        make_token(first, 5, 6)
        parts = stream.take()
        assert stream.take() == []
        make_token(first, 7)
        make_token(second, 8)
        end(second, ("0.1", 0, 1), kind="stop")
        parts += stream.take()
        make_token(first, 9)
        end(first, ("0.1", 0, 4))
        parts += [sample.take(index, stream.label) for index, sample in enumerate(stream.samples)]
    one, other = absorb(parts, 2)
    assert (one.turn.output_ids, one.turn.versions) == ([5, 6, 7, 9], [("0.1", 0, 4)])
    assert (other.turn.output_ids, other.turn.finish_reason) == ([8], "stop")
    assert len(one.turn.output_logprobs) == 4


async def test_tokens_after_an_update_are_announced_and_held_until_the_end(registry):
    async with registry.open(["a"], False) as stream:
        (sample,) = stream.samples
        make_token(sample, 5, 6)
        parts = stream.take()
        registry.begin_update()
        make_token(sample, 7)
        registry.end_update("0.2")
        make_token(sample, 8, 9)
        parts += stream.take()
        assert stream.take() == []
        (partial,) = absorb(parts)
        assert partial.turn.output_ids == [5, 6] and partial._num_held == 3
        end(sample, ("0.1", 0, 3), ("0.2", 3, 5))
        parts += stream.take()
        assert stream.take() == []
    (partial,) = absorb(parts)
    assert partial.turn.output_ids == [5, 6, 7, 8, 9] and partial._num_held == 0
    assert partial.turn.versions == [("0.1", 0, 3), ("0.2", 3, 5)]


async def test_a_request_to_a_paused_server_has_the_label_of_the_update(registry):
    registry.pause()
    async with registry.open(["a"], True) as stream:
        assert registry.list_continuable() == []
        registry.begin_update()
        registry.end_update("0.2")
        registry.resume()
        assert registry.list_continuable() == [stream]
        make_token(stream.samples[0], 5)
        (partial,) = absorb(stream.take())
        assert partial.turn.versions == [("0.2", 0, 1)]
        registry.begin_update()
        assert stream.label is None


@pytest.mark.parametrize("ends_with", ["0.2", None])
async def test_weights_that_may_be_half_new_have_no_label(registry, ends_with):
    registry.begin_update()
    async with registry.open(["a"], True) as stream:
        registry.end_update(ends_with)
        assert stream.label is None
    async with registry.open(["b"], True) as stream:
        assert stream.label == ends_with


async def test_new_requests_wait_while_a_pause_begins(registry):
    async def ask():
        async with registry.open(["a"], True) as stream:
            return stream.is_waiting

    with registry.pausing():
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not asking.done() and not registry.list_continuable()
        registry.pause()
    assert await asking


async def test_a_stream_that_breaks_passes_on_what_has_come(registry, monkeypatch):
    monkeypatch.setattr(streams, "PART_S", 60.0)
    sent = []

    async def send(parts):
        sent.extend(parts)

    async with registry.open(["a"], True) as stream:

        async def request():
            make_token(stream.samples[0], 5, 6)
            return 503, {"error": {"message": "killed"}}

        assert (await registry.relay(stream, request(), send))[0] == 503
    assert [part.ids for part in sent] == [[5, 6]]


async def test_parts_come_while_a_request_runs_and_a_short_one_has_none(registry, monkeypatch):
    sent, more = [], asyncio.Event()

    async def send(parts):
        sent.extend(parts)
        more.set()

    async def request(stream):
        make_token(stream.samples[0], 5)
        if registry_runs_long:
            await more.wait()
        make_token(stream.samples[0], 6)
        end(stream.samples[0], ("0.1", 0, 2))
        return 200, None

    for registry_runs_long in (True, False):
        monkeypatch.setattr(streams, "PART_S", 0.01 if registry_runs_long else 60.0)
        async with registry.open(["a"], True) as stream:
            status, (rest,) = await registry.relay(stream, request(stream), send)
        assert status == 200 and rest.ids == ([6] if registry_runs_long else [5, 6])
        assert [part.ids for part in sent] == ([[5]] if registry_runs_long else [])
        sent.clear()


def test_what_a_new_request_can_continue():
    assert is_continuable(None) and is_continuable({"max_new_tokens": 4, "stop": None})
    assert not is_continuable({"repetition_penalty": 1.1}) and not is_continuable({"stop": ["."]})


def sglang_event(ids, made, finish=None, index=None):
    logprobs = [[-0.5, token, None] for token in ids]
    meta = {"completion_tokens": made, "output_token_logprobs": logprobs, "finish_reason": finish}
    return {"output_ids": ids, "meta_info": meta} | ({} if index is None else {"index": index})


async def test_sglangs_events_are_added_once(registry):
    async with registry.open(["a", "b"], True) as stream:
        for event in (
            sglang_event([5], 1, index=0),
            sglang_event([8], 1, index=1),
            sglang_event([6, 7, 7], 3, {"type": "abort"}, index=0),  # joined with the event of an abort
        ):
            sglang._take_event(stream.samples, None, event)
        assert [sample.ids for sample in stream.samples] == [[5, 6, 7], [8]]
        assert len(stream.samples[0].logprobs) == 3 and stream.list_running() == ["b"]


def test_the_requests_that_sglang_streams():
    plan = sglang._plan_stream
    assert plan({"input_ids": [5, 6], "rid": "a"}) == (["a"], [None])
    one = {"max_new_tokens": 4}
    assert plan({"input_ids": [[5], [6]], "rid": ["a", "b"], "sampling_params": one}) == (
        ["a", "b"],
        [one, one],
    )
    assert len(plan({"input_ids": [[5], [6]]})[0]) == 2
    for other in (
        {"text": "1+2"},
        {"input_ids": []},
        {"input_ids": [5], "sampling_params": {"n": 2}},
        {"input_ids": [5], "sampling_params": "x"},
        {"input_ids": [5], "logprob_start_len": 0},
        {"input_ids": [[5], [6]], "rid": ["a"]},
    ):
        assert plan(other) is None


async def test_vllms_events_are_added(registry):
    def event(ids, finish=None, spans=None):
        content = [{"token_id": token, "logprob": -0.5} for token in ids]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
        return {"choices": [{**choice, "stop_reason": None, "weight_versions": spans}]}

    async with registry.open(["a"], True) as stream:
        (sample,) = stream.samples
        vllm._take_event(sample, 3, "0.1", False, event([5, 6]))
        parts = stream.take()
        spans = [{"version": "0.1", "start": 0, "end": 3}]
        vllm._take_event(sample, 3, "0.1", False, event([7], "length", spans))
        parts += stream.take()
    (partial,) = absorb(parts)
    assert (partial.turn.output_ids, partial.turn.versions) == ([5, 6, 7], [("0.1", 0, 3)])
    assert sample.end["finish_reason"] == {"type": "length", "length": 3}


class FakeProcess:
    """Streams one token for each request, and ends a stream when it is aborted."""

    def __init__(self):
        self.calls, self.aborted, self.begun = [], asyncio.Event(), asyncio.Event()

    async def request(self, path, body):
        self.calls.append((path, body.get("rid") or body.get("request_ids")))
        if path.startswith("/abort_request"):
            self.aborted.set()
        return 200, {"success": True}

    async def stream(self, path, body, take):
        self.calls.append((path, body.get("rid") or body.get("request_id")))
        self.aborted.clear()
        self.take(take, 1, None)
        self.begun.set()
        await self.aborted.wait()
        self.take(take, 2, "abort")
        return 200, None


class FakeSGLang(FakeProcess):
    def take(self, take, made, finish):
        event = sglang_event([made], made, finish and {"type": finish})
        event["meta_info"]["weight_versions"] = finish and [{"version": "0.1", "start": 0, "end": made}]
        take(event)


class FakeVLLM(FakeProcess):
    def take(self, take, made, finish):
        spans = finish and [{"version": "0.1", "start": 0, "end": made}]
        choice = {"token_ids": [made], "logprobs": {"content": [{"logprob": -0.5}]}, "weight_versions": spans}
        take({"choices": [{**choice, "finish_reason": finish, "stop_reason": None}]})


def make_sglang():
    backend = sglang.SGLangBackend(process=FakeSGLang(), settings={}, secret=None)
    backend._streams.start("0.1")
    return backend


def make_vllm():
    backend = vllm.VLLMBackend(process=FakeVLLM(), settings={})
    backend._label = "0.1"
    backend._streams.start("0.1")
    return backend


@pytest.mark.parametrize("make", [make_sglang, make_vllm])
@pytest.mark.parametrize(("sampling", "interrupts"), [({}, True), ({"repetition_penalty": 1.5}, False)])
async def test_a_pause_before_an_update_interrupts_what_can_be_continued(make, sampling, interrupts):
    backend, sent = make(), []

    async def send(parts):
        sent.extend(parts)

    def ask(rid):
        body = {"input_ids": [5, 6], "rid": rid, "return_logprob": True, "sampling_params": sampling}
        return asyncio.create_task(backend.generate(body, send))

    running = ask("a")
    await backend.process.begun.wait()
    assert (await backend.request("/pause_generation", {"mode": "retract"}))[0] == 200
    assert running.done() is interrupts
    aborts = [rid for path, rid in backend.process.calls if path.startswith("/abort_request")]
    assert aborts == ([] if not interrupts else ["a"] if make is make_sglang else [["generate-tokens-a"]])
    waiting = ask("b")
    while "b" not in [rid for _, rid in backend.process.calls]:
        await asyncio.sleep(0)
    backend._streams.begin_update()
    backend._streams.end_update("0.2")
    (late,) = (stream for stream in backend._streams._running if stream.is_waiting)
    assert late.label == "0.2"
    await backend.request("/continue_generation", {})
    assert not late.is_waiting
    backend.process.aborted.set()
    for task in (running, waiting):
        status, answer = await task
        assert status == 200 and answer[0].finish["type"] == "abort"
        (partial,) = absorb(answer)
        assert partial.turn.output_ids == [1, 2] and partial.turn.versions == [("0.1", 0, 2)]
