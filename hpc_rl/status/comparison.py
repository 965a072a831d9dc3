"""One sentence that compares trials: which is better, by how much, at which step, over how many seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, stdev

from hpc_rl.status.formatting import format_number
from hpc_rl.status.trial_report import EMPTY, IDENTITY, TrialReport, format_option

SEED = "seed"
NUM_SMOOTHED = 10  # steps of a mean of training
LESS_IS_BETTER = ("loss",)


@dataclass(frozen=True)
class Variant:
    """Trials that differ in their seed alone, and their measure at one step."""

    name: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def variance_of_mean(self) -> float:
        return stdev(self.values) ** 2 / len(self.values) if len(self.values) > 1 else 0.0


def make_headline(reports: Sequence[TrialReport]) -> str:
    """Return the comparison of trials, or '' for fewer than two that differ in more than their seed.

    The measure is the main one on held-out data, at the last step at which all trials were evaluated. Without
    such a step it is the mean reward or loss of training steps, until the last step that all have made.
    """
    groups = group_by_seed(reports)
    if len(groups) < 2:
        return ""
    for measure, curves in _list_measures(reports):
        shared = set.intersection(*(set(curve) for curve in curves))
        if shared:
            step = max(shared)
            by_trial = {report.name: curve[step] for report, curve in zip(reports, curves, strict=True)}
            return f"{measure}: {_compare(groups, by_trial, measure)} at step {step}{_count_seeds(groups)}"
    return ""


def group_by_seed(reports: Sequence[TrialReport]) -> dict[str, list[TrialReport]]:
    """Return the trials by what they share, in their order: trials of one group differ in their seed alone.

    A group is named by the common beginning of its trials' names.
    """
    found: dict[tuple[tuple[str, str], ...], list[TrialReport]] = {}
    for report in reports:
        own = [
            (name, value)
            for name in report.config
            if (value := format_option(report.config, name)) not in EMPTY
            and name != SEED
            and name.rpartition(".")[2] not in IDENTITY
        ]
        found.setdefault(tuple(sorted(own)), []).append(report)
    names = [_name_group(members) for members in found.values()]
    if len(set(names)) < len(names):
        names = [members[0].name for members in found.values()]
    return dict(zip(names, found.values(), strict=True))


def _name_group(members: Sequence[TrialReport]) -> str:
    if len(members) == 1:
        return members[0].name
    columns = zip(*(report.name for report in members), strict=False)
    start = "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, columns))
    return start.removesuffix("seed").rstrip("-_./= ") or members[0].name


def _list_measures(reports: Sequence[TrialReport]) -> list[tuple[str, list[dict[int, float]]]]:
    """Return the measures that all trials have, the most important first: name, and values by step."""
    found = []
    for measure in reports[0].history.evaluated:
        curves = [
            {step: value for step, value in report.history.evaluated.get(measure, []) if value is not None}
            for report in reports
        ]
        found.append((f"held-out {measure}", curves))
    for metric in ("reward", "loss"):
        curves = []
        for report in reports:
            curve = report.history.curve(metric)
            ends = range(len(curve))
            means = [fmean(v for _, v in curve[max(0, end + 1 - NUM_SMOOTHED) : end + 1]) for end in ends]
            curves.append({step: mean for (step, _), mean in zip(curve, means, strict=True)})
        found.append((f"mean {metric} of {NUM_SMOOTHED} steps", curves))
    return found


def _compare(groups: Mapping[str, Sequence[TrialReport]], by_trial: Mapping[str, float], measure: str) -> str:
    """Return how far the best group is from each other one, as `second is +0.06 over first`."""
    variants = [
        Variant(name, tuple(by_trial[report.name] for report in members)) for name, members in groups.items()
    ]
    is_loss = any(word in measure for word in LESS_IS_BETTER)
    best = min(variants, key=lambda one: one.mean) if is_loss else max(variants, key=lambda one: one.mean)
    parts = []
    for other in (one for one in variants if one is not best):
        error = (best.variance_of_mean + other.variance_of_mean) ** 0.5
        spread = f" (standard error {format_number(error)})" if error else ""
        sign = "-" if best.mean < other.mean else "+"
        difference = format_number(abs(best.mean - other.mean))
        parts.append(f"{sign}{difference} {'under' if sign == '-' else 'over'} {other.name}{spread}")
    return f"{best.name} is {', '.join(parts)}"


def _count_seeds(groups: Mapping[str, Sequence[TrialReport]]) -> str:
    """Return how many trials each group has, or '' where each has one."""
    counts = [len(members) for members in groups.values()]
    if max(counts) == 1:
        return ""
    if len(set(counts)) == 1:
        return f", {counts[0]} seeds"
    return f", {', '.join(map(str, counts))} seeds"
