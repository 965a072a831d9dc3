"""The watch on an event loop: a call that blocks is told with its place, a busy loop is not."""

import asyncio
import sys
import threading
import time

import pytest

from hpc_rl.rollout.loop_watch import MIN_LOOKS, LoopWatch

PATIENCE_S = 60.0


class Told:
    """What a watch tells."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.blocked, self.over = threading.Event(), threading.Event()

    def __call__(self, place: str, trace: str) -> None:
        self.calls.append((place, trace))
        (self.blocked if place else self.over).set()


@pytest.fixture
def watch_of(monkeypatch):
    """Start a watch on the loop of this thread; `looks` counts how often it has looked."""
    started, looks, current = [], [], sys._current_frames

    def seen():
        looks.append(1)
        return current()

    def start(told: Told) -> list[int]:
        monkeypatch.setattr(sys, "_current_frames", seen)
        started.append(LoopWatch(told, look_s=0.01))
        started[0].start()
        return looks

    yield start
    for one in started:
        one.stop()
        one.join()


async def test_a_call_that_blocks_is_told_once_and_again_when_it_is_over(watch_of):
    told = Told()
    watch_of(told)

    def waits_in_vain() -> None:
        assert told.blocked.wait(PATIENCE_S)

    await asyncio.sleep(0)
    waits_in_vain()
    assert await asyncio.to_thread(told.over.wait, PATIENCE_S)
    (place, trace), last = told.calls
    assert "test_loop_watch.py:" in place and place.endswith(", in waits_in_vain")
    assert ", in waits_in_vain" in trace and "asyncio/runners" not in trace and last == ("", "")


async def test_a_loop_with_much_to_do_is_not_blocked(watch_of):
    told = Told()
    looks = watch_of(told)
    deadline = time.monotonic() + PATIENCE_S
    while len(looks) < 10 * MIN_LOOKS and time.monotonic() < deadline:
        # short calls, which leave the loop no pause
        time.sleep(0.001)
        await asyncio.sleep(0)
    assert len(looks) >= 10 * MIN_LOOKS and told.calls == []


async def test_a_loop_that_waits_is_not_blocked(watch_of):
    told = Told()
    looks = watch_of(told)
    while len(looks) < 3 * MIN_LOOKS:
        await asyncio.sleep(0.02)
    assert told.calls == []
