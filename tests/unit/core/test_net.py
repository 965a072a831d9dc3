"""The address that a role publishes, and the addresses of its sockets, on real networks in namespaces."""

import socket
import sys
from ipaddress import ip_address

import pytest
from network_hosts import NetworkHost, two_hosts
from patience import extend

from hpc_rl.core import net
from hpc_rl.core.errors import ConfigError
from hpc_rl.roles.trainer import use_interface

TWO_NETWORKS = {"eth0": ("10.77.1.11/24", "10.77.1.12/24"), "ib0": ("10.77.2.11/24", "10.77.2.12/24")}
NAMES = "127.0.0.1 localhost\n127.0.1.1 a\n10.77.1.12 b\n10.77.2.12 b-ib\nfd77::12 b6\n"
ASK = "import sys; from hpc_rl.core import net; print(net.choose_address(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))"
REFUSED = """
from hpc_rl.core import net
try:
    print("published", net.choose_address(2))
except net.ConfigError as error:
    print(error)
"""
SERVE = """
import sys
from hpc_rl.core import net
listener = net.bind()
print(net.make_http_url(net.choose_address(2, "", sys.argv[1:]), listener.getsockname()[1]), flush=True)
listener.accept()[0].sendall(b"reached")
"""
CALL = """
import socket, sys
from urllib.parse import urlsplit
url = urlsplit(sys.argv[1])
print(socket.create_connection((url.hostname, url.port), timeout=5).recv(100).decode())
"""


def ask(host: NetworkHost, num_hosts: int, interface: str = "", *peers: str) -> str:
    return host.run(sys.executable, "-c", ASK, str(num_hosts), interface, *peers)


def call(server: NetworkHost, client: NetworkHost, peer: str) -> tuple[str, str]:
    """The address that the server published, and what the client got from it."""
    with server.start(sys.executable, "-c", SERVE, peer) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            return url, client.run(sys.executable, "-c", CALL, url)
        finally:
            process.kill()


def test_hosts_without_a_default_route_reach_what_the_other_publishes(tmp_path):
    with two_hosts(tmp_path, TWO_NETWORKS, NAMES) as (a, b):
        url, answer = call(a, b, "b")
        assert url.startswith("http://10.77.1.11:") and answer == "reached"
        assert ask(a, 2, "", "b-ib") == "10.77.2.11", "the route to the peer decides"
        # the first name is unknown, the second is loopback, as Debian's installer has it
        assert ask(a, 2, "", "unknown.invalid", "a", "10.77.2.12") == "10.77.2.11"
        assert ask(a, 2, "ib0", "b") == ask(a, 2, "10.77.2.0/24", "b") == "10.77.2.11"
        assert ask(a, 1) == "127.0.0.1", "one host alone needs no network"
        said = a.run(sys.executable, "-c", REFUSED)
        assert "eth0 (10.77.1.11" in said and "ib0 (10.77.2.11" in said and "cluster.interface" in said


def test_a_default_route_decides_where_no_peer_is_known(tmp_path):
    with two_hosts(tmp_path, TWO_NETWORKS, NAMES) as (a, _):
        a.run("ip", "route", "add", "default", "via", "10.77.2.12")
        assert ask(a, 2) == ask(a, 1) == "10.77.2.11"
        assert ask(a, 2, "", "b") == "10.77.1.11", "but a peer is better evidence"


def test_the_only_network_is_published_where_no_route_is_known(tmp_path):
    with two_hosts(tmp_path, {"eth0": TWO_NETWORKS["eth0"]}, NAMES) as (a, _):
        a.run("ip", "address", "add", "fd77::11/64", "dev", "eth0", "nodad")
        assert ask(a, 2) == "10.77.1.11"


def test_hosts_with_ipv6_alone_reach_each_other(tmp_path):
    with two_hosts(tmp_path, {"eth0": ("fd77::11/64", "fd77::12/64")}, NAMES) as (a, b):
        url, answer = call(a, b, "b6")
        assert url.startswith("http://[fd77::11]:") and answer == "reached"


INTERFACES = [
    net.NetworkInterface("lo", (ip_address("127.0.0.1"), ip_address("::1"))),
    net.NetworkInterface("eth0", (ip_address("10.1.2.3"), ip_address("fe80::1"))),
    net.NetworkInterface("ib0", (ip_address("fe80::2"), ip_address("fd00::7"))),
]


@pytest.mark.parametrize(
    ("wanted", "address"),
    [("eth0", "10.1.2.3"), ("ib0", "fd00::7"), ("10.1.0.0/16", "10.1.2.3"), ("fd00::/8", "fd00::7"), ("lo", "127.0.0.1")],
)  # fmt: skip
def test_an_interface_is_asked_for_by_name_or_network(monkeypatch, wanted, address):
    monkeypatch.setattr(net, "list_interfaces", lambda: INTERFACES)
    assert net.choose_address(4, wanted) == address
    assert net.find_interface(address) in ("eth0", "ib0", "lo")


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setattr(net, "list_interfaces", lambda: INTERFACES)
    for wanted in ("ib1", "10.9.0.0/16"):
        with pytest.raises(ConfigError, match=rf"cluster\.interface {wanted}: .*eth0 \(10\.1\.2\.3"):
            net.choose_address(4, wanted)


def test_this_host_has_its_loopback():
    assert net.find_interface("127.0.0.1") == "lo"
    assert net.find_interface("203.0.113.9") is None


def test_nccl_and_gloo_use_the_interface_that_is_published():
    environ: dict[str, str] = {}
    use_interface(environ, "127.0.0.1")
    assert environ == {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
    chosen = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth1"}
    use_interface(chosen, "127.0.0.1")
    assert chosen == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth1"}


def test_a_socket_listens_on_ipv4_and_ipv6():
    with net.bind() as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            socket.create_connection((address, port), timeout=extend(5)).close()
    with net.bind("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
