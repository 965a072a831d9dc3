"""`hpc-rl logs <trial>`: the logs of one attempt's roles, or the list of which there are."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpc_rl.cli.options import ArgumentParser, Count, Namespace, add_json, add_trial, new_parser, print_json
from hpc_rl.errors import ConfigError, TrialStateError
from hpc_rl.files import Tail, last_lines
from hpc_rl.records import successors
from hpc_rl.status.attempts import log_files
from hpc_rl.status.formatting import format_time
from hpc_rl.status.scheduler_view import TrialWatch, query
from hpc_rl.status.trial_status import read_status
from hpc_rl.submit import trial_index
from hpc_rl.supervise.server_array import attempts_of
from hpc_rl.trial import Trial

ROLES = ("trainer", "rollout", "server", "sglang", "supervisor", "job")
EVERY_RANK = "all"
WHOLE = 1 << 40  # lines


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


def run(args: Namespace) -> int:
    if args.json and not args.list:
        raise ConfigError("--json goes with --list: it lists the files; the logs themselves are text.")
    trial = trial_index.resolve(args.trial)
    found = collect(trial)
    if args.list:
        return _list(trial, found, args.json)
    if args.follow:
        return _follow(trial, args)
    if not found:
        print(_nothing_yet(trial))
        return 0
    chosen = choose(trial, found, args)
    for number, log in enumerate(chosen):
        if len(chosen) > 1:
            print(f"{chr(10) if number else ''}==> {log.title(trial)} <==")
        print("\n".join(last_lines(log.path, args.lines) or ["(empty)"]))
    return 0


def _nothing_yet(trial: Trial) -> str:
    """Why a trial has no log."""
    answer = query(trial)
    story = read_status(trial, answer.newest, answer.asked_at or None)
    since = f" since {format_time(story.since)}" if story.since else ""
    why = f" ({story.reason})" if story.reason else ""
    return f"no log yet: {trial} is {story.state}{since}{why}"


def parser() -> ArgumentParser:
    made = new_parser(
        "Show logs: by default the newest trainer's and the supervisor's of the newest attempt."
    )
    add_trial(made)
    made.add_argument("--role", choices=ROLES, help="whose; `job` is the output of the batch script itself")
    made.add_argument("--index", type=Count, help="which replica of the role")
    made.add_argument(
        "--incarnation", type=Count, help="which start of the role within the attempt; default: the newest"
    )
    made.add_argument(
        "--attempt", help="which attempt, as status names it; default: the newest that has what is asked for"
    )
    made.add_argument(
        "--rank",
        type=_rank,
        metavar="RANK",
        help="which rank, where ranks have files of their own, or `all`; default: rank 0",
    )
    made.add_argument(
        "-n", "--lines", type=Count, default=40, help="how many of the last lines (default: 40)"
    )
    made.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on with new lines until the trial ends; waits for the first",
    )
    made.add_argument("--list", action="store_true", help="list the files instead")
    add_json(made, "the list")
    return made


def _rank(text: str | int) -> str | int:
    """Return a rank, or EVERY_RANK."""
    if str(text) == EVERY_RANK:
        return EVERY_RANK
    if not (str(text).isascii() and str(text).isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank: give its number, or {EVERY_RANK}")
    return int(text)


def collect(trial: Trial) -> list[Log]:
    """Every log of a trial: attempts in their order, those of server jobs too, and the batch scripts' outputs."""
    story = read_status(trial)
    tasks = [task.id for array in story.servers for task in array.tasks]
    found = [
        log for job_id in (*tasks, *(job.job_id for job in story.jobs)) for log in _outputs(trial, job_id)
    ]
    number = {job.job_id: number for number, job in enumerate(story.jobs)}
    attempts = [
        (number.get(array.serves, -1), name)
        for array in story.servers
        for task in array.tasks
        for name in attempts_of(trial, task.id)
    ]
    attempts += [(number.get(attempt.job_id, len(number)), attempt.id) for attempt in story.attempts]
    for _, name in sorted(attempts, key=lambda pair: pair[0]):  # of one submission the servers come first
        logs = log_files(trial.attempt(name).dir)
        found += [Log(log.path, name, log.role, log.index, log.incarnation, log.rank) for log in logs]
    return found


def _outputs(trial: Trial, job_id: str) -> list[Log]:
    """What the batch script of a submission, or of a task of a server array, said; then its successors."""
    _, underscore, task = job_id.partition("_")
    names = {job_id: job_id}
    names |= {
        f"{job_id}.{restart}": f"{new}{underscore}{task}"
        for restart, new in successors(trial, job_id).items()
    }
    return [
        Log(path, attempt, "job")
        for attempt, name in names.items()
        if (path := trial.jobs / f"{name}.out").exists()
    ]


