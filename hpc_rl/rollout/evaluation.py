"""Evaluation: every held-out prompt once, made by the weights of one version. Outside the batch log and its capacity."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from hpc_rl.datasets.encode import Prompts
from hpc_rl.errors import RoleFailed, Stale
from hpc_rl.types import EvalResult, WeightVersion

logger = logging.getLogger(__name__)


class Evaluation:
    """One pass for one label.

    Args:
        label: Tokens of any other version do not count: the prompt is asked again.
        prompts: The held-out prompts.
        run: Takes a frame for the executor.
        limit: Prompts in flight.
        retries: Times that a prompt is asked again after an exception before it is left out, and counted.
        tickets: Source of tickets that nobody else uses.
    """

    def __init__(
        self,
        label: str,
        prompts: Prompts,
        run: Callable[[dict[str, Any]], None],
        limit: int,
        retries: int,
        tickets: itertools.count,
    ) -> None:
        self.label = label
        self.result: asyncio.Future[EvalResult] = asyncio.get_running_loop().create_future()
        self._prompts = prompts
        self._run = run
        self._limit = limit
        self._retries = retries
        self._tickets = tickets
        self._waiting = deque(range(len(prompts)))
        self._asked: dict[int, int] = {}  # ticket -> position
        self._rewards: dict[int, float] = {}
        self._failures: Counter[int] = Counter()
        self._left_out: Counter[str] = Counter()
        self._num_tokens = 0
        self._asked_again = 0
        self._pump()

    @property
    def tickets(self) -> list[int]:
        return list(self._asked)

    def owns(self, ticket: int) -> bool:
        return ticket in self._asked

    def lost(self, tickets: list[int]) -> None:
        """Their worker died."""
        for ticket in tickets:
            if ticket in self._asked:
                self._waiting.append(self._asked.pop(ticket))
        self._pump()

    def frame(self, frame: dict[str, Any]) -> None:
        """An answer to one of its tickets."""
        position = self._asked.pop(frame["ticket"])
        if frame["op"] == "scored":
            self._scored(position, frame)
        elif frame["op"] == "failed" and self._failures[position] < self._retries:
            self._failures[position] += 1
            self._waiting.append(position)
        else:
            self._left_out[frame.get("reason", "exception")] += 1
        self._pump()

    def _scored(self, position: int, frame: dict[str, Any]) -> None:
        versions = [WeightVersion.parse(label) for label in frame["versions"]]
        wanted = WeightVersion.parse(self.label)
        newer = [v for v in versions if (v.lineage, v.step) > (wanted.lineage, wanted.step)]
        if newer and not self.result.done():
            self.result.set_exception(
                Stale(f"the servers have gone on to {newer[-1]}: {self.label} can't be evaluated any more")
            )
        elif versions in ([], [wanted]):
            self._rewards[position] = frame["reward"]
            self._num_tokens += frame["num_tokens"]
        else:
            self._asked_again += 1
            self._waiting.append(position)

    def _pump(self) -> None:
        if self.result.done():
            return
        while self._waiting and len(self._asked) < self._limit:
            position = self._waiting.popleft()
            prompt = self._prompts.in_file_order(position)
            ticket = next(self._tickets)
            self._asked[ticket] = position
            frame = {
                "op": "run",
                "ticket": ticket,
                "index": position,
                "epoch": 0,
                "row": prompt.row,
                "version": self.label,
            }
            self._run({**frame, "columns": prompt.columns, "input_ids": prompt.input_ids, "evaluate": True})
        if not self._asked and not self._waiting:
            self._finish()

    def _finish(self) -> None:
        rewards = list(self._rewards.values())
        if not rewards:
            self.result.set_exception(
                RoleFailed(f"no held-out prompt could be scored: {dict(self._left_out)}")
            )
            return
        counts = {
            "num_tokens": self._num_tokens,
            "left_out": self._left_out.total(),
            "asked_again": self._asked_again,
        }
        stats = {name: float(count) for name, count in counts.items()}
        self.result.set_result(EvalResult(self.label, len(rewards), sum(rewards) / len(rewards), stats))
