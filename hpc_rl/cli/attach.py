"""`hpc-rl attach <trial>`: print, or with --exec run, the command that opens a shell where a role runs."""

import argparse
import os
import shlex
import sys

from hpc_rl.cli.options import CommandParser, Count, Namespace, print_json
from hpc_rl.core.errors import ConfigError, SchedulerError
from hpc_rl.schedulers.slurm import clean_environment
from hpc_rl.status.scheduler_view import load_current_status
from hpc_rl.trials import trial_index
from hpc_rl.trials.attachment import choose_process, list_role_processes, make_attach_command

ROLES = ("trainer", "rollout", "server", "environment", "supervisor")
EPILOG = """`$(hpc-rl attach TRIAL)` runs the printed command, too. On Slurm it is a step with a terminal that
overlaps the steps of the job; on this machine it is a shell in the trial's directory. To run another program
than a shell, append it after `--`:

  hpc-rl attach TRIAL --role server --exec -- nvidia-smi"""


def make_parser() -> CommandParser:
    made = CommandParser("Print the command that opens a shell on the node of a role.", EPILOG)
    made.add_trial()
    made.add_argument("--role", choices=ROLES, help="role (default: the trainer, else any)")
    made.add_argument("--index", type=Count, help="replica of the role (default: the first)")
    made.add_argument("--rank", type=Count, help="rank of the replica (default: the first)")
    made.add_flag("--list", help="list all running processes instead")
    made.add_flag("--exec", help="run the command instead of printing it")
    made.add_argument("--run", action="append", default=[], help=argparse.SUPPRESS)  # the words after --
    made.add_json("the processes")
    return made


def main(args: Namespace) -> int:
    trial = trial_index.resolve(args.trial)
    status = load_current_status(trial)
    if args.json:
        every = list_role_processes(status)
        print_json([{**vars(one), "command": make_attach_command(status, one, args.run)} for one in every])
        return 0
    if args.list:
        for one in list_role_processes(status):
            print(f"{one.name:<20}{one.node or one.host}  pid {one.pid}")
        return 0
    if args.run and not args.exec:
        raise ConfigError(
            "a command after -- needs --exec: without it, attach only prints the command of a shell."
        )
    process = choose_process(status, args.role, args.index, args.rank)
    line = make_attach_command(status, process, args.run)
    on_slurm = line[0] == "srun"
    where = f"pid {process.pid} on {process.node or process.host}, attempt {process.attempt}"
    print(f"{process.name}: {where}", file=sys.stderr)
    if args.exec:
        _replace_process(line, None if on_slurm else str(trial.dir))
    print(shlex.join(line) if on_slurm else f"cd {shlex.quote(str(trial.dir))} && {shlex.join(line)}")
    return 0


def _replace_process(line: list[str], folder: str | None) -> None:
    """Run a command in place of this process. Raises SchedulerError if the program does not exist."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if folder is not None:
            os.chdir(folder)
        os.execvpe(line[0], line, clean_environment(os.environ))
    except OSError as error:
        raise SchedulerError(f"{line[0]} can't be run: {error.strerror or error}.") from error