def choose(trial: Trial, found: list[Log], args: Namespace) -> list[Log]:
    """What the options ask for. Raises TrialStateError that says which files there are."""
    if not any(log.role == "supervisor" for log in found):  # then it writes where the batch script does
        own = [
            log.role == "job" and args.role != "job" and "_" not in log.attempt for log in found
        ]  # not that of servers
        found = [
            replace(log, role="supervisor") if is_own else log for log, is_own in zip(found, own, strict=True)
        ]
    matching = [log for log in found if _matches(log, args)]
    if not matching:
        if not found:
            raise TrialStateError(_nothing_yet(trial))
        given = {key: getattr(args, key) for key in ("role", "index", "incarnation", "attempt", "rank")}
        wanted = " ".join(f"--{key} {value}" for key, value in given.items() if value is not None)
        raise TrialStateError(
            f"{trial} has no log for {wanted}. `hpc-rl logs {trial} --list` shows which there are."
        )
    if args.role is None and args.index is None and args.incarnation is None and args.rank is None:
        default = [
            log
            for role in ("trainer", "supervisor")
            for log in _newest([log for log in matching if log.role == role])
        ]
        return _first_rank(default or _newest(matching))
    return _first_rank(_newest(matching)) if args.rank is None else _newest(matching)


def _matches(log: Log, args: Namespace) -> bool:
    by_attempt = args.attempt is None or args.attempt in (log.attempt, log.attempt.rpartition(".")[0])
    by_attempt = by_attempt or (
        args.attempt is not None and args.attempt.rpartition(".")[0] == log.attempt
    )  # a job's own output
    rank = None if args.rank == EVERY_RANK else args.rank
    numbers = ((args.index, log.index), (args.incarnation, log.incarnation), (rank, log.rank))
    return (
        by_attempt
        and args.role in (None, log.role)
        and all(wanted in (None, number) for wanted, number in numbers)
    )


def _first_rank(logs: list[Log]) -> list[Log]:
    """Of logs by rank that of rank 0 alone, and what their launcher said where it said anything."""
    ranked = {(log.role, log.index, log.incarnation) for log in logs if log.rank is not None}
    chosen = []
    for log in logs:
        by_rank = (log.role, log.index, log.incarnation) in ranked
        if not by_rank or log.rank == 0 or (log.rank is None and log.path.stat().st_size):
            chosen.append(log)
    return chosen or logs


def _newest(logs: list[Log]) -> list[Log]:
    """Of each role, index and rank the newest incarnation, all of the newest attempt among them. Tasks of one server array
    are attempts side by side."""
    if not logs:
        return []
    newest = {
        (log.role, log.index, log.rank): log
        for log in logs
        if _array(log.attempt) == _array(logs[-1].attempt)
    }
    return list(newest.values())


def _array(attempt: str) -> str:
    """The array of an attempt of a server task; any other as it is."""
    return attempt.partition("_")[0]


def _list(trial: Trial, found: list[Log], as_json: bool) -> int:
    if as_json:
        print_json(
            [{**asdict(log), "path": str(log.path), "bytes": log.path.stat().st_size} for log in found]
        )
        return 0
    print(f"in {trial.dir}")
    for log in found:
        print(f"  {log.path.stat().st_size:>12,}  {log.title(trial)}")
    return 0


def _follow(trial: Trial, args: Namespace) -> int:
    """New lines of what is chosen, newer incarnations and attempts included, until the trial is over."""
    tails: dict[Path, Tail] = {}
    watch, shown, said = TrialWatch(trial), None, ""
    while True:
        story = watch.poll()
        try:
            chosen = choose(trial, collect(trial), args)
        except TrialStateError as nothing:
            if story.over:
                raise
            chosen = []
            words = str(nothing) if not tails else ""
            if words and words != said:
                print(f"hpc-rl: waiting: {words}", file=sys.stderr)
                said = words
        newer = bool(tails)  # what appears later is shown from its beginning
        for log in chosen:
            tail = tails.setdefault(log.path, Tail(log.path, WHOLE if newer else args.lines))
            lines = tail.poll(to_the_end=story.over)
            if lines and shown != log.path:
                print(f"==> {log.title(trial)} <==")
                shown = log.path
            for line in lines:
                print(line)
        sys.stdout.flush()
        if story.over:
            return 0
        time.sleep(0.5)
