"""Network addresses of this host: find the one that its peers can reach; open listening sockets."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
SIOCGIFADDR = 0x8915  # ioctl of Linux: the IPv4 address of an interface
# Reserved for documentation, so that only the default route leads there.
PUBLIC_HOSTS = ("192.0.2.1", "2001:db8::1")
DISCARD_PORT = 9
LOOPBACK = "127.0.0.1"
CALL_S = 5.0  # time for a peer to answer
MAX_CALLS = 32  # at the same time
SILENCE_S = 9  # then a peer's host counts as lost


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of this host with its addresses, IPv4 first."""

    name: str
    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.addresses)) or 'no address'})"


def choose_address(num_hosts: int, interface: str = "", peers: Iterable[str] = ()) -> str:
    """Return the address to publish to the other processes of a trial, IPv6 without brackets.

    Args:
        num_hosts: Hosts of the trial; loopback is published only if it is 1.
        interface: Interface by name (`ib0`) or network (`10.1.0.0/16`); empty to choose by route.
        peers: Names or addresses of other hosts of the trial; the route to the first resolvable one decides.

        Raises ConfigError if `interface` has no address, or if other hosts can't reach any address.
    """
    if interface:
        return _find_interface_address(interface)
    if num_hosts == 1:
        return _find_address_toward(PUBLIC_HOSTS) or LOOPBACK
    found = _find_address_toward(peers) or _find_address_toward(PUBLIC_HOSTS)
    if found:
        return found
    candidates = (next(filter(_is_reachable, known.addresses), None) for known in list_interfaces())
    usable = [address for address in candidates if address is not None]
    if len(usable) == 1:
        return str(usable[0])
    why = f"{socket.gethostname()} has no network route to the other {num_hosts - 1} hosts of the trial"
    use = f"set cluster.interface to a name or network (10.1.0.0/16) of these: {_describe_interfaces()}"
    raise ConfigError(Refusal(option="", kind=Kind.MACHINE, why=why, use=use, related=("cluster.interface",)))


def find_interface(address: str) -> str | None:
    """Return the name of the interface with this address, or None."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((known.name for known in list_interfaces() if wanted in known.addresses), None)


def list_interfaces() -> list[NetworkInterface]:
    ipv6: dict[str, list[Address]] = {}
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        ipv6.setdefault(name, []).append(ipaddress.IPv6Address(int(digits, 16)))
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            addresses: list[Address] = []
            with contextlib.suppress(OSError):  # of an interface without an IPv4 address
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append(ipaddress.IPv4Address(answer[20:24]))
            found.append(NetworkInterface(name, (*addresses, *ipv6.get(name, ()))))
    return found


def make_http_url(address: str, port: int) -> str:
    """Return the base URL of a service; an IPv6 address gets its brackets."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def notice_silence(connection: socket.socket) -> None:
    """Make a TCP connection fail with OSError once its peer's host has been silent for SILENCE_S.

    A host that lost power or network sends nothing, and a request would wait for its whole time limit.
    Kernels exchange keepalive probes, so a busy or stopped process does not count as silent.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE_S // 3),
        ("TCP_KEEPINTVL", SILENCE_S // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", SILENCE_S * 1000),  # for unacknowledged data, in ms
    ):
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def open_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket of the family, type and protocol at the start of `address`; see `notice_silence`."""
    connection = socket.socket(*address[:3])
    notice_silence(connection)
    return connection


def bind_published(address: str) -> socket.socket:
    """Return a socket that listens on a free port, for processes that learn `address`."""
    return bind(LOOPBACK if address == LOOPBACK else "")


def bind(host: str = "", port: int = 0) -> socket.socket:
    """Return a TCP socket that listens on a port of `host`, or of all addresses; port 0 picks a free one.

    Raises OSError if the port is taken.
    """
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is switched off
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    return socket.create_server((host, port), backlog=512)


def answer_callers(listener: socket.socket, name: str) -> None:
    """Answer each caller with the name of this process, in a thread, until the listener is closed."""

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # of a caller that hangs up
                connection.settimeout(CALL_S)
                connection.sendall(f"{name}\n".encode())

    threading.Thread(target=answer, daemon=True).start()


def find_unreached(peers: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Return the peers that do not answer at their address and port: name -> reason."""
    with ThreadPoolExecutor(MAX_CALLS) as pool:
        reasons = dict(zip(peers, pool.map(lambda name: _call(name, *peers[name]), peers), strict=True))
    return {name: reason for name, reason in reasons.items() if reason}


def _call(name: str, address: str, port: int) -> str:
    try:
        with socket.create_connection((address, port), timeout=CALL_S) as connection:
            answer = connection.makefile().readline().strip()
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer == name else f"{answer or 'another program'} answers there"


def _find_interface_address(wanted: str) -> str:
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None = None
    with contextlib.suppress(ValueError):  # of a name
        network = ipaddress.ip_network(wanted, strict=False)
    for known in list_interfaces():
        for address in known.addresses:
            matches = known.name == wanted if network is None else address in network
            if matches and not address.is_link_local:
                return str(address)
    why = f": {socket.gethostname()} has no such interface or network; it has {_describe_interfaces()}"
    raise ConfigError(Refusal(option="cluster.interface", value=wanted, kind=Kind.MACHINE, why=why))


def _find_address_toward(hosts: Iterable[str]) -> str | None:
    """Return this host's address on the route to the first host, if others can reach that address."""
    for host in hosts:
        try:
            resolved = socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, where in resolved:
            address = _find_source_address(family, kind, protocol, where)
            if address is not None and _is_reachable(address):
                return str(address)
    return None


def _find_source_address(family: int, kind: int, protocol: int, where: tuple) -> Address | None:
    # Connecting a UDP socket picks the route and sends no packet.
    try:
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(where)
            return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def _is_reachable(address: Address) -> bool:
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def _describe_interfaces() -> str:
    return ", ".join(map(str, list_interfaces())) or "no network interface"
