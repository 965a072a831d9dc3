"""Searches the options of a trial for a higher throughput, by simulation.

The search changes one option after the other, keeps a change that helps, and so goes through all of them
twice: the best split depends on the concurrency. Each gain is for one change alone, with the others as
recommended. Costs are uncertain, measured ones by MEASURED_SPREAD and defaults by DEFAULT_SPREAD; the gain is
computed for several draws of all costs, with the same draws before and after the change.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from hpc_rl.config.options.operations import FrequencyConfig
from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.result import Result, run
from hpc_rl.simulate.setup import Faults, Setup

MEASURED_SPREAD, DEFAULT_SPREAD = 0.05, 0.3  # standard deviations of the logarithms
NUM_DRAWS = 5
NUM_STEPS = 40  # of a simulation without failures
MAX_STEPS = 2000  # of one with failures
MAX_SEQUENCES = 40_000
MIN_GAIN = 0.01  # a smaller one is not recommended
ROUNDS = 2
CHANGES_LEARNING = ("train_dataset.batch_size", "rollout.max_head_offpolicyness", "rollout.staleness_bound")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value of an option."""

    option: str
    value: Any
    setup: Setup = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommended value with the gain of this change alone, as a share of the throughput."""

    option: str
    now: Any
    value: Any
    gain: float  # median over the draws of the costs
    low: float
    high: float
    reason: str = ""

    @property
    def changes_learning(self) -> bool:
        """Whether the change has an effect besides time."""
        return self.option in CHANGES_LEARNING

    def to_json(self) -> dict[str, Any]:
        names = ("option", "now", "value", "gain", "low", "high", "reason", "changes_learning")
        return {name: getattr(self, name) for name in names}


def draw_costs(costs: Costs, seed: int) -> Costs:
    """Return costs as they may really be; seed 0 gives the expected ones."""
    if seed == 0:
        return costs
    drawn = random.Random(seed)
    values: dict[str, Any] = {}
    for name in sorted(vars(costs)):
        value = getattr(costs, name)
        if name.endswith(("_s", "bytes", "_share")) and isinstance(value, float):
            spread = MEASURED_SPREAD if name in costs.origins else DEFAULT_SPREAD
            values[name] = value * math.exp(drawn.gauss(0.0, spread))
    return replace(costs, **values)


def predict(setup: Setup, costs: Costs, faults: Faults, num_draws: int) -> list[Result]:
    """Return simulations with other costs and other luck; the first has the expected costs."""
    return [run(setup, draw_costs(costs, seed), faults, seed) for seed in range(max(1, num_draws))]


def compute_rate(setup: Setup, costs: Costs, seed: int) -> float:
    """Return tokens trained on per second, without start-up and failures."""
    short = replace(
        setup, total_steps=min(NUM_STEPS, setup.total_steps), max_sequences=MAX_SEQUENCES, time_limit_s=None
    )
    result = run(short, draw_costs(costs, seed), seed=seed)
    return result.steady_tokens_per_s


class Search:
    """Rates of setups by draw; each is simulated once."""

    def __init__(self, costs: Costs, num_draws: int = NUM_DRAWS) -> None:
        self.costs, self.num_draws = costs, num_draws
        self._known: dict[tuple[str, int], float] = {}

    def rate(self, setup: Setup, seed: int) -> float:
        key = repr(setup), seed
        if key not in self._known:
            self._known[key] = compute_rate(setup, self.costs, seed)
        return self._known[key]

    def compare(self, before: Setup, after: Setup) -> list[float]:
        """Return the gains of a change, sorted, one for each draw."""
        draws = range(self.num_draws)
        return sorted(self.rate(after, seed) / self.rate(before, seed) - 1 for seed in draws)

    def find_best(self, now: Setup, changes: Iterable[Change]) -> Change | None:
        """Return the change with the highest expected rate, if it gains MIN_GAIN."""
        best, found = self.rate(now, 0) * (1 + MIN_GAIN), None
        for change in changes:
            if (rate := self.rate(change.setup, 0)) > best:
                best, found = rate, change
        return found


def list_concurrencies(setup: Setup) -> Iterator[Change]:
    rules = setup.rules
    for factor in (0.5, 0.75, 1.5, 2, 3, 4, 6, 8):
        value = max(1, round(rules.max_concurrent * factor))
        changed = replace(setup, rules=replace(rules, max_concurrent=value))
        yield Change(option="rollout.max_concurrent_rollouts", value=value, setup=changed)


def list_batch_sizes(setup: Setup) -> Iterator[Change]:
    for factor in (0.5, 2):
        value = max(1, round(setup.rules.batch_size * factor))
        changed = replace(setup, rules=replace(setup.rules, batch_size=value))
        yield Change(option="train_dataset.batch_size", value=value, setup=changed)


def list_staleness(setup: Setup) -> Iterator[Change]:
    for value in (0, 1, 2, 4, 8):
        changed = replace(setup, rules=replace(setup.rules, eta=value))
        yield Change(option="rollout.max_head_offpolicyness", value=value, setup=changed)


def list_bounds(setup: Setup) -> Iterator[Change]:
    for value in ("soft", "hard", "drop"):
        changed = replace(setup, rules=replace(setup.rules, bound=value))
        yield Change(option="rollout.staleness_bound", value=value, setup=changed)


def list_update_modes(setup: Setup) -> Iterator[Change]:
    for value in ("disk", "xccl"):
        yield Change(option="actor.weight_update_mode", value=value, setup=replace(setup, update_mode=value))


def tune(
    setup: Setup,
    allocation: str,
    costs: Costs,
    faults: Faults,
    list_splits: Callable[[], Iterable[tuple[str, Setup]]] = tuple,
    num_draws: int = NUM_DRAWS,
    with_learning: bool = True,
) -> list[Advice]:
    """Return the recommended changes, the largest gain first.

    `list_splits` returns planned splits with their setups; only their units are used. Without `with_learning`
    only options that change nothing but time are searched.
    """
    search = Search(costs, num_draws)
    splits = list(list_splits())

    def list_planned_splits(now: Setup) -> Iterator[Change]:
        for text, one in splits:
            yield Change(option="allocation_mode", value=text, setup=replace(now, units=one.units))

    lists: list[Callable[[Setup], Iterator[Change]]] = [list_planned_splits, list_concurrencies]
    lists += [] if costs.publish_write_s else [list_update_modes]
    lists += [list_staleness, list_bounds, list_batch_sizes] if with_learning else []
    best, chosen = setup, dict[str, Any]()
    for _ in range(ROUNDS):
        for list_changes in lists:
            if (change := search.find_best(best, list_changes(best))) is not None:
                best, chosen[change.option] = change.setup, change.value
    found = []
    for option, value in chosen.items():
        without, now = revert(best, setup, option, allocation)
        if value == now:
            continue
        gains = search.compare(without, best)
        advice = Advice(option=option, now=now, value=value, gain=median(gains), low=gains[0], high=gains[-1])
        if advice.gain >= MIN_GAIN:
            found.append(advice)
    if interval := tune_checkpoints(best, costs, faults, num_draws):
        found.append(interval)
    return sorted(found, key=lambda one: (one.changes_learning, -one.gain))


def revert(best: Setup, setup: Setup, option: str, allocation: str) -> tuple[Setup, Any]:
    """Return `best` with one option as it was, and its old value."""
    old = setup.rules
    match option:
        case "allocation_mode":
            return replace(best, units=setup.units), allocation
        case "rollout.max_concurrent_rollouts":
            return replace(
                best, rules=replace(best.rules, max_concurrent=old.max_concurrent)
            ), old.max_concurrent
        case "rollout.max_head_offpolicyness":
            return replace(best, rules=replace(best.rules, eta=old.eta)), old.eta
        case "rollout.staleness_bound":
            return replace(best, rules=replace(best.rules, bound=old.bound)), old.bound
        case "train_dataset.batch_size":
            return replace(best, rules=replace(best.rules, batch_size=old.batch_size)), old.batch_size
        case _:
            return replace(best, update_mode=setup.update_mode), setup.update_mode


# -- the checkpoint interval


def compute_young_daly(save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the interval between checkpoints by Daly's first-order formula, in seconds of work.

    sqrt(2 * save * (mtbf + restart)) - save; J. T. Daly, "A higher order estimate of the optimum checkpoint
    interval", 2006. `mtbf_s` is of everything whose failure loses steps.
    """
    return max(save_s, math.sqrt(2 * save_s * (mtbf_s + restart_s)) - save_s)


