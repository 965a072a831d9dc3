"""`hpc-rl list`: the trials of the index, newest first, from files alone."""

from __future__ import annotations

import time
from typing import Any

from hpc_rl.cli.options import add_json, new_parser, print_json
from hpc_rl.launch import index
from hpc_rl.launch.story import tell
from hpc_rl.launch.words import span


def run(argv: list[str]) -> int:
    parser = new_parser("list", "The trials that this account submitted, newest first, as their files tell.")
    parser.add_argument("--prune", action="store_true", help="forget the trials whose directory is gone")
    add_json(parser, "the list")
    args = parser.parse_args(argv)
    pruned = index.prune() if args.prune else []
    rows = [_row(entry) for entry in index.entries()]
    if args.json:
        print_json(rows)
        return 0
    for entry in pruned:
        print(f"forgotten: {entry.trial}  {entry.trial.dir}")
    print("\n".join(_table(rows)) if rows else "no trials yet: `hpc-rl quickstart`, or `hpc-rl submit --config FILE`")
    if any(row["state"] == "gone" for row in rows):
        print("`hpc-rl list --prune` forgets the trials whose directory is gone.")
    return 0


def _row(entry: index.Entry) -> dict[str, Any]:
    row = {"trial": str(entry.trial), "dir": str(entry.trial.dir), "time": entry.time, "step": None, "total_steps": None}
    if entry.gone:
        return row | {"state": "gone"}
    story = tell(entry.trial)
    return row | {"state": story.state, "step": story.step, "total_steps": story.total_steps}


def _table(rows: list[dict[str, Any]]) -> list[str]:
    now = time.time()
    cells = [("trial", "state", "step", "age", "directory")]
    for row in rows:
        step = "" if row["step"] is None else f"{row['step']}" + (f"/{row['total_steps']}" if row["total_steps"] else "")
        cells.append((row["trial"], row["state"], step, span(now - row["time"]) if row["time"] else "", row["dir"]))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]) for line in cells]
