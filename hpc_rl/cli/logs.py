"""`hpc-rl logs <trial>`: the logs of one attempt's roles, or the list of which there are."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpc_rl.cli.options import add_json, add_trial, count, new_parser, print_json
from hpc_rl.errors import ConfigError, TrialStateError
from hpc_rl.launch import index
from hpc_rl.launch.ask import ask_newest
from hpc_rl.launch.incarnations import log_files
from hpc_rl.launch.story import Reader, tell
from hpc_rl.launch.tail import Tail, last_lines
from hpc_rl.trial import Trial

ROLES = ("trainer", "rollout", "server", "supervisor", "job")
ASK_EVERY_S = 30.0


@dataclass(frozen=True)
class Log:
    """One file that logs can show; role `job` is the batch script's own output."""

    path: Path
    attempt: str
    role: str
    index: int | None = None
    incarnation: int | None = None
    rank: int | None = None

    def title(self, trial: Trial) -> str:
        return str(self.path.relative_to(trial.dir))


def run(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    trial = index.resolve(args.trial)
    found = collect(trial)
    if args.list:
        return _list(trial, found, args.json)
    chosen = choose(trial, found, args)
    if args.json:
        raise ConfigError("--json goes with --list: it lists the files; the logs themselves are text.")
    if args.follow:
        return _follow(trial, args)
    for number, log in enumerate(chosen):
        if len(chosen) > 1:
            print(f"{chr(10) if number else ''}==> {log.title(trial)} <==")
        print("\n".join(last_lines(log.path, args.lines)))
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("logs", "Show logs: by default the newest trainer's and the supervisor's of the newest attempt.")
    add_trial(made)
    made.add_argument("--role", choices=ROLES, help="whose; `job` is the output of the batch script itself")
    made.add_argument("--index", type=count, help="which replica of the role")
    made.add_argument("--incarnation", type=count, help="which start of the role within the attempt; default: the newest")
    made.add_argument("--attempt", help="which attempt, as status names it; default: the newest that has what is asked for")
    made.add_argument("--rank", type=count, help="which rank, where ranks have files of their own")
    made.add_argument("-n", "--lines", type=count, default=40, help="how many of the last lines (default: 40)")
    made.add_argument("-f", "--follow", action="store_true", help="go on with new lines until the trial ends")
    made.add_argument("--list", action="store_true", help="list the files instead")
    add_json(made, "the list")
    return made


def collect(trial: Trial) -> list[Log]:
    """Every log of a trial: attempts in their order, and the batch scripts' outputs."""
    story = tell(trial)
    found = [Log(path, job.job_id, "job") for job in story.jobs if (path := trial.jobs / f"{job.job_id}.out").exists()]
    for attempt in story.attempts:
        logs = log_files(trial.attempt(attempt.id).dir)
        found += [Log(log.path, attempt.id, log.role, log.index, log.incarnation, log.rank) for log in logs]
    return found


def choose(trial: Trial, found: list[Log], args: argparse.Namespace) -> list[Log]:
    """What the options ask for. Raises TrialStateError that says which files there are."""
    if not any(log.role == "supervisor" for log in found):  # then it writes where the batch script does
        found = [replace(log, role="supervisor") if log.role == "job" and args.role != "job" else log for log in found]
    matching = [log for log in found if _matches(log, args)]
    if not matching:
        given = {key: getattr(args, key) for key in ("role", "index", "incarnation", "attempt", "rank")}
        wanted = " ".join(f"--{key} {value}" for key, value in given.items() if value is not None)
        if not found:
            raise TrialStateError(f"{trial} has no logs yet: `hpc-rl status {trial}` says what it waits for.")
        raise TrialStateError(f"{trial} has no log for {wanted}. `hpc-rl logs {trial} --list` shows which there are.")
    if args.role is None and args.index is None and args.incarnation is None and args.rank is None:
        default = [log for role in ("trainer", "supervisor") for log in _newest([log for log in matching if log.role == role])]
        return default or _newest(matching)
    return _newest(matching)


def _matches(log: Log, args: argparse.Namespace) -> bool:
    by_attempt = args.attempt is None or args.attempt in (log.attempt, log.attempt.rpartition(".")[0])
    numbers = ((args.index, log.index), (args.incarnation, log.incarnation), (args.rank, log.rank))
    by_attempt = by_attempt or (args.attempt is not None and args.attempt.rpartition(".")[0] == log.attempt)  # a job's own output
    return by_attempt and args.role in (None, log.role) and all(wanted in (None, number) for wanted, number in numbers)


def _newest(logs: list[Log]) -> list[Log]:
    """Of each role, index and rank the newest incarnation, all of the newest attempt among them."""
    if not logs:
        return []
    attempt = logs[-1].attempt
    newest = {(log.role, log.index, log.rank): log for log in logs if log.attempt == attempt}
    return list(newest.values())


def _list(trial: Trial, found: list[Log], as_json: bool) -> int:
    if as_json:
        print_json([{**asdict(log), "path": str(log.path), "bytes": log.path.stat().st_size} for log in found])
        return 0
    print(f"in {trial.dir}")
    for log in found:
        print(f"  {log.path.stat().st_size:>12,}  {log.title(trial)}")
    return 0


def _follow(trial: Trial, args: argparse.Namespace) -> int:
    """New lines of what is chosen, newer incarnations and attempts included, until the trial is over."""
    tails: dict[Path, Tail] = {}
    reader, shown, asked = Reader(trial), None, 0.0
    job_state = None
    while True:
        if time.monotonic() - asked > ASK_EVERY_S:
            job_state, _ = ask_newest(trial)
            asked = time.monotonic()
        over = reader.read(job_state).over
        for log in choose(trial, collect(trial), args):
            lines = tails.setdefault(log.path, Tail(log.path, args.lines)).poll(to_the_end=False)
            if lines and shown != log.path:
                print(f"==> {log.title(trial)} <==")
                shown = log.path
            for line in lines:
                print(line)
        sys.stdout.flush()
        if over:
            return 0
        time.sleep(0.5)
