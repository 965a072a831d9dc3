"""`hpc-rl`: looks at the first word, imports that command alone, and turns what goes wrong into one message and an exit code."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import traceback

from hpc_rl import __version__
from hpc_rl.errors import ExitCode, HpcRlError

COMMANDS = {  # name -> (module, one line of help)
    "quickstart": ("quickstart", "make a toy model and task, train it here, show what it learnt"),
    "submit": ("submit", "check a configuration and hand it in as a job"),
    "render": ("render", "write the job scripts of a configuration, submit nothing"),
    "status": ("status", "what a trial does, and what happened to it"),
    "logs": ("logs", "show the logs of a trial's roles"),
    "attach": ("attach", "the command that opens a shell where a role runs"),
    "cancel": ("cancel", "end a trial for good, with its state saved"),
    "recover": ("recover", "go on with a trial from its newest generation"),
    "checkpoint": ("checkpoint", "the generations of a trial: list, verify; to and from Hugging Face format"),
    "config": ("config", "show a resolved configuration, compare two; schema, reference, completion"),
    "templates": (
        "templates",
        "what the job scripts are made of; override, compare and check a site's blocks",
    ),
    "list": ("listing", "the trials that this account submitted"),
    "doctor": (
        "doctor",
        "check this machine, the cluster and the shared directory, each finding with its fix",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns its exit code. Usage errors end by SystemExit(2), as argparse has it."""
    try:
        try:
            return _command(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:  # it is None where the caller closed it
                sys.stdout.flush()
    except OSError as error:  # of the output: what a command meets is told by _guarded
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else the interpreter complains again at its end
        if isinstance(error, BrokenPipeError):  # `hpc-rl list | head`: nobody reads any more
            return 128 + signal.SIGPIPE
        print(f"hpc-rl: the output can't be written: {error.strerror}", file=sys.stderr)
        return ExitCode.CANNOT_WRITE


def _command(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview(), file=sys.stdout if args else sys.stderr)
        return ExitCode.DONE if args else ExitCode.USAGE
    if args[0] in ("-V", "--version"):
        print(f"hpc-rl {__version__}")
        return ExitCode.DONE
    if args[0] not in COMMANDS:
        return _unknown(args[0])
    return _guarded(args[0], args[1:])


def overview() -> str:
    """The text of `hpc-rl --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hpc-rl <command> [options]",
            "",
            "Reinforcement-learning post-training of language models on Slurm, or on this machine.",
            "",
            "commands:",
            *lines,
            "",
            "`hpc-rl <command> --help` shows its options; `hpc-rl --version` the version.",
            "<trial> is a path, experiment/trial, or a trial name that only one trial has.",
        ]
    )


def _unknown(word: str) -> int:
    near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    hint = f"Did you mean `hpc-rl {near[0]}`?" if near else f"Commands: {', '.join(COMMANDS)}."
    print(f"hpc-rl: there is no command {word!r}. {hint}", file=sys.stderr)
    return ExitCode.USAGE


def _guarded(name: str, args: list[str]) -> int:
    try:
        return int(importlib.import_module(f"hpc_rl.cli.{COMMANDS[name][0]}").run(args) or 0)
    except HpcRlError as error:
        print(f"hpc-rl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hpc-rl: interrupted", file=sys.stderr)
        return ExitCode.KILLED_BY_PERSON
    except BrokenPipeError:
        raise  # of our own output
    except Exception as error:  # the boundary: everything else is our own mistake
        _tell_internal(error)
        return ExitCode.FAILED


def _tell_internal(error: Exception) -> None:
    if os.environ.get("HPC_RL_TRACEBACK"):
        traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(where.filename)}:{where.lineno}"
    print(f"hpc-rl: internal error at {place}: {type(error).__name__}: {error}", file=sys.stderr)
    if not os.environ.get("HPC_RL_TRACEBACK"):
        print(
            "        Set HPC_RL_TRACEBACK=1 and run it again for the whole traceback; please report it.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
