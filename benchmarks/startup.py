"""From `hpc-rl submit` to the first training step: where the time goes, by the trial's own records.

    python benchmarks/startup.py [--cluster] [--scheduler slurm|local] [--runs 3] [--out benchmarks/results/startup.json]

Submits toy GRPO trials one after the other and reads, for each, when the job started (jobs/<id>.state), when
the server's log says that it is up and that it serves, when the trainer had its first batch, when its first
step was logged, all by the clock of this one host. The toy's model loads in no time: what is seen is the
start of processes, imports and rendezvous. `--cluster` starts the tests' private Slurm.
"""

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from run_record import describe_run, write_record

from hpc_rl.core.records import JobEvent, load_job_state
from hpc_rl.stats.read import JsonLines

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / "tests" / "slurm"),
    str(ROOT / "tests" / "faults"),
    str(ROOT / "tests" / "helpers"),
]  # the tests' toy trials and their Slurm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheduler", default="slurm", choices=("slurm", "local"))
    parser.add_argument("--cluster", action="store_true", help="start the tests' private Slurm of 4 nodes")
    parser.add_argument("--nodes", type=int, help="by default 1 without Slurm, otherwise 2")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "startup.json")
    args = parser.parse_args()
    args.nodes = args.nodes or (1 if args.scheduler == "local" else 2)
    about = describe_run("torch")
    from cluster import Cluster
    from kill_anything import READY, make_workplace
    from packages import find_or_fetch

    with tempfile.TemporaryDirectory(prefix="hpcrl-startup-") as folder, contextlib.ExitStack() as stack:
        if args.cluster:
            os.environ.update(stack.enter_context(Cluster.private(find_or_fetch())).client_env)
        make_workplace(Path(folder))
        options: dict[str, object] = {
            **READY,
            "allocation_mode": "embedded:d1+fsdp:d1",
            "cluster.n_nodes": args.nodes,
        }
        runs = [
            measure(Path(folder), f"run-{number}", options, args.scheduler) for number in range(args.runs)
        ]
    result = {
        "what": "seconds from hpc-rl submit to the first training step, split at what each stage waits for",
        **about,
        "scheduler": args.scheduler,
        "nodes": args.nodes,
        "runs": runs,
        "median": {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]},
    }
    write_record(args.out, result)
    print(json.dumps(result["median"], indent=2))


def measure(folder: Path, name: str, options: dict, scheduler: str) -> dict[str, float]:
    """Run one trial of two steps; seconds of each stage, each counted from the end of the one before, and in total."""
    from kill_anything import Killed

    submitted = time.time()
    trial = Killed(folder, name, options, scheduler=scheduler, total_steps=2).submit()
    returned = time.time()
    trial.finish()
    attempt = trial.trial.attempt(f"{trial.job_id}.0")
    job = next(one for one in load_job_state(trial.trial, trial.job_id) if one.event is JobEvent.STARTED)
    supervisor = next(
        row["time"] for row in JsonLines(attempt.events).poll() if row["event"] == "supervisor_started"
    )
    rows = [
        row
        for path in attempt.dir.glob("metrics.*.jsonl")
        for row in JsonLines(path).poll()
        if "step_s" in row
    ]
    first = min(rows, key=lambda row: row["step"])
    step = first["time"]
    batch = step - first["train_s"] - first["publish_s"]
    marks = {
        "queue (submit to script, whole seconds)": float(job.time),
        "start (script to supervisor)": supervisor,
        "server up (listening, no weights yet)": said(attempt.log("server", 0, 0), " at http"),
        "server ready (first weights published)": said(attempt.log("server", 0, 0), "serving weights"),
        "first batch (in the trainer's hands)": batch,
        "first step (logged)": step,
    }
    split, before = {"hpc-rl submit returns": returned - submitted}, submitted
    for stage, at in marks.items():
        split[stage], before = max(0.0, at - before), max(before, at)
    print(f"{name}: {step - submitted:.1f} s", flush=True)
    return {stage: round(value, 3) for stage, value in (split | {"total": step - submitted}).items()}


def said(log: Path, words: str) -> float:
    """When a role said something for the first time, Unix seconds."""
    line = next(line for line in log.read_text().splitlines() if words in line)
    return datetime.datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


if __name__ == "__main__":
    main()
