"""Every name-resolve key, once. All are relative to the trial's names directory."""

OWNER = "owner"  # lease: the supervisor that runs the trial
WAITS_FOR_ROOM = "waits_for_room"  # the disk is full
WAITS_FOR_GROUPS = "waits_for_groups"  # waits for groups of environments; none of our own prompts runs
# lease: {"url", "attempt", "pid", "host", "waits_for_room", "waits_for_groups"}
ROLLOUT = "rollout/0"
# States of a server that gets requests; a paused server holds them until its new weights are loaded.
ROUTABLE = ("serving", "paused")


def servers(pool: str) -> str:
    """Prefix of the leases of a pool's replicas; the record on it is their roster."""
    return f"server/{pool}"


def server(pool: str, index: int) -> str:
    """Lease of one replica: {"url", "version", "state", "attempt", "incarnation", "pid", "host"}."""
    return f"{servers(pool)}/{index}"


def describe_server(key: str) -> str:
    """Return the name of a replica in messages, from the key of its lease."""
    pool, _, index = key.removeprefix("server/").rpartition("/")
    return f"server {index} of pool {pool}"


def rendezvous(attempt: str, incarnation: int) -> str:
    """Record of rank 0 of one trainer incarnation: {"address", "port"} of the process group's store."""
    return f"trainer/{attempt}/{incarnation}"


def member(attempt: str, index: int, incarnation: int, node_rank: int) -> str:
    """Record of a replica's process on its node `node_rank`, above 0: {"url"}."""
    return f"member/{attempt}/{index}/{incarnation}/{node_rank}"


def watch(number: int) -> str:
    """Lease of a watch over the first node: {"attempt", "host"}. It identifies the newest watch."""
    return f"watch/{number}"
