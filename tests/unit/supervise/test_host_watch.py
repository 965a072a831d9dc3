"""Which hosts count as silent, and when a supervisor counts as cut off."""

import socket

import pytest

from hpc_rl.supervise import host_watch
from hpc_rl.supervise.host_watch import SILENT_S, HostWatch, answering


class Network:
    """Hosts that answer or not, and a clock."""

    def __init__(self) -> None:
        self.up, self.scheduler, self.now = {"n2", "n3"}, True, 100.0


@pytest.fixture
def network(monkeypatch) -> Network:
    network = Network()
    monkeypatch.setattr(host_watch, "answering", lambda addresses: network.up & addresses.keys())
    return network


def watch_of(network: Network) -> HostWatch:
    return HostWatch(
        {"n2": "", "n3": "", "behind-a-firewall": ""}, lambda: network.scheduler, lambda: network.now
    )


def test_a_host_that_answered_once_counts_as_silent_after_a_while(network):
    watch = watch_of(network)
    watch.look()
    network.up = {"n2"}
    watch.look()
    assert watch.silent_s() == {}
    network.now += SILENT_S
    watch.look()
    assert watch.silent_s() == {"n3": SILENT_S}
    network.up = {"n2", "n3"}
    watch.look()
    assert watch.silent_s() == {} and watch.isolated_s == 0


def test_it_is_cut_off_only_without_hosts_and_scheduler(network):
    watch = watch_of(network)
    watch.look()
    network.up = set()
    watch.look()
    network.now += 300
    assert watch.isolated_s == 0 and set(watch.silent_s()) == {"n2", "n3"}
    network.scheduler = False
    watch.look()
    network.now += 40
    assert watch.isolated_s == 40
    network.scheduler = True
    watch.look()
    assert watch.isolated_s == 0


def test_without_hosts_that_ever_answered_it_is_never_cut_off(network):
    network.up, network.scheduler = set(), False
    watch = watch_of(network)
    watch.look()
    network.now += 300
    assert watch.isolated_s == 0 and watch.silent_s() == {}


def test_a_host_that_lives_answers_although_nothing_listens():
    families = {"ipv4": "127.0.0.1"} | ({"ipv6": "::1"} if socket.has_dualstack_ipv6() else {})
    # an address of a link, without the link
    assert answering(families | {"gone": "fe80::1"}, timeout_s=0.5) == families.keys()
