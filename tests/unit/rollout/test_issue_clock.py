"""Near the end of the job nothing is issued that could not be finished; an extension takes that back."""

import threading

import pytest

from hpc_rl.rollout.batch_client import RolloutClient
from hpc_rl.rollout.issue_clock import IssueClock


class Clock:
    now = 0.0
    left_s: float | None = None

    def __call__(self) -> float:
        return self.now


def test_what_takes_longer_than_is_left_is_not_begun():
    clock = Clock()
    call = IssueClock(lambda: clock.left_s, clock)
    clock.left_s = 0.5
    assert not call.check_hold(), "nobody knows yet how long a prompt takes"
    for ticket in range(20):
        call.begin(ticket)
    clock.now = 10.0
    for ticket in range(19):
        call.finish(ticket)
    call.forget([19, 20])
    call.finish(19)
    clock.left_s = None
    assert call.usual_s == 10 and not call.check_hold()
    clock.left_s = 10.1
    assert not call.check_hold()
    clock.left_s = 9.9
    assert call.check_hold() and call.holding and not call.can_resume()
    clock.left_s = 300
    assert call.can_resume() and not call.holding and not call.can_resume()


@pytest.mark.parametrize("stopping", [None, threading.Event()])
def test_the_trainer_gets_no_batch_then(stopping):
    client = RolloutClient(None, {"data": "x", "control": "y"})  # type: ignore[arg-type]
    client._request = lambda *_: (205, b"")  # type: ignore[method-assign]
    assert client.batch_bytes(1, 0, stopping) is None
