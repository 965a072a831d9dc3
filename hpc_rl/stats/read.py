"""Reads the metrics of a trial as one history, from the files of all its attempts and incarnations.

Every trainer incarnation writes a separate file. `lineages/<NNNN>.json` records from which step an
incarnation continued; later steps of earlier incarnations are dropped. So each step appears once, as it led
to the final weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from sys import float_info
from typing import Any, TypeGuard

from hpc_rl.core.errors import TrialStateError
from hpc_rl.core.files import JsonLines, Row
from hpc_rl.core.records import LineageRecord, load_lineages
from hpc_rl.core.trial import Trial

HELD_OUT = "held-out"  # name of the curve of evaluations
MEASURES = (
    "accuracy_delta",
    "reward",
    "accuracy",
    "loss",
    "token_accuracy",
)  # of evaluations, the most important first
NOT_CURVES = ("step", "time", "lineage", "total_steps", "save_failed", "callback_errors")

Curve = list[tuple[int, float]]  # a value by step


def load_known_lineages(trial: Trial) -> list[LineageRecord]:
    """Return the lineages of a trial, oldest first; [] if the folder can't be read."""
    try:
        return load_lineages(trial)
    except (OSError, TrialStateError):
        return []


@dataclass
class History:
    """The logged metrics. Both lists have each step once, sorted."""

    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def held_out(self) -> tuple[str, list[tuple[int, float | None]]]:
        """The main measure on held-out data, such as `reward` or `loss`, and its values by step."""
        return next(iter(self.evaluated.items()), ("loss", []))

    @property
    def evaluated(self) -> dict[str, list[tuple[int, float | None]]]:
        """The values of each measure on held-out data by step, first the measure for comparing trials."""
        found: dict[str, list[tuple[int, float | None]]] = {}
        for row in (*self.evaluations, *self.steps):
            for name in (key.removeprefix("eval_") for key in row if key.startswith("eval_")):
                if name in MEASURES or name.endswith("/reward") or "pass@" in name:
                    found.setdefault(name, []).append((row["step"], row[f"eval_{name}"]))
        names = [
            *(name for name in MEASURES if name in found),
            *(name for name in found if name not in MEASURES),
        ]
        return {name.replace("_", " ") if name in MEASURES else name: found[name] for name in names}

    @property
    def held_out_rows(self) -> dict[int, tuple[int, int]]:
        """The numbers of held-out rows that were scored and left out, by step."""
        counted = {}
        for row in self.evaluations:
            scored, left_out = row.get("eval_num_prompts"), row.get("eval_left_out")
            if is_number(scored) and is_number(left_out):
                counted[row["step"]] = (int(scored), int(left_out))
        return counted

    def curve(self, metric: str) -> Curve:
        """Return the values of a metric by step; `held-out` is the main measure of evaluations."""
        pairs: Sequence[tuple[int, Any]] = self.held_out[1]
        if metric != HELD_OUT:
            rows = (*self.steps, *self.evaluations)
            pairs = [(row["step"], row.get(metric)) for row in rows]
        return [(step, float(value)) for step, value in pairs if is_number(value)]

    def join(self) -> list[Row]:
        """Return one row per step, with its evaluation; an evaluation before the first step is a row."""
        rows: dict[int, Row] = {row["step"]: dict(row) for row in self.steps}
        for row in self.evaluations:
            known = rows.setdefault(row["step"], {})
            rows[row["step"]] = {**row, **known}
        return [rows[step] for step in sorted(rows)]

    def metrics(self) -> list[str]:
        """Return the names of all curves, `held-out` first."""
        rows = (*self.steps, *self.evaluations)
        names = {name: None for row in rows for name, value in row.items() if is_number(value)}
        found = [name for name in names if name not in NOT_CURVES]
        return [HELD_OUT, *found] if self.held_out[1] else found


def is_held_out(metric: str) -> bool:
    """Return whether a curve is of evaluations, not of steps."""
    return metric == HELD_OUT or metric.startswith("eval_")


