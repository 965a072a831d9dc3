"""`hpc-rl du [trial]…`: disk use of trials, by kind."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from hpc_rl.cli.list import NO_TRIALS
from hpc_rl.cli.options import CommandParser, Namespace, align_columns, print_result
from hpc_rl.core.errors import ExitCode
from hpc_rl.core.trial import Trial
from hpc_rl.status.formatting import flatten_line, format_size
from hpc_rl.status.weight_history import WeightHistory, load_weight_history
from hpc_rl.trials import trial_index
from hpc_rl.trials.removal import HOLDS, REST, measure_contents

KINDS = [*dict.fromkeys(HOLDS.values()), REST]


def make_parser() -> CommandParser:
    made = CommandParser(
        "Show the disk use of trials, the largest first: checkpoints, weights, logs, exports.",
        "`hpc-rl remove` removes trials; `recover.keep` limits their checkpoints. A trial that is done has\n"
        "removed the weights that it published, except a history up to `weights.history_gb`.",
    )
    made.add_trials("every trial that this account submitted")
    made.add_json("the sizes, in bytes,")
    return made


def main(args: Namespace) -> int:
    trials = trial_index.resolve_all(args.trial)
    if not args.trial:
        trials = [entry.trial for entry in trial_index.list_entries() if not entry.gone]
    rows = measure_sizes(trials)
    print_result(args.json, rows, format_table(rows) if rows else [NO_TRIALS])
    return ExitCode.DONE


def measure_sizes(trials: Iterable[Trial], without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return what each trial holds, in bytes, the largest first; `without` are kinds that do not count."""
    rows: list[dict[str, Any]] = []
    for trial in trials:
        kinds = {one.name: 0 if one.name in without else one.size_bytes for one in measure_contents(trial)}
        row: dict[str, Any] = {"trial": str(trial), "dir": str(trial.dir), "bytes": sum(kinds.values())}
        history = load_weight_history(trial)
        rows.append(row | {"by_kind": kinds, "weight_history": asdict(history) if history else None})
    return sorted(rows, key=lambda row: -row["bytes"])


def format_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of `measure_sizes` as lines for people, with their sum below several."""
    total = {kind: sum(row["by_kind"][kind] for row in rows) for kind in KINDS}
    sums: dict[str, Any] = {"trial": "all", "bytes": sum(total.values()), "by_kind": total}
    cells = [["total", *KINDS, "trial"]]
    for one in [*rows, sums] if len(rows) > 1 else rows:
        kinds = [format_size(one["by_kind"][kind]) if one["by_kind"][kind] else "" for kind in KINDS]
        cells.append([format_size(one["bytes"]), *kinds, one["trial"]])
    lines = align_columns(cells)
    for one in rows:
        if history := one["weight_history"]:
            lines.append(f"published weights of {one['trial']}: {WeightHistory(**history)}")
    return list(map(flatten_line, lines))
