"""Evaluations: each held-out prompt once, with the weights of one version; outside the batch log."""

import asyncio
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import comb
from statistics import fmean

from hpc_rl.config.options.operations import EvaluatorConfig
from hpc_rl.core.errors import Stale
from hpc_rl.core.types import EvalResult, WeightVersion, decode
from hpc_rl.datasets.encode import Prompts
from hpc_rl.rollout.executor import Executor, make_run_frame
from hpc_rl.rollout.pipes import Outcome, PromptScored
from hpc_rl.rollout.user_errors import Faults
from hpc_rl.stats.tracker import compute_means

logger = logging.getLogger(__name__)
EVALUATIONS_KEPT = 4


def measure_rewards(rewards: Sequence[Sequence[float]], pass_reward: float) -> dict[str, float]:
    """Return the mean `reward` of prompts with n completions each and, if n > 1, `pass@k`.

    pass@k is the probability that at least one of k completions has `pass_reward` or more, for k = 1, 2, 4, …
    and n, by the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374, equation 1). If prompts differ in
    n, the largest k is the smallest n.
    """
    measures = {"reward": fmean(fmean(group) for group in rewards)}
    least = min(map(len, rewards))
    passed = [(len(group), sum(reward >= pass_reward for reward in group)) for group in rewards]
    powers = {2**i for i in range(least.bit_length())}
    for k in sorted(powers | {least}) if least > 1 else ():
        measures[f"pass@{k}"] = fmean(1 - comb(n - c, k) / comb(n, k) for n, c in passed)
    return measures


class Evaluations:
    """The newest few evaluations of an incarnation; their tickets are negative.

    In each, `limit` prompts run at once; a failed one is repeated up to `retries` times, then skipped.
    """

    def __init__(
        self, prompts: Prompts | None, limit: int, retries: int, executor: Executor, faults: Faults
    ) -> None:
        self.prompts = prompts
        self.options = EvaluatorConfig()  # pass_reward, and the column that names sets
        self._limit, self._retries, self._executor, self._faults = limit, retries, executor, faults
        self._tasks: dict[WeightVersion, asyncio.Task[EvalResult]] = {}
        self._tickets = itertools.count(-1, -1)
        # outcome of a ticket's prompt; None if its worker died
        self._outcomes: dict[int, asyncio.Future[Outcome | None]] = {}

    def __contains__(self, version: object) -> bool:
        return version in self._tasks

    @property
    def running(self) -> list[str]:
        """Unfinished versions."""
        return [str(version) for version, task in self._tasks.items() if not task.done()]

    def begin(self, version: WeightVersion) -> None:
        """Begin the evaluation of these weights, if new; the oldest one may be cancelled for it."""
        if version in self._tasks:
            return
        self._tasks[version] = asyncio.create_task(self._evaluate(version), name=f"evaluation-{version}")
        for old in list(self._tasks)[:-EVALUATIONS_KEPT]:
            self._tasks.pop(old).cancel()

    async def wait_for_result(self, version: WeightVersion, wait_s: float | None) -> EvalResult | None:
        """Return the result of an evaluation; None while it takes longer. Raises Stale, RoleFailed."""
        task = self._tasks[version]
        await asyncio.wait({task}, timeout=wait_s)
        if task.cancelled():
            raise Stale(f"the evaluation of weights {version} was dropped, because newer ones wait")
        return task.result() if task.done() else None

    def cancel_before(self, lineage: int) -> None:
        """End the evaluations of older lineages: no server has their weights any more."""
        for version, task in self._tasks.items():
            if version.lineage < lineage:
                task.cancel()

    def answer(self, ticket: int, outcome: Outcome | None) -> None:
        """Take the answer to a ticket; None means that its worker died, and the prompt runs again."""
        future = self._outcomes.get(ticket)
        if future is not None and not future.done():
            future.set_result(outcome)

    async def _evaluate(self, version: WeightVersion) -> EvalResult:
        assert self.prompts is not None
        scored: dict[int, PromptScored] = {}  # by the position in the file
        counts: Counter[str] = Counter(left_out=0, asked_again=0)
        positions = iter(range(len(self.prompts)))
        score = partial(self._score, version, positions, scored, counts)
        workers = [asyncio.create_task(score()) for _ in range(self._limit)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        if not scored:
            raise self._faults.make_unscored_error(counts["left_out"])
        counts["num_tokens"] = sum(outcome["num_tokens"] for outcome in scored.values())
        stats = compute_means(outcome["stats"] for outcome in scored.values())
        stats |= {name: float(count) for name, count in counts.items()}
        measured = measure_rewards(
            [outcome["rewards"] for outcome in scored.values()], self.options.pass_reward
        )
        reward = measured.pop("reward")
        stats |= measured | self._measure_by_set(scored)
        groups = [decode(outcome["group"]) for _, outcome in sorted(scored.items()) if outcome["group"]]
        return EvalResult(str(version), len(scored), reward, stats, groups)

    def _measure_by_set(self, scored: Mapping[int, PromptScored]) -> dict[str, float]:
        """Return `<set>/<measure>` for each value of the column that names sets."""
        assert self.prompts is not None
        column, sets = self.options.sets_column, defaultdict[str, list[list[float]]](list)
        if column is None:
            return {}
        for position, outcome in scored.items():
            name = self.prompts.columns(position).get(column, "")
            sets[str(name)].append(outcome["rewards"])
        return {
            f"{name}/{measure}": value
            for name, rewards in sorted(sets.items())
            for measure, value in measure_rewards(rewards, self.options.pass_reward).items()
        }

    async def _score(
        self,
        version: WeightVersion,
        positions: Iterator[int],
        scored: dict[int, PromptScored],
        counts: Counter[str],
    ) -> None:
        """Score prompts, one after the other, until `positions` has no more. Raises Stale."""
        for position in positions:
            failures = 0
            while True:
                outcome = await self._run(version, position)
                if outcome is None:
                    continue
                if outcome["op"] == "failed" and failures < self._retries:
                    failures += 1
                    continue
                if outcome["op"] != "scored":
                    counts["left_out"] += 1
                    break
                made_by = [WeightVersion.parse(label) for label in outcome["versions"]]
                if newer := [one for one in made_by if one > version]:
                    raise Stale(
                        f"weights {version} can't be evaluated any more, because the servers have {newer[-1]}"
                    )
                if made_by in ([], [version]):
                    scored[position] = outcome
                    break
                counts["asked_again"] += 1

    async def _run(self, version: WeightVersion, position: int) -> Outcome | None:
        """Return the outcome of the prompt at this position of the file; None if its worker died."""
        assert self.prompts is not None
        ticket = next(self._tickets)
        outcome = self._outcomes[ticket] = asyncio.get_running_loop().create_future()
        prompt = self.prompts.in_file_order(position)
        self._executor.run(make_run_frame(ticket, position, prompt, version, evaluate=True))
        try:
            return await outcome
        except asyncio.CancelledError:
            self._executor.cancel(ticket)
            raise
        finally:
            del self._outcomes[ticket]
