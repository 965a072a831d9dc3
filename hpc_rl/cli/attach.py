"""`hpc-rl attach <trial>`: prints, or with --exec runs, the command that opens a shell where a role of the trial runs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from hpc_rl.cli.options import ArgumentParser, Count, Namespace, add_json, add_trial, new_parser, print_json
from hpc_rl.errors import ConfigError, SchedulerError
from hpc_rl.schedulers.slurm import clean_environment
from hpc_rl.status.scheduler_view import query
from hpc_rl.status.trial_status import read_status
from hpc_rl.submit import trial_index
from hpc_rl.submit.attachment import attach_command, choose_process, role_processes

ROLES = ("trainer", "rollout", "server", "supervisor")
EPILOG = """The command goes to standard output, so `$(hpc-rl attach TRIAL)` runs it too. On Slurm it is a step that overlaps with
those of the job, with a terminal; on this machine a shell in the trial's directory. What follows `--` is run there
instead of a shell:  hpc-rl attach TRIAL --role server --exec -- nvidia-smi"""


def parser() -> ArgumentParser:
    made = new_parser("The command that opens a shell on the node of a role.", EPILOG)
    add_trial(made)
    made.add_argument("--role", choices=ROLES, help="whose node (default: the trainer's, else any)")
    made.add_argument("--index", type=Count, help="which replica of the role (default: the first)")
    made.add_argument("--rank", type=Count, help="which rank of it (default: the first)")
    made.add_argument("--list", action="store_true", help="list where every process runs instead")
    made.add_argument("--exec", action="store_true", help="run the command instead of printing it")
    made.add_argument("--run", action="append", default=[], help=argparse.SUPPRESS)  # what follows --
    add_json(made, "the places")
    return made


def run(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    answer = query(trial)
    story = read_status(trial, answer.newest, answer.asked_at or None)
    if args.list or args.json:
        every = role_processes(story)
        if args.json:
            print_json(
                [{**vars(place), "command": attach_command(story, place, args.run)} for place in every]
            )
        for place in every if not args.json else []:
            print(f"{place.name:<20}{place.node or place.host}  pid {place.pid}")
        return 0
    if args.run and not args.exec:
        raise ConfigError("what follows -- is run with --exec only; without it a shell's command is printed.")
    place = choose_process(story, args.role, args.index, args.rank)
    line = attach_command(story, place, args.run)
    on_slurm = line[0] == "srun"
    print(
        f"{place.name}: pid {place.pid} on {place.node or place.host}, attempt {place.attempt}",
        file=sys.stderr,
    )
    if args.exec:
        _become(line, None if on_slurm else str(trial.dir))
    print(shlex.join(line) if on_slurm else f"cd {shlex.quote(str(trial.dir))} && {shlex.join(line)}")
    return 0


def _become(line: list[str], folder: str | None) -> None:
    """Replace this process. Raises SchedulerError where the program is not there."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if folder is not None:
            os.chdir(folder)
        os.execvpe(line[0], line, clean_environment(os.environ))
    except OSError as error:
        raise SchedulerError(f"{line[0]} can't be run: {error.strerror or error}.") from error
