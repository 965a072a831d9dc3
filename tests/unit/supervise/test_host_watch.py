"""Which hosts count as silent, and when a supervisor counts as cut off."""

import socket
import threading

import pytest

from hpc_rl.supervise import host_watch
from hpc_rl.supervise.host_watch import ASK_EVERY_S, SILENT_S, HostWatch, answering


class Network:
    """Hosts that answer or not, and a clock."""

    def __init__(self) -> None:
        self.up, self.scheduler, self.now, self.asked = {"n2", "n3"}, True, 100.0, 0

    def scheduler_answers(self) -> bool:
        self.asked += 1
        return self.scheduler


@pytest.fixture
def network(monkeypatch) -> Network:
    network = Network()
    monkeypatch.setattr(host_watch, "answering", lambda addresses: network.up & addresses.keys())
    return network


def watch_of(network: Network) -> HostWatch:
    addresses = {"n2": "", "n3": "", "behind-a-firewall": ""}
    return HostWatch(addresses, network.scheduler_answers, lambda: network.now)


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


def test_a_node_that_no_other_one_answers_is_cut_off_itself_where_there_are_several(network):
    watch = watch_of(network)
    watch.look()
    network.up = set()
    watch.look()
    assert watch.cut_off_s == 0
    network.now += SILENT_S
    watch.look()
    assert watch.cut_off_s == SILENT_S
    network.up = {"n2"}
    watch.look()
    assert watch.cut_off_s == 0
    network.up = {"n2"}
    of_two = HostWatch({"n2": ""}, network.scheduler_answers, lambda: network.now)
    of_two.look()
    network.up, network.now = set(), network.now + 1
    of_two.look()
    network.now += SILENT_S
    of_two.look()
    assert of_two.silent_s() and of_two.cut_off_s == 0


def test_it_is_cut_off_only_without_hosts_and_scheduler(network):
    watch = watch_of(network)
    watch.look()
    network.up = set()
    watch.look()
    network.now += 300
    watch.look()
    assert watch.isolated_s == 0 and set(watch.silent_s()) == {"n2", "n3"}
    network.scheduler = False
    network.now += ASK_EVERY_S
    watch.look()
    network.now += 40
    watch.look()
    assert watch.isolated_s == 40
    network.scheduler = True
    network.now += ASK_EVERY_S
    watch.look()
    assert watch.isolated_s == 0


def test_the_scheduler_is_asked_twice_a_minute_while_all_others_are_silent(network):
    watch = watch_of(network)
    watch.look()
    network.up = set()
    for _ in range(12):
        watch.look()
        network.now += 5
    assert network.asked == 2


def test_a_watch_that_can_not_look_judges_nothing(network, monkeypatch):
    """Without a descriptor for a socket, or a process for sinfo."""
    watch = watch_of(network)
    watch.look()
    network.up, network.scheduler = set(), False
    watch.look()

    looked_twice, looks = threading.Event(), []

    def fails(addresses) -> set[str]:
        if looked_twice.is_set():
            threading.Event().wait()  # the thread does no more
        network.now += 300
        looks.append(network.now)
        if len(looks) == 2:
            looked_twice.set()
        raise OSError("too many open files")

    monkeypatch.setattr(host_watch, "answering", fails)
    monkeypatch.setattr(host_watch, "LOOK_EVERY_S", 0.0)
    watch.start()
    assert looked_twice.wait(20)
    assert watch.isolated_s == 0 and watch.silent_s() == {}


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
