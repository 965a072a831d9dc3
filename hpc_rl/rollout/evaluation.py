"""Evaluations: each held-out prompt once, with the weights of one version; outside the batch log."""

import asyncio
import itertools
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb
from pathlib import Path
from statistics import fmean
from typing import cast

from hpc_rl.config.options.operations import EvaluatorConfig
from hpc_rl.core.errors import Stale
from hpc_rl.core.types import EvalResult, WeightVersion, decode
from hpc_rl.datasets.encode import Prompts
from hpc_rl.rollout.evaluation_log import EvaluationLog, Logged, drop_logs
from hpc_rl.rollout.executor import Executor, make_run_frame
from hpc_rl.rollout.pipes import NoGroup, Outcome, PromptScored
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


Key = tuple[WeightVersion, str]  # version, and name of the set; "" is valid_dataset


@dataclass
class _Running:
    """One evaluation, with the lineage of the trainer that last asked for it."""

    task: asyncio.Task[EvalResult]
    wanted_by: int
    num_scored: int = 0


class Evaluations:
    """The newest few evaluations of an incarnation; their tickets are negative.

    In each, `limit` prompts run at once; a failed one is repeated up to `retries` times, then skipped. `sets`
    are the prompts of each held-out set. Outcomes are logged in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        sets: Mapping[str, Prompts],
        limit: int,
        retries: int,
        executor: Executor,
        faults: Faults,
    ) -> None:
        self.sets = dict(sets)
        self.options = EvaluatorConfig()
        self.identity = ""  # of the options and the code that affect outcomes
        self._folder = folder
        self._limit, self._retries, self._executor, self._faults = limit, retries, executor, faults
        self._known: dict[Key, _Running] = {}
        self._tickets = itertools.count(-1, -1)
        # outcome of a ticket's prompt; None if its worker died
        self._outcomes: dict[int, asyncio.Future[Outcome | None]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._known

    @property
    def running(self) -> list[str]:
        """Unfinished versions."""
        unfinished = (version for (version, _), one in self._known.items() if not one.task.done())
        return [str(version) for version in dict.fromkeys(unfinished)]

    def count_scored(self, key: Key) -> int:
        """Return the number of prompts of an evaluation that have their outcome."""
        return self._known[key].num_scored

    def begin(self, key: Key, lineage: int) -> None:
        """Begin an evaluation for the trainer of a lineage, if new; the oldest may be cancelled."""
        known = self._known.get(key)
        if known is not None and not known.task.cancelled():
            known.wanted_by = max(known.wanted_by, lineage)
            return
        task = asyncio.create_task(self._evaluate(key), name=f"evaluation-{key[0]}")
        self._known[key] = _Running(task, lineage)
        for old in list(self._known)[: -EVALUATIONS_KEPT * max(1, len(self.sets))]:
            self._known.pop(old).task.cancel()

    async def wait_for_result(self, key: Key, wait_s: float | None) -> EvalResult | None:
        """Return the result of an evaluation; None while it takes longer. Raises Stale, RoleFailed."""
        task = self._known[key].task
        await asyncio.wait({task}, timeout=wait_s)
        if task.cancelled():
            raise Stale(f"the evaluation of weights {key[0]} was dropped, because newer ones wait")
        return task.result() if task.done() else None

    def cancel_before(self, lineage: int) -> None:
        """End the evaluations that no trainer from this lineage on has asked for."""
        for one in self._known.values():
            if one.wanted_by < lineage:
                one.task.cancel()

    def retain(self, step: int) -> None:
        """Delete the logs of finished evaluations before `step`. Raises OSError."""
        running = [version.step for (version, _), one in self._known.items() if not one.task.done()]
        drop_logs(self._folder, min([step, *running]))

    def answer(self, ticket: int, outcome: Outcome | None) -> None:
        """Take the answer to a ticket; None means that its worker died, and the prompt runs again."""
        future = self._outcomes.get(ticket)
        if future is not None and not future.done():
            future.set_result(outcome)

    async def _evaluate(self, key: Key) -> EvalResult:
        version, name = key
        prompts = self.sets[name]
        identity = json.dumps([self.identity, prompts.rows.fingerprint])
        log = await asyncio.to_thread(EvaluationLog, self._folder / str(version), name, identity)
        counts: Counter[str] = Counter(asked_again=0)
        positions = iter([position for position in range(len(prompts)) if position not in log.outcomes])
        self._known[key].num_scored = len(log.outcomes)
        score = partial(self._score, key, positions, log, counts)
        workers = [asyncio.create_task(score()) for _ in range(self._limit)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            log.close()
        return self._summarize(key, log.outcomes, counts)

    def _summarize(self, key: Key, outcomes: Mapping[int, Logged], counts: Counter[str]) -> EvalResult:
        """Return the result from the outcomes by position. Raises RoleFailed if no prompt was scored."""
        version, name = key
        scored = {position: one for position, one in sorted(outcomes.items()) if one["op"] == "scored"}
        counts["left_out"] = len(outcomes) - len(scored)
        if not scored:
            raise self._faults.make_unscored_error(counts["left_out"])
        counts["num_tokens"] = sum(outcome["num_tokens"] for outcome in scored.values())
        stats = compute_means(outcome["stats"] for outcome in scored.values())
        stats |= {name: float(count) for name, count in counts.items()}
        one = self.options.sets.get(name)
        pass_reward = self.options.pass_reward if one is None else one.pass_reward
        measured = measure_rewards([outcome["rewards"] for outcome in scored.values()], pass_reward)
        reward = measured.pop("reward")
        stats |= measured | ({} if name else self._measure_by_set(scored))
        groups = [decode(outcome["group"]) for outcome in scored.values() if outcome["group"]]
        return EvalResult(str(version), len(scored), reward, stats, groups)

    def _measure_by_set(self, scored: Mapping[int, PromptScored]) -> dict[str, float]:
        """Return `<set>/<measure>` for each value of the column that names sets."""
        column, sets = self.options.sets_column, defaultdict[str, list[list[float]]](list)
        if column is None:
            return {}
        for position, outcome in scored.items():
            name = self.sets[""].columns(position).get(column, "")
            sets[str(name)].append(outcome["rewards"])
        return {
            f"{name}/{measure}": value
            for name, rewards in sorted(sets.items())
            for measure, value in measure_rewards(rewards, self.options.pass_reward).items()
        }

    async def _score(
        self, key: Key, positions: Iterator[int], log: EvaluationLog, counts: Counter[str]
    ) -> None:
        """Score prompts, one after the other, until `positions` has no more. Raises Stale."""
        for position in positions:
            log.add(position, await self._find_outcome(key, position, counts))
            self._known[key].num_scored += 1

    async def _find_outcome(self, key: Key, position: int, counts: Counter[str]) -> Logged:
        """Run a prompt until it has an outcome by the weights of this version. Raises Stale."""
        version, failures = key[0], 0
        while True:
            outcome = await self._run(key, position)
            if outcome is None:
                continue
            if outcome["op"] == "failed" and failures < self._retries:
                failures += 1
                continue
            if outcome["op"] != "scored":
                return cast(NoGroup, outcome)
            made_by = [WeightVersion.parse(label) for label in outcome["versions"]]
            if made_by in ([], [version]):
                return outcome
            newer = [one for one in made_by if one > version]
            if newer and self.options.blocking:
                raise Stale(
                    f"weights {version} can't be evaluated any more, because the servers have {newer[-1]}"
                )
            counts["asked_again"] += 1

    async def _run(self, key: Key, position: int) -> Outcome | None:
        """Return the outcome of the prompt at this position of the file; None if its worker died."""
        version, name = key
        ticket = next(self._tickets)
        outcome = self._outcomes[ticket] = asyncio.get_running_loop().create_future()
        prompt = self.sets[name].in_file_order(position)
        self._executor.run(
            make_run_frame(ticket, position, prompt, version, evaluate=True, held_out_set=name)
        )
        try:
            return await outcome
        except asyncio.CancelledError:
            self._executor.cancel(ticket)
            raise
        finally:
            del self._outcomes[ticket]
