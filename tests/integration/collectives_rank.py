"""One rank of the scenarios of test_collectives.py: `python collectives_rank.py SCENARIO RANK NUM_RANKS FOLDER`."""

from pathlib import Path

import gloo_ranks
import torch
import torch.distributed as dist

from hpc_rl.core.errors import NodeFailed, RoleFailed
from hpc_rl.core.trial import write_json
from hpc_rl.engines.shared import collectives

NODES = ["n1", "n2", "n3", "n4"]


def scenario_check(folder: Path, rank: int, num_ranks: int) -> None:
    collectives.NUMBERS["cpu"] = 1 << 12
    collectives.LIMIT_S = 5.0
    own = collectives.make_numbers
    store = dist.distributed_c10d._get_default_store()
    found = {"fine": ask(store, "fine", rank)}

    def wrong(numbers: torch.Tensor, who: int) -> torch.Tensor:
        """The third rank sends a wrong number to the other nodes."""
        sent = own(numbers, who)
        sent[7] += who == 2
        return sent

    collectives.make_numbers = wrong
    found["wrong"] = ask(store, "wrong", rank)
    collectives.make_numbers = lambda numbers, who: own(numbers, who + 1)
    found["all"] = ask(store, "all", rank)
    write_json(folder / f"found-{rank}.json", found)


def ask(store: dist.Store, name: str, rank: int) -> dict:
    try:
        found = collectives.check(dist.PrefixStore(name, store), "cpu", NODES[rank])
        return {"summary": found.summary, "slow": found.slow}
    except NodeFailed as error:
        return {"nodes": error.nodes, "reason": str(error)}
    except RoleFailed as error:
        return {"reason": str(error)}


if __name__ == "__main__":
    gloo_ranks.main(globals())
