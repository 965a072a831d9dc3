"""Which hosts count as silent, and when a supervisor counts as cut off."""

import socket
import threading

import pytest
from patience import extend

from hpc_rl.supervise import host_watch
from hpc_rl.supervise.host_watch import ASK_EVERY_S, SILENT_S, HostWatch, find_answering


class Network:
    """Hosts that answer or not, a clock, and a watch that looked when all were up."""

    def __init__(self) -> None:
        self.up, self.scheduler, self.now, self.asked = {"n2", "n3"}, True, 100.0, 0
        self.watch = self.watch_of("n2", "n3", "behind-a-firewall")

    def scheduler_answers(self) -> bool:
        self.asked += 1
        return self.scheduler

    def watch_of(self, *hosts: str) -> HostWatch:
        return HostWatch(dict.fromkeys(hosts, ""), self.scheduler_answers, lambda: self.now)

    def look(self, after_s: float = 0.0, watch: HostWatch | None = None) -> HostWatch:
        self.now += after_s
        (watch or self.watch).look()
        return watch or self.watch


@pytest.fixture
def network(monkeypatch) -> Network:
    network = Network()
    monkeypatch.setattr(host_watch, "find_answering", lambda addresses: network.up & addresses.keys())
    network.look()
    return network


def test_a_host_that_answered_once_counts_as_silent_after_a_while(network):
    network.up = {"n2"}
    assert network.look().measure_silence() == {}
    assert network.look(SILENT_S).measure_silence() == {"n3": SILENT_S}
    network.up = {"n2", "n3"}
    watch = network.look()
    assert watch.measure_silence() == {} and watch.isolated_s == 0


def test_a_node_that_no_other_one_answers_is_cut_off_itself_where_there_are_several(network):
    of_two = network.look(watch=network.watch_of("n2"))
    network.up = set()
    network.look(watch=of_two)
    assert network.look().cut_off_s == 0
    assert network.look(SILENT_S).cut_off_s == SILENT_S
    network.look(watch=of_two)
    assert of_two.measure_silence() and of_two.cut_off_s == 0
    network.up = {"n2"}
    assert network.look().cut_off_s == 0


def test_it_is_cut_off_only_without_hosts_and_scheduler(network):
    network.up = set()
    network.look()
    watch = network.look(300)
    assert watch.isolated_s == 0 and set(watch.measure_silence()) == {"n2", "n3"}
    network.scheduler = False
    network.look(ASK_EVERY_S)
    assert network.look(40).isolated_s == 40
    network.scheduler = True
    assert network.look(ASK_EVERY_S).isolated_s == 0


def test_the_scheduler_is_asked_twice_a_minute_while_all_others_are_silent(network):
    network.up = set()
    for _ in range(12):
        network.look()
        network.now += 5
    assert network.asked == 2


def test_a_watch_that_can_not_look_judges_nothing(network, monkeypatch):
    """Without a descriptor for a socket, or a process for sinfo."""
    network.up, network.scheduler = set(), False
    watch = network.look()
    looked_twice, looks = threading.Event(), []

    def fails(addresses) -> set[str]:
        if looked_twice.is_set():
            threading.Event().wait()  # the thread does no more
        network.now += 300
        looks.append(network.now)
        if len(looks) == 2:
            looked_twice.set()
        raise OSError("too many open files")

    monkeypatch.setattr(host_watch, "find_answering", fails)
    monkeypatch.setattr(host_watch, "LOOK_EVERY_S", 0.0)
    watch.start()
    assert looked_twice.wait(extend(20))
    assert watch.isolated_s == 0 and watch.measure_silence() == {}


def test_without_hosts_that_ever_answered_it_is_never_cut_off(network):
    network.up, network.scheduler = set(), False
    watch = network.look(watch=network.watch_of("n2", "n3"))
    network.now += 300
    assert watch.isolated_s == 0 and watch.measure_silence() == {}


def test_a_host_that_lives_answers_although_nothing_listens():
    families = {"ipv4": "127.0.0.1"} | ({"ipv6": "::1"} if socket.has_dualstack_ipv6() else {})
    # an address of a link, without the link
    assert find_answering(families | {"gone": "fe80::1"}, timeout_s=0.5) == families.keys()
