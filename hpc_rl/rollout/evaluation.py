"""Evaluations: every held-out prompt once, made by the weights of one version; outside the batch log."""

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from hpc_rl.datasets.encode import Prompts
from hpc_rl.errors import RoleFailed, Stale
from hpc_rl.rollout.pipes import Outcome, PromptScored, RunPrompt
from hpc_rl.types import EvalResult, WeightVersion

logger = logging.getLogger(__name__)
EVALUATIONS_KEPT = 4


class Runner(Protocol):
    """executor.Executor, or a fake."""

    restarts: int

    def run(self, frame: RunPrompt) -> None: ...

    def cancel(self, ticket: int) -> None: ...


class Evaluations:
    """The evaluations of an incarnation, the newest few; their tickets are negative.

    Args:
        prompts: The held-out prompts.
        limit: Prompts in flight of one evaluation.
        retries: Times that a prompt is asked again after an exception before it is left out, and counted.
        executor: Where prompts are run.
    """

    def __init__(
        self, prompts: Prompts | None, limit: int, retries: int, executor: Callable[[], Runner]
    ) -> None:
        self.prompts = prompts
        self._limit, self._retries, self._executor = limit, retries, executor
        self._by_version: dict[WeightVersion, Evaluation] = {}
        self._tickets = itertools.count(-1, -1)

    def __contains__(self, version: object) -> bool:
        return version in self._by_version

    @property
    def running(self) -> list[str]:
        """Versions whose evaluation is not finished."""
        return [str(version) for version, one in self._by_version.items() if not one.result.done()]

    def begin(self, version: WeightVersion) -> None:
        """Begin the evaluation of these weights, if it was not; the oldest one may be given up for it."""
        if version in self and not self._by_version[version].result.cancelled():
            return
        assert self.prompts is not None
        self._by_version[version] = Evaluation(
            version, self.prompts, self._executor().run, self._limit, self._retries, self._tickets
        )
        for old in list(self._by_version)[:-EVALUATIONS_KEPT]:
            for ticket in self._by_version.pop(old).tickets:
                self._executor().cancel(ticket)

    async def result(self, version: WeightVersion, wait_s: float | None) -> EvalResult | None:
        """Return the result of an evaluation, None while it takes longer. Raises Stale, RoleFailed."""
        done, _ = await asyncio.wait({self._by_version[version].result}, timeout=wait_s)
        return done.pop().result() if done else None

    def give_up_before(self, lineage: int) -> None:
        """End the evaluations of older lineages, whose weights no server has any more."""
        for version, evaluation in self._by_version.items():
            if version.lineage < lineage and not evaluation.result.done():
                message = f"lineage {lineage} has begun: {version} is not evaluated"
                evaluation.result.set_exception(Stale(message))

    def answer(self, frame: Outcome) -> None:
        """Take the answer to one of its tickets."""
        for evaluation in self._by_version.values():
            if frame["ticket"] in evaluation.tickets:
                evaluation.answer(frame)

    def lost(self, tickets: list[int]) -> None:
        """Ask again for the tickets of a worker that died."""
        for evaluation in self._by_version.values():
            evaluation.lost(tickets)


class Evaluation:
    """One pass for one version; see Evaluations."""

    def __init__(
        self,
        version: WeightVersion,
        prompts: Prompts,
        run: Callable[[RunPrompt], None],
        limit: int,
        retries: int,
        tickets: itertools.count,
    ) -> None:
        self.version = version
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

    def lost(self, tickets: list[int]) -> None:
        """Their worker died."""
        for ticket in tickets:
            if ticket in self._asked:
                self._waiting.append(self._asked.pop(ticket))
        self._pump()

    def answer(self, frame: Outcome) -> None:
        position = self._asked.pop(frame["ticket"])
        if frame["op"] == "scored":
            self._scored(position, frame)
        elif frame["op"] == "failed" and self._failures[position] < self._retries:
            self._failures[position] += 1
            self._waiting.append(position)
        else:
            self._left_out[frame["reason"] if frame["op"] == "rejected" else "exception"] += 1
        self._pump()

    def _scored(self, position: int, frame: PromptScored) -> None:
        versions = [WeightVersion.parse(label) for label in frame["versions"]]
        newer = [version for version in versions if version > self.version]
        if newer and not self.result.done():
            message = f"the servers have {newer[-1]} by now: {self.version} can't be evaluated any more"
            self.result.set_exception(Stale(message))
        elif versions in ([], [self.version]):
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
            self._run(
                RunPrompt(
                    op="run",
                    ticket=ticket,
                    index=position,
                    epoch=0,
                    row=prompt.row,
                    columns=prompt.columns,
                    input_ids=prompt.input_ids,
                    version=str(self.version),
                    evaluate=True,
                )
            )
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
        self.result.set_result(
            EvalResult(str(self.version), len(rewards), sum(rewards) / len(rewards), stats)
        )
