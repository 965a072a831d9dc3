"""Slurm's lists of node names, and the hosts of this process's job."""

import re
from collections.abc import Mapping

# Resolving a name may take seconds if no name server answers.
MAX_NAMES = 2


def expand(nodes: str) -> list[str]:
    """Return the names of `a[1-3,07-09]b,c` in Slurm's order; return other texts unchanged."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            options = (
                [text] if text else [number for piece in ranges.split(",") for number in _expand_range(piece)]
            )
            expanded = [head + tail for head in expanded for tail in options]
        names += expanded
    return names


def list_job_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of this process's job."""
    components = int(environ.get("SLURM_HET_SIZE", 0))
    variables = ["SLURM_JOB_NODELIST", *(f"SLURM_JOB_NODELIST_HET_GROUP_{n}" for n in range(components))]
    return list(dict.fromkeys(name for variable in variables for name in expand(environ.get(variable, ""))))


def list_peer_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return some other hosts of this process's job; the last is the address of srun's caller."""
    own = environ.get("SLURMD_NODENAME", "")
    others = [name for name in list_job_hosts(environ) if name != own]
    # A job of one node has no other names, but this address is on the network that Slurm uses.
    caller = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return [*others[:MAX_NAMES], *([caller] if caller else [])]


def _expand_range(piece: str) -> list[str]:
    first, dash, last = piece.partition("-")
    if not dash or not (first.isdigit() and last.isdigit()):
        return [piece]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
