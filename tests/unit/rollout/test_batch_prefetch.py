"""The batch after the current one: when the trainer gets it early, and when it asks itself."""

import threading

import pytest
from patience import extend

from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.types import Batch, encode
from hpc_rl.rollout.batch_prefetch import BatchPrefetch


class FakeClient:
    """Answers once `ready` is set, with the batch of the step."""

    poll_s = 0.05

    def __init__(self):
        self.asked, self.ready, self.answered, self.problem = [], threading.Event(), threading.Event(), None

    def batch_bytes(self, step, lineage, stopping, version):
        self.asked.append((step, lineage, version))
        while not self.ready.wait(0.01):
            if stopping.is_set():
                return None
        if self.problem:
            raise self.problem
        return encode(Batch(step, []))

    def close(self):
        pass


@pytest.fixture
def client():
    return FakeClient()


@pytest.fixture
def prefetch(client):
    prefetch = BatchPrefetch(client)
    yield prefetch
    prefetch.close()
    assert not prefetch._thread.is_alive()


def wait_for(condition):
    pause = threading.Event()
    for _ in range(int(extend(60) / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never came")


def test_a_batch_that_is_ready_is_taken_once(prefetch, client):
    client.ready.set()
    prefetch.begin(5, 2)
    wait_for(lambda: prefetch._newest.found)
    found = prefetch.take(5)
    assert found.batch == Batch(5, []) and found.body == encode(found.batch)
    assert prefetch.take(5) is None
    assert client.asked == [(5, 2, 3)], "the trainer has not trained on batch 4"


def test_a_batch_that_is_late_is_left_to_the_trainer(prefetch, client):
    prefetch.begin(5, 2)
    wait_for(lambda: client.asked)
    assert prefetch.take(5) is None
    prefetch.begin(6, 2)
    client.ready.set()
    wait_for(lambda: prefetch._newest.found)
    assert prefetch.take(6).batch.step == 6
    assert [step for step, *_ in client.asked] == [5, 6]


def test_a_batch_of_another_step_is_not_used(prefetch, client):
    client.ready.set()
    prefetch.begin(5, 2)
    wait_for(lambda: prefetch._newest.found)
    assert prefetch.take(7) is None


def test_an_error_is_left_to_the_trainers_own_request(prefetch, client):
    client.ready.set()
    client.problem = RoleFailed("it stays away")
    prefetch.begin(5, 2)
    wait_for(lambda: client.asked)
    assert prefetch.take(5) is None
    client.problem = None
    prefetch.begin(6, 2)
    wait_for(lambda: prefetch._newest.found)


def test_it_ends_while_it_waits(prefetch, client):
    prefetch.begin(5, 2)
    wait_for(lambda: client.asked)
