"""Predictions for people and for programs."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from hpc_rl.core.errors import ExitCode
from hpc_rl.simulate.costs import Costs
from hpc_rl.simulate.prepare import Case
from hpc_rl.simulate.result import ADVICE, Result, explain_result
from hpc_rl.status.formatting import format_duration

MAIN_COSTS = ("decode_s", "train_token_s", "save_s")


def describe(case: Case, results: list[Result]) -> list[tuple[str, str]]:
    """Return the predictions as pairs of name and text; ranges are over the draws."""
    first = results[0]
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in first.staleness.items() if share >= 0.005)
    buckets, held = first.goodput.buckets, first.goodput.allocation_s or 1.0
    use = ", ".join(f"{bucket} {seconds / held:.0%}" for bucket, seconds in buckets.items())
    facts = [
        ("allocation", f"{case.plan.allocation} on {_count(case.plan.n_nodes, 'node')}"),
        ("step", f"{_range(results, 'step_s')} s: {explain_result(first)}"),
        ("throughput", f"{_range(results, 'tokens_per_s')} tokens/s, prompts included"),
        ("staleness", ages or "no batch"),
        ("goodput", f"{first.goodput.share or 0.0:.0%} of the devices' time: {use}"),
        ("makespan", _describe_makespan(results)),
        ("bottleneck", f"{first.bottleneck}: {ADVICE[first.bottleneck]}"),
    ]
    if first.exit_code != ExitCode.DONE:
        facts.append(("ends early", f"after step {first.steps}: {first.reason}"))
    return facts


def _range(results: list[Result], name: str) -> str:
    values = [float(getattr(one, name)) for one in results]
    shown = format_rounded(values[0])
    if len(values) == 1:
        return shown
    return f"{shown} ({format_rounded(min(values))} to {format_rounded(max(values))})"


def format_rounded(value: float) -> str:
    """Return three significant digits: a prediction has no more."""
    return f"{float(f'{value:.3g}'):.12g}"


def _describe_makespan(results: list[Result]) -> str:
    times = [one.makespan_s for one in results]
    first = results[0]
    starts = f"{_count(first.attempts, 'job start')}, {first.lineages} of the trainer"
    failed = f", {_count(first.node_failures, 'node')} failed" if first.node_failures else ""
    span = f" ({format_duration(min(times))} to {format_duration(max(times))})" if len(times) > 1 else ""
    return f"{format_duration(times[0])}{span} for {first.steps} steps, {starts}{failed}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def describe_costs(costs: Costs) -> list[str]:
    """Return which costs are measured, and which are defaults."""
    by_origin: dict[str, list[str]] = {}
    for name, origin in costs.origins.items():
        by_origin.setdefault(origin, []).append(name)
    lines = [f"costs of {origin}: {', '.join(names)}" for origin, names in by_origin.items()]
    if not any(name in costs.origins for name in MAIN_COSTS):
        advice = "measure them in a short trial, and name it by --from"
        return [*lines, f"All other costs are defaults, scaled to the model: {advice}."]
    return [*lines, f"defaults, not measured: {', '.join(costs.list_defaults())}"]


def make_json(case: Case, results: list[Result]) -> dict[str, Any]:
    """Return the predictions for programs; `spread` has the smallest and the largest value of the draws."""
    names = ("step_s", "tokens_per_s", "makespan_s")
    return {
        "allocation": case.plan.allocation,
        "n_nodes": case.plan.n_nodes,
        "predicted": results[0].to_json(),
        "spread": {
            name: [min(getattr(one, name) for one in results), max(getattr(one, name) for one in results)]
            for name in names
        },
        "mean_makespan_s": fmean(one.makespan_s for one in results),
        "costs": costs_to_json(case.costs),
    }


def costs_to_json(costs: Costs) -> dict[str, Any]:
    """Return each cost with its origin; the lengths of completions as their number and mean."""
    values: dict[str, Any] = {
        name: value for name, value in vars(costs).items() if isinstance(value, int | float)
    }
    values["lengths"] = {"number": len(costs.drawn_lengths), "mean": costs.mean_length}
    return {
        name: {"value": value, "origin": costs.origins.get(name, "default")} for name, value in values.items()
    }
