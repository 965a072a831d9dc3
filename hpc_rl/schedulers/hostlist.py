"""Slurm's lists of node names, and the other hosts of the job that this process is in."""

import re
from collections.abc import Mapping

# Resolving a name may take seconds where no name server answers.
MAX_NAMES = 2


def expand(nodes: str) -> list[str]:
    """Return the names of `a[1-3,07-09]b,c` in Slurm's order; other texts stay as they are."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            options = [text] if text else [number for piece in ranges.split(",") for number in _range(piece)]
            expanded = [head + tail for head in expanded for tail in options]
        names += expanded
    return names


def job_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of this process's job."""
    components = int(environ.get("SLURM_HET_SIZE", 0))
    variables = ["SLURM_JOB_NODELIST", *(f"SLURM_JOB_NODELIST_HET_GROUP_{n}" for n in range(components))]
    return list(dict.fromkeys(name for variable in variables for name in expand(environ.get(variable, ""))))


def peer_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return some other hosts of this process's job; last the address that srun was called from."""
    own = environ.get("SLURMD_NODENAME", "")
    others = [name for name in job_hosts(environ) if name != own]
    # A job of one node knows no other name, but this address is of the network that Slurm uses.
    caller = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return [*others[:MAX_NAMES], *([caller] if caller else [])]


def _range(piece: str) -> list[str]:
    first, dash, last = piece.partition("-")
    if not dash or not (first.isdigit() and last.isdigit()):
        return [piece]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
