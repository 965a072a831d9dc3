"""The sums of a server's requests: the load of a request is the mean over its time."""

import asyncio

import pytest

from hpc_rl.servers.decode_speed import DecodeSpeed, count_sequences
from hpc_rl.servers.wire import Part


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def speed(clock) -> DecodeSpeed:
    return DecodeSpeed(clock)


def make_body(n: int) -> dict:
    return {"input_ids": [1, 2], "sampling_params": {"n": n}}


def part(index: int, num_made: int, is_over: bool) -> Part:
    return Part(index, [], [], [], {"type": "stop"} if is_over else None, num_made)


async def drop(_: list[Part]) -> None:
    """Send parts to nobody."""


def test_a_request_alone_has_its_own_sequences_as_load(clock, speed):
    async def run() -> None:
        with speed.watch(make_body(2), drop) as send:
            clock.now = 1.0
            await send([part(0, 10, True), part(1, 10, False)])
            clock.now = 4.0
            await send([part(1, 40, True)])

    asyncio.run(run())
    # two sequences for 1 s and one for 3 s: 1.25 on average, for 40 tokens in 4 s
    x, y, s = 40.0, 40 * 1.25, 4.0
    assert speed.sums == pytest.approx([x * x, x * y, y * y, x * s, y * s])


def test_requests_count_each_other(clock, speed):
    async def run() -> None:
        with speed.watch(make_body(1), drop) as send_first:
            clock.now = 1.0
            with speed.watch(make_body(3), drop) as send_second:
                clock.now = 2.0
                await send_second([part(0, 8, True), part(1, 8, True), part(2, 8, True)])
            await send_first([part(0, 16, True)])

    asyncio.run(run())
    (first, second) = (16.0, 16 * 2.5, 2.0), (8.0, 8 * 4.0, 1.0)
    expected = [
        sum(one[a] * one[b] for one in (first, second)) for a, b in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    ]
    assert speed.sums == pytest.approx(expected)


def test_a_request_without_tokens_counts_nothing(clock, speed):
    with speed.watch(make_body(2), drop):
        clock.now = 5.0
    assert speed.sums == [0.0] * 5


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (make_body(4), 4),
        ({"input_ids": [1, 2]}, 1),
        ({"input_ids": [[1, 2], [1, 2]], "sampling_params": {"n": 3}}, 6),
        ({"input_ids": [[1], [2], [3]], "sampling_params": [{"seed": 1}, {"n": 2}, None]}, 4),
        ({"text": "1+1=", "sampling_params": None}, 1),
        ({"input_ids": [], "sampling_params": {"n": "many"}}, 1),
    ],
)
def test_the_sequences_of_a_request(body, count):
    assert count_sequences(body) == count
