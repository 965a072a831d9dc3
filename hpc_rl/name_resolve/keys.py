"""Every name-resolve key, once. All are relative to the trial's names directory."""

from __future__ import annotations

OWNER = "owner"  # lease: the supervisor that runs the trial
WAITS_FOR_ROOM = "waits_for_room"
ROLLOUT = (
    "rollout/0"  # lease: {"url", "attempt", "pid", "host", "waits_for_room"}: the last one on a full disk
)
SERVERS = "server"  # prefix of server leases
ROUTABLE = (
    "serving",
    "paused",
)  # states of a server that gets requests: a paused one holds them until its new weights are in
EVALUATION = "evaluation"  # reserved for the newest evaluation record


def server(index: int) -> str:
    """Lease of one replica: {"url", "version", "state", "attempt", "incarnation", "pid", "host"}."""
    return f"{SERVERS}/{index}"


def rendezvous(attempt: str, incarnation: int) -> str:
    """Where rank 0 of one trainer incarnation publishes {"address", "port"} of the process group's store."""
    return f"trainer/{attempt}/{incarnation}"
