"""How many prompts may be in the air, and when a batch may be cut, so that data stays young enough. Pure.

Staleness of a trajectory in batch k is the trainer's version then, k-1, minus the oldest version in it. With
B = prompts per batch and eta = `max_head_offpolicyness`:

soft   AReaL's count: at version v at most (eta + v + 1) * B prompts are consumed, ready or running. A
       straggler may still get older than eta, because batches are cut without it.
hard   The same count, and each batch leaves enough room for older groups. A group begun at version v is due
       in batch v + eta + 1 at the latest. Batch k may be cut when, for every j >= k, the groups that remain
       and are due by j fit into the batches k+1 … j. The count guarantees that such a cut exists once the
       running prompts have finished.
drop   As soft, and a group that is too old when the batch is cut is rejected.
"""

from collections import Counter
from collections.abc import Iterable


def count_room(
    max_concurrent: int, batch_size: int, eta: int, version: int, accepted: int, running: int
) -> int:
    """Return how many more prompts may be issued now; 0 or less means none.

    `accepted` counts consumed and ready groups.
    """
    return min(max_concurrent - running, (eta + version + 1) * batch_size - (accepted + running))


def compute_staleness(step: int, oldest_step: int) -> int:
    """Return the age of a trajectory in batch `step`.

    Tokens of a lost lineage may be newer than the trainer: never below 0.
    """
    return max(0, step - 1 - oldest_step)


def has_room_after(step: int, batch_size: int, eta: int, left: Iterable[int]) -> bool:
    """Return whether batch `step` may be cut without the groups begun at the versions `left`.

    Example: B = 1, eta = 1, step = 3. A group begun at version 1 is due in batch 3 and can't wait, so
    has_room_after(3, 1, 1, [1]) is false. A group begun at version 2 is due in batch 4, so
    has_room_after(3, 1, 1, [2]) is true.
    """
    num_due = 0
    for last, count in sorted(Counter(begun + eta + 1 for begun in left).items()):
        num_due += count
        if num_due > (last - step) * batch_size:
            return False
    return True