def tune_checkpoints(setup: Setup, costs: Costs, faults: Faults, num_draws: int) -> Advice | None:
    """Return a better `recover.freq_steps` under failures of nodes, if there is one."""
    if setup.recover_mode == "disabled" or math.isinf(faults.mtbf_s):
        return None
    trainer_nodes = len(set(setup.trainer.nodes))
    mtbf_s = faults.mtbf_s / trainer_nodes
    blocked_s = costs.save_copy_s if setup.async_save else costs.save_s
    restart_s = costs.start_trainer_s + costs.load_s + faults.requeue_s + faults.notice_s
    probe = run(_shorten(setup, NUM_STEPS), costs)
    if not probe.step_s:
        return None
    interval_s = compute_young_daly(blocked_s, restart_s, mtbf_s)
    most = min(setup.total_steps, MAX_STEPS)
    first = min(max(1, round(interval_s / probe.step_s)), most)
    # long enough for some failures of the trainer, as far as the trial has steps
    steps = max(first, min(most, math.ceil(10 * mtbf_s / probe.step_s)))
    now = setup.save.freq_steps

    def spend(every: int | None, seed: int) -> float:
        save = setup.save if every is None else FrequencyConfig(freq_steps=every)
        changed = replace(_shorten(setup, steps), save=save, total_steps=steps)
        result = run(changed, draw_costs(costs, seed), faults, seed)
        return result.makespan_s * steps / max(1, result.steps)

    draws = range(num_draws)
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    candidates = sorted({min(max(1, round(first * factor)), most) for factor in factors})
    spent = {every: [spend(every, seed) for seed in draws] for every in candidates}
    best = min(candidates, key=lambda every: sum(spent[every]))
    before = [spend(None, seed) for seed in draws]
    gains = sorted(old / new - 1 for old, new in zip(before, spent[best], strict=True))
    if best == now or median(gains) < MIN_GAIN:
        return None
    reason = (
        f"the formula of Young and Daly gives a save every {interval_s:.0f} s ({first} steps); "
        "corrected by simulation"
    )
    shown = now if now is not None else f"every {setup.save.freq_secs} s"
    return Advice(
        option="recover.freq_steps", now=shown, value=best, gain=median(gains), low=gains[0], high=gains[-1],
        reason=reason,
    )  # fmt: skip


def _shorten(setup: Setup, steps: int) -> Setup:
    return replace(setup, total_steps=min(steps, setup.total_steps), max_sequences=MAX_SEQUENCES)
