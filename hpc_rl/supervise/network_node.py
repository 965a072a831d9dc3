"""One node's part of the preflight (network_check.py): a task on each node of a job.

It says on standard output, in lines of JSON after MARK, where its roles would be reached, and, once the
supervisor has sent all of these on standard input, which of the other nodes it does not reach. It listens
until its input ends.
"""

import argparse
import json
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from hpc_rl import net
from hpc_rl.errors import ConfigError
from hpc_rl.schedulers.hostlist import peer_hosts

MARK = "HPC_RL_PREFLIGHT "  # a site's TaskProlog may print other lines
CONNECT_S = 5.0
MAX_CALLS = 32  # at the same time


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.supervise.network_node", description=__doc__)
    parser.add_argument("--num_hosts", type=int, required=True)
    parser.add_argument("--interface", default="")
    args = parser.parse_args()
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    listener = net.bind()
    threading.Thread(target=_answer, args=(listener, node), daemon=True).start()
    try:
        address = net.published_address(args.num_hosts, args.interface, peer_hosts(os.environ))
    except ConfigError as error:
        _say({"node": node, "problem": str(error)})
    else:
        interface = net.interface_of(address) or ""
        _say({"node": node, "interface": interface, "address": address, "port": listener.getsockname()[1]})
    if line := sys.stdin.readline():
        peers = {name: where for name, where in json.loads(line).items() if name != node}
        _say({"node": node, "unreached": unreached(peers)})
        sys.stdin.read()
    os._exit(0)  # a thread waits for callers


def unreached(peers: dict[str, tuple[str, int]]) -> dict[str, str]:
    """Return the peers, by node name, that do not answer at their address and port, each with the reason."""
    with ThreadPoolExecutor(MAX_CALLS) as pool:
        reasons = dict(zip(peers, pool.map(lambda name: _call(name, *peers[name]), peers), strict=True))
    return {name: reason for name, reason in reasons.items() if reason}


def _call(name: str, address: str, port: int) -> str:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            answer = connection.makefile().readline().strip()
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer == name else f"{answer or 'another program'} answers there"


def _answer(listener: socket.socket, node: str) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the listener is closed
            return
        with connection, suppress(OSError):  # of a caller that hangs up
            connection.settimeout(CONNECT_S)
            connection.sendall(f"{node}\n".encode())


def _say(line: dict[str, Any]) -> None:
    os.write(1, f"{MARK}{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main()
