"""One node's part of the preflight (network_check.py): a task on each node of a job.

It prints JSON lines after MARK: first the address of its roles, then, once the supervisor has sent all
addresses on standard input, the nodes that it does not reach. It listens until its input ends.
"""

import argparse
import json
import os
import socket
import sys
from typing import Any

from hpc_rl.core import net
from hpc_rl.core.errors import ConfigError
from hpc_rl.schedulers.hostlist import list_peer_hosts

MARK = "HPC_RL_PREFLIGHT "  # a site's TaskProlog may print other lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.supervise.network_node", description=__doc__)
    parser.add_argument("--num_hosts", type=int, required=True)
    parser.add_argument("--interface", default="")
    args = parser.parse_args()
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    listener = net.bind()
    net.answer_callers(listener, node)
    try:
        address = net.choose_address(args.num_hosts, args.interface, list_peer_hosts(os.environ))
    except ConfigError as error:
        _print_answer({"node": node, "problem": str(error)})
    else:
        interface = net.find_interface(address) or ""
        _print_answer(
            {"node": node, "interface": interface, "address": address, "port": listener.getsockname()[1]}
        )
    if line := sys.stdin.readline():
        peers = {name: where for name, where in json.loads(line).items() if name != node}
        _print_answer({"node": node, "unreached": net.find_unreached(peers)})
        sys.stdin.read()
    os._exit(0)  # a thread waits for callers


def _print_answer(line: dict[str, Any]) -> None:
    os.write(1, f"{MARK}{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main()
