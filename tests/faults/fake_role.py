"""A role of a few lines, for the supervisor's tests: it obeys the pipe, leaves its records, and does what the
script says.

The script is a file `script.json` in the trial directory: {"<role>": [what its first start does, what its
second does, …]}, the last entry for all that follow. Words: `serve` (until told to stop, then 75), `save N`
(the same, after N seconds), `slow S N` (reports steps of S and saves of N seconds; told to stop it
saves for N, commits a generation, then 75), `train` (commits a generation every 0.2 s, until `total`, then 0), `die` (kill -9
of itself), `exit N`, `deaf` (never ends by itself), `commit exit N`. Every line of `writes.log` says who was
alive when. `spin` loops for ever with the interpreter's lock held, in rank 1 alone; `eat` takes memory until
it is killed.
"""

import argparse
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

from hpc_rl.core.proc import find_start_ticks
from hpc_rl.core.trial import Attempt, Trial, write_json
from hpc_rl.roles import control

STOPPING = threading.Event()


def main(role: str) -> int:
    parser = argparse.ArgumentParser()
    for name, kind in (("trial_dir", str), ("attempt", str), ("index", int), ("incarnation", int)):
        parser.add_argument(f"--{name}", type=kind)
    args = parser.parse_args()
    trial = Trial(Path(args.trial_dir))
    attempt = trial.attempt(args.attempt)
    rank = int(
        os.environ["SLURM_PROCID"] if os.environ["HPC_RL_STEPS"] == "srun" else os.environ["HPC_RL_RANK"]
    )
    name = f"{role}-{args.index}.{args.incarnation}-rank{rank}"
    me = {
        "pid": os.getpid(),
        "start_ticks": find_start_ticks(os.getpid()),
        "host": socket.gethostname(),
        "role": role,
        "rank": rank,
    }
    me["step"] = os.environ.get("SLURM_STEP_ID", "")
    write_json(attempt.processes / f"{name}.json", me)
    stacks = control.Stacks(attempt.stacks(role, args.index, args.incarnation, rank))
    control.obey_signals(STOPPING)
    threading.Thread(target=control.listen, args=(STOPPING, control.Deadline(), stacks), daemon=True).start()
    print(
        "up",
        name,
        os.environ.get("SLURMD_NODENAME", ""),
        os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        flush=True,
    )
    script = json.loads((trial.dir / "script.json").read_text())
    todo = script.get(f"{role}-{args.index}") or script[role]
    starts = args.incarnation + int(
        args.attempt.rpartition(".")[2]
    )  # of this role, where each attempt before had one
    word, *rest = todo[min(starts, len(todo) - 1)].split()
    code = behave(word, rest, attempt, name, rank, script)
    write_json(
        attempt.exit_record(role, args.index, args.incarnation, rank),
        {"code": code, "reason": f"said {word}"},
    )
    return code


def behave(word: str, rest: list[str], attempt: Attempt, name: str, rank: int, script: dict) -> int:
    trial = attempt.trial
    if word == "commit":
        commit(trial, 1 + newest(trial))
        word, *rest = rest
        time.sleep(0.05)
    if word == "die":
        time.sleep(float(rest[0]) if rest else 0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "exit":
        return int(rest[0])
    if word == "spin" and rank == 1:
        sum(range(10**13))
    if word == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(os.urandom(1 << 20)) * 8)
            time.sleep(0.05)
    if word == "slow":
        step_s, save_s = map(float, rest)
        row = {"step": 1, "step_s": step_s, "save_s": save_s}
        attempt.metrics(0).write_text(json.dumps(row) + "\n")
    while True:
        with (trial.dir / "writes.log").open("a") as file:
            file.write(f"{time.time()} {name} {os.getpid()}\n")
        if word == "train":
            if rank == 0:
                commit(trial, 1 + newest(trial))
            if newest(trial) >= script["total"]:
                return 0
        if STOPPING.is_set() and word != "deaf":
            time.sleep(float(rest[-1]) if word in ("save", "slow") else 0)
            if word == "slow":
                commit(trial, 1 + newest(trial))
            return 75
        time.sleep(0.2 if word == "train" else 0.05)


def newest(trial: Trial) -> int:
    return max((int(path.name[4:]) for path in trial.recover.glob("gen-*")), default=0)


def commit(trial: Trial, step: int) -> None:
    trial.generation(step).mkdir(exist_ok=True)