def is_lower_better(metric: str, history: History) -> bool:
    """Return whether a smaller value of a metric is better: of losses, and of step times."""
    name = history.held_out[0] if metric == HELD_OUT else metric
    return "loss" in name or name.endswith("_s")


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value from a file is a finite number in the range of a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def is_evaluation(row: Row) -> bool:
    """Return whether a row is an evaluation. SFT has no such rows: `eval_loss` is in the step's row."""
    return "eval_reward" in row or "eval_version" in row


def merge(parts: list[tuple[int, list[Row]]]) -> History:
    """Join `(from_step, rows)` of successive lineages; each replaces earlier rows after its from_step.

    For example, lineage 0 made steps 1 to 17, and lineage 1 continued from step 12 and made step 13. The
    result is steps 1 to 12 of lineage 0 and step 13 of lineage 1.
    """
    steps: dict[int, Row] = {}
    evaluations: dict[int, Row] = {}
    for from_step, rows in parts:
        steps = {step: row for step, row in steps.items() if step <= from_step}
        evaluations = {step: row for step, row in evaluations.items() if step <= from_step}
        for row in rows:
            step = row.get("step")
            if isinstance(step, int) and not isinstance(step, bool):
                (evaluations if is_evaluation(row) else steps)[step] = row
    return History(
        [steps[step] for step in sorted(steps)], [evaluations[step] for step in sorted(evaluations)]
    )


class MetricsReader:
    """The merged metrics of a trial, read incrementally, from the files `<kind>.<incarnation>.jsonl`."""

    def __init__(self, trial: Trial, kind: str = "metrics") -> None:
        self.trial, self.kind = trial, kind
        self._files: dict[Path, JsonLines] = {}

    def poll(self) -> History:
        known = {(line.attempt, line.incarnation): line for line in load_known_lineages(self.trial)}
        parts: list[tuple[tuple[int, float], int, list[Row]]] = []
        for path in self.trial.attempts.glob(f"*/{self.kind}.*.jsonl"):
            incarnation = path.name.split(".")[1]
            file = self._files.setdefault(path, JsonLines(path))
            file.poll()
            rows = file.rows
            line = known.pop((path.parent.name, int(incarnation)), None) if incarnation.isdecimal() else None
            if line is not None:
                parts.append(((line.lineage, 0.0), line.from_step, rows))
            elif rows:
                parts.append(_place_without_record(rows))
        parts.extend(((line.lineage, 0.0), line.from_step, []) for line in known.values())
        parts.sort(key=lambda part: part[0])
        return merge([(from_step, rows) for _, from_step, rows in parts])

    def last_steps(self) -> dict[str, int]:
        """Return the newest step that each attempt logged, as of the last poll, including dropped steps."""
        reached: dict[str, int] = {}
        for path, file in self._files.items():
            if steps := _list_training_steps(file.rows):
                reached[path.parent.name] = max(reached.get(path.parent.name, 0), *steps)
        return reached

    def last_steps_of_starts(self) -> dict[tuple[str, int], int]:
        """Return the newest step that each incarnation of each attempt logged, as of the last poll."""
        return {
            (path.parent.name, _parse_incarnation(path)): max(steps)
            for path, file in self._files.items()
            if (steps := _list_training_steps(file.rows))
        }


def _parse_incarnation(path: Path) -> int:
    """Return the incarnation in the name of a file, or -1."""
    number = path.name.split(".")[1]
    return int(number) if number.isdecimal() else -1


def _place_without_record(rows: list[Row]) -> tuple[tuple[int, float], int, list[Row]]:
    """Return the sort key, from_step and rows of a file without a lineage record, derived from its rows."""
    number = next((row["lineage"] for row in rows if isinstance(row.get("lineage"), int)), 0)
    when = next((row["time"] for row in rows if isinstance(row.get("time"), (int, float))), 0.0)
    return (number, float(when)), min(_list_training_steps(rows), default=1) - 1, rows


def _list_training_steps(rows: list[Row]) -> list[int]:
    return [row["step"] for row in rows if isinstance(row.get("step"), int) and not is_evaluation(row)]


def load_history(trial: Trial) -> History:
    return MetricsReader(trial).poll()
