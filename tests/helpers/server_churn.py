"""Servers of a trial that come and go, and what the trial must have done all the same."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence

from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.name_resolve.shared_fs import LeaseView, NameResolve
from hpc_rl.stats.read import load_history

LEAST_ALIVE = 2

End = Callable[[str, int], bool]  # ends the server with this key and pid; false if it was gone


def send(number: signal.Signals) -> End:
    """Return a way to end a server: by a signal."""

    def end(_key: str, pid: int) -> bool:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    return end


KILL, DRAIN = send(signal.SIGKILL), send(signal.SIGTERM)


class Churn(threading.Thread):
    """Ends a server of the trial every now and then, in one of several ways in turn; it is started again.

    At least LEAST_ALIVE servers stay.
    """

    def __init__(self, trial: Trial, ways: Sequence[End], seed: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self.trial, self.ways, self.every_s = trial, ways, every_s
        self.random = random.Random(seed)
        self.ended: list[End] = []
        self._names: NameResolve | None = None  # remembers which leases have moved
        self.failure: BaseException | None = None
        self.ending = threading.Event()

    def run(self) -> None:
        try:
            while not self.ending.wait(self.every_s * self.random.uniform(0.5, 1.5)):
                serving = self.list_serving()
                if len(serving) > LEAST_ALIVE:
                    lease, way = self.random.choice(serving), self.ways[len(self.ended) % len(self.ways)]
                    if way(lease.key, lease.value["pid"]):
                        self.ended.append(way)
        except BaseException as error:
            self.failure = error

    def list_serving(self) -> list[LeaseView]:
        if self._names is None and self.trial.names.is_dir():
            self._names = open_names(self.trial)
        leases = self._names.list_leases(keys.servers("rollout")) if self._names else {}
        return [lease for lease in leases.values() if lease.alive and lease.value.get("state") == "serving"]


def check_history(churn: Churn, num_steps: int) -> None:
    """All steps were made once, by one start of the trainer, and few tokens were made twice."""
    if churn.failure is not None:
        raise churn.failure
    history = load_history(churn.trial)
    assert [row["step"] for row in history.steps] == list(range(1, num_steps + 1))
    assert {row["lineage"] for row in history.steps} == {0}, "training never restarts"
    assert set(churn.ended) == set(churn.ways), "each way to end a server"
    tokens = sum(row["num_tokens"] for row in history.steps)
    again = sum(row.get("tokens_regenerated", 0.0) for row in history.steps)
    print(json.dumps({"ended": len(churn.ended), "tokens": tokens, "regenerated": again}))
    kills = churn.ended.count(KILL)
    assert again <= 0.01 * tokens + kills * tokens / sum(row["step_s"] for row in history.steps)
