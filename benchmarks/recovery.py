"""From kill -9 of the trainer to its next optimizer step, and where the time goes: the toy on a private Slurm
of four nodes.

    python benchmarks/recovery.py [--kills 7] [--scheduler slurm|local] [--out benchmarks/results/recovery.json]

One trial (`embedded:d2+fsdp:d2`, a generation every 5 steps) whose trainer's rank 0 is killed again and
again. The parts, by the supervisor's events, the log of rank 0 and the files that it leaves: `notice` until
the supervisor records the end, `restart` until the new rank 0 has put itself on record (the pause, srun and
Python), `import` (torch and transformers), `join` of the ranks, `load` (decide, build the model, read the
generation), `publish` to the servers, `step` (the batch, which lies in the batch log, and the update). The
rollout role and the servers keep running.
"""

import argparse
import datetime
import os
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from run_record import describe_run, spread, write_record

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests" / "faults"),
    str(ROOT / "tests" / "slurm"),
    str(ROOT / "tests" / "helpers"),
]

from cluster import Cluster  # noqa: E402
from kill_anything import IN_ORDER, Killed, make_workplace  # noqa: E402
from packages import find_or_fetch  # noqa: E402

from hpc_rl.core.trial import Attempt, load_json  # noqa: E402
from hpc_rl.stats.read import JsonLines  # noqa: E402

OPTIONS = {
    **IN_ORDER,
    "allocation_mode": "embedded:d2+fsdp:d2",
    "evaluator.freq_steps": None,
    "recover.retries": 100,
}
OPTIONS = {name: value for name, value in OPTIONS.items() if value is not None}
STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .* start: (.*)")
MARKS = {
    "libraries": "import",
    "all ranks": "join",
    "the collectives": "check",
    "the state": "load",
    "the first weights": "publish",
}
PARTS = ("notice", "restart", *MARKS.values(), "step")


def kill_once(one: Killed, luck: random.Random) -> tuple[float, int]:
    """Kill rank 0 some steps on; returns (when, its incarnation)."""
    enough = one.num_rows() + luck.randint(6, 9)
    one.until(lambda: one.num_rows() >= enough)
    records = sorted(attempt_of(one).processes.glob("trainer-0.*-rank0.json"), key=incarnation_of)
    killed_at = time.time()
    os.kill((load_json(records[-1]) or {})["pid"], 9)
    return killed_at, incarnation_of(records[-1])


def attempt_of(one: Killed) -> Attempt:
    return one.trial.attempt(f"{one.job_id}.0")


def incarnation_of(path: Path) -> int:
    return int(path.name.split(".")[1].partition("-")[0])


def split(one: Killed, killed_at: float, incarnation: int) -> dict[str, float]:
    """Seconds of each part of the start after `incarnation`."""
    attempt = attempt_of(one)
    ended = [
        row["time"]
        for row in JsonLines(attempt.events).poll()
        if row["event"] == "exited" and row.get("role") == "trainer" and row["incarnation"] == incarnation
    ]
    record = attempt.processes / f"trainer-0.{incarnation + 1}-rank0.json"
    times = {"notice": ended[0], "restart": record.stat().st_mtime, **marks_of(attempt, incarnation + 1)}
    times["step"] = JsonLines(attempt.metrics(incarnation + 1)).poll()[0]["time"]
    before, parts = killed_at, {}
    for part in PARTS:
        parts[part], before = times[part] - before, times[part]
    return parts


def marks_of(attempt: Attempt, incarnation: int) -> dict[str, float]:
    paths = [attempt.log("trainer", 0, incarnation, 0), attempt.log("trainer", 0, incarnation)]
    text = "".join(path.read_text(errors="replace") for path in paths if path.exists())
    found = {}
    for when, words in STAMP.findall(text):
        name = next(part for mark, part in MARKS.items() if words.startswith(mark))
        found[name] = datetime.datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return found


def measure(folder: Path, scheduler: str, kills: int) -> list[dict[str, float]]:
    luck = random.Random(0)
    one = Killed(make_workplace(folder), "recovery", OPTIONS, scheduler=scheduler, total_steps=10_000)
    if scheduler == "slurm":
        one.options = {**one.options, "cluster.n_nodes": 4}
    rows = []
    try:
        one.submit()
        for number in range(kills + 1):
            killed_at, incarnation = kill_once(one, luck)
            one.until(
                lambda incarnation=incarnation: JsonLines(attempt_of(one).metrics(incarnation + 1)).poll()
            )
            parts = split(one, killed_at, incarnation)
            print(f"kill {number}: {sum(parts.values()):.2f} s: {words(parts)}", flush=True)
            if number:  # the first one warms the caches
                rows.append(parts)
    finally:
        one.close()
    return rows


def words(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())


def run(args: argparse.Namespace) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="hpcrl-", dir="/tmp") as here:
        if args.scheduler == "local":
            return measure(Path(here), "local", args.kills)
        with Cluster.private(find_or_fetch()) as cluster:
            os.environ.update(cluster.client_env)
            return measure(Path(here), "slurm", args.kills)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--scheduler", choices=("slurm", "local"), default="slurm")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recovery.json")
    args = parser.parse_args()
    about = describe_run("torch")
    rows = run(args)
    totals = [sum(row.values()) for row in rows]
    record: dict[str, Any] = {
        **about,
        "kills": len(rows),
        "scheduler": args.scheduler,
        "total_s": spread(totals),
        "median_s": {part: statistics.median(row[part] for row in rows) for part in PARTS},
        "rows": rows,
    }
    write_record(args.out, record)
    print(f"median {record['total_s']['median']:.2f} s of {len(rows)} kills: {words(record['median_s'])}")


if __name__ == "__main__":
    main()
