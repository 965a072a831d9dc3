"""Which server the gateway takes."""

import pytest

from hpc_rl.core.types import Turn
from hpc_rl.gateway.balance import BLOCK_TOKENS, BalancingRouter
from hpc_rl.name_resolve.shared_fs import LeaseView
from hpc_rl.servers.client import GenerateRequest
from hpc_rl.servers.router import Server


@pytest.fixture
def router():
    return BalancingRouter(None, "data")


def server(key, running=0):
    value = {"url": "http://host", "version": "0.1", "state": "serving"}
    return Server(LeaseView(key, value, 1, True, 0.0), None, running=running)


def request(length=4, first=0):
    return GenerateRequest([first + i for i in range(length)], {}, "r" * 32)


def answered(router, one, asked, seconds=1.0, made=10):
    router.observe(one, [asked], [Turn(list(range(made)), [], [], "stop")], seconds)


def test_the_one_with_fewest_requests(router):
    a, b = server("a", 3), server("b", 2)
    assert router.choose([a, b], [request()]) is b


def test_a_slow_server_counts_its_requests_more(router):
    a, b = server("a", 1), server("b", 2)
    answered(router, a, request(), seconds=10.0)
    answered(router, b, request(), seconds=1.0)
    assert router.choose([a, b], [request()]) is b


def test_a_conversation_returns_to_its_server_unless_that_is_busy(router):
    a, b = server("a"), server("b")
    first = request(2 * BLOCK_TOKENS)
    answered(router, a, first)
    second = request(3 * BLOCK_TOKENS)
    a.running = 1
    assert all(router.choose([a, b], [second]) is a for _ in range(8))
    a.running = 9
    assert router.choose([a, b], [second]) is b
    assert router.choose([b], [second]) is b


def test_a_common_beginning_alone_is_no_conversation(router):
    a, b = server("a", 1), server("b")
    answered(router, a, request(BLOCK_TOKENS))
    assert router.choose([a, b], [request(5 * BLOCK_TOKENS)]) is b


def test_metrics_are_of_the_latest_answers():
    router = BalancingRouter(None, "data", metrics_window=2)
    a = router._servers["a"] = server("a")
    for seconds in (100.0, 1.0, 3.0):
        answered(router, a, request(), seconds)
    (shown,) = router.describe_servers()
    assert shown["request_time_avg_s"] == 2.0 and shown["s_per_token"] == pytest.approx(0.2)
