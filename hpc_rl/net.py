"""Addresses: bind first, publish the port that was bound, and find the address that peers can reach."""

from __future__ import annotations

import socket


def reachable_address(peer: str | None = None) -> str:
    """This host's address on the route to `peer` (a host name; default: any public route), IPv4 or bracketed IPv6.

    No packet is sent: connecting a UDP socket only picks the route. Falls back to loopback on a host without routes.
    """
    for family, probe in ((socket.AF_INET, peer or "192.0.2.1"), (socket.AF_INET6, peer or "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((probe, 9))
                address = sock.getsockname()[0]
        except OSError:
            continue
        return f"[{address}]" if ":" in address else address
    return "127.0.0.1"


def bind(host: str = "") -> socket.socket:
    """A listening TCP socket on a port that the system chose; hand it to the server, then publish its port."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    sock.listen(512)
    return sock
