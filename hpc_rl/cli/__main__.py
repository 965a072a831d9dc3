"""`hpc-rl`: runs the invoked command, and turns errors into one message and an exit code."""

import difflib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Collection
from types import ModuleType
from typing import Any, TextIO, cast

from jsonargparse import ArgumentError

from hpc_rl import __version__
from hpc_rl.cli import options
from hpc_rl.cli.options import CommandParser
from hpc_rl.core.errors import ExitCode, HpcRlError
from hpc_rl.core.log import escape_controls

COMMANDS = {  # name -> (module, one line of help)
    "quickstart": ("quickstart", "make a toy model and task, and train the model on this machine"),
    "check": ("check", "check a configuration without a submission; --episode runs one prompt"),
    "submit": ("submit", "check a configuration and submit it as a job"),
    "sweep": ("sweep", "submit trials that differ in some options; compare their results"),
    "run": ("run", "run a configuration inside a Slurm allocation (salloc)"),
    "render": ("render", "write the job scripts of a configuration without a submission"),
    "simulate": ("simulate", "predict step time, goodput and makespan of a configuration; submit nothing"),
    "tune": ("tune", "recommend the split and other options after a short trial"),
    "generate": ("generate", "answer the prompts of a data set, and write completions with rewards"),
    "evaluate": ("evaluate", "evaluate a model, or a trial at a step, on held-out data"),
    "serve": ("serve", "serve a model, or a trial at a step, at an OpenAI endpoint"),
    "status": ("status", "show the state of a trial and its history"),
    "logs": ("logs", "show the logs of a trial's roles"),
    "samples": ("samples", "show prompts and completions with their rewards"),
    "top": ("top", "watch running trials, like top"),
    "report": ("report", "summarize trials: results, use of time; --html writes a page"),
    "plot": ("plot", "plot metrics in the terminal, of several trials in one chart"),
    "attach": ("attach", "print the command that opens a shell on the node of a role"),
    "cancel": ("cancel", "stop a trial, save its state, and do not restart it"),
    "recover": ("recover", "continue a trial from its newest checkpoint"),
    "fork": ("fork", "start a new trial from a checkpoint of another one"),
    "checkpoint": (
        "checkpoint",
        "list, verify, save, export and import checkpoints",
    ),
    "export": ("export", "write the model of a trial with a model card; --push uploads it"),
    "config": ("config", "show or compare configurations; print the schema or the reference"),
    "templates": ("templates", "list, override, compare and check the templates of job scripts"),
    "remove": ("remove", "remove the directory of a trial, after asking"),
    "list": ("list", "list your trials"),
    "du": ("du", "show the disk space of trials"),
    "env": ("env", "run an environment, a program that feeds a trainer with tasks"),
    "doctor": ("doctor", "check this machine, the cluster and the shared directory, with fixes"),
}
SYNONYMS = {
    typed: meant
    for meant, words in {
        "cancel": "stop kill scancel",
        "recover": "resume continue restart",
        "list": "ps ls squeue",
        "remove": "delete rm clean prune",
        "fork": "clone copy rename mv",
        "du": "disk usage",
        "export": "archive push upload publish",
        "config completion": "completion complete",
        "status": "show info",
        "logs": "log tail",
        "samples": "sample completions rollouts",
        "submit": "train start",
        "simulate": "predict plan",
        "tune": "recommend optimize autotune",
        "check": "validate verify try",
    }.items()
    for typed in words.split()
}
EPILOG = """`hpc-rl <command> --help` shows its options; `hpc-rl --version` the version.
<trial> is a path, experiment/trial, or a trial name that only one trial has."""


class PrintableStream:
    """A stream of text that escapes control characters: names, values and reasons come from anywhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(escape_controls(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code. Its output has no control characters."""
    outputs = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = (one and cast(TextIO, PrintableStream(one)) for one in outputs)
        return _main(argv)
    finally:
        sys.stdout, sys.stderr = outputs


def _main(argv: list[str] | None) -> int:
    try:
        try:
            return _dispatch(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:  # None where the caller closed it
                sys.stdout.flush()
    except OSError as error:  # writing the output failed; _call_and_report catches errors of commands
        # Else the interpreter complains again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `hpc-rl list | head`: the reader is gone
            return 128 + signal.SIGPIPE
        print(f"hpc-rl: the output can't be written: {error.strerror}", file=sys.stderr)
        return ExitCode.CANNOT_WRITE


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help", *argv[2:]]
    if not argv or argv[0] in ("-h", "--help"):
        print(build_parsers(())[()].format_help(), end="", file=sys.stdout if argv else sys.stderr)
        return ExitCode.DONE if argv else ExitCode.USAGE
    if argv[0] in ("-V", "--version"):
        print(f"hpc-rl {__version__}")
        return ExitCode.DONE
    if argv[0] not in COMMANDS and not argv[0].startswith("-"):
        return _report_unknown(argv[0])
    if argv[0] == "env" and argv[1:2] and argv[1] in load_module("env").HANDED_OVER:
        load_module("env").hand_over(argv[1:])
    return _call_and_report(argv)


Parsers = dict[tuple[str, ...], CommandParser]


def build_parsers(wanted: Collection[str]) -> Parsers:
    """Return the parser of `hpc-rl`, under (), and the parsers of its commands and actions.

    If no command is wanted, every command has a parser with its name and one line of help.
    """
    about = "Reinforcement-learning post-training of language models on Slurm, or on this machine."
    found: Parsers = {(): CommandParser(about, EPILOG, prog="hpc-rl")}
    made = {
        name: load_module(name).make_parser() if name in wanted else CommandParser(line)
        for name, (_, line) in COMMANDS.items()
        if name in wanted or not wanted
    }
    _add_commands(found, (), made)
    for name in wanted:
        if actions := getattr(load_module(name), "ACTIONS", {}):
            _add_commands(found, (name,), {action: of.make_parser() for action, of in actions.items()})
    return found


def _add_commands(found: Parsers, above: tuple[str, ...], made: dict[str, CommandParser]) -> None:
    commands = found[above].add_subcommands(
        dest="action" if above else "command", title="commands", metavar="<command>"
    )
    for name, parser in made.items():
        commands.add_subcommand(name, parser, help=parser.description)
        parser.prog = f"{found[above].prog} {name}"
        found[*above, name] = parser


def load_module(command: str) -> ModuleType:
    """Return the module of a command."""
    return importlib.import_module(f"hpc_rl.cli.{COMMANDS[command][0]}")


def _report_unknown(name: str) -> int:
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.7)
    if name in SYNONYMS or near:
        hint = f"Did you mean `hpc-rl {SYNONYMS.get(name) or near[0]}`?"
    else:
        hint = f"Commands: {', '.join(COMMANDS)}."
    print(f"hpc-rl: there is no command {name!r}. {hint}", file=sys.stderr)
    return ExitCode.USAGE


def _call_and_report(argv: list[str]) -> int:
    try:
        return int(_call_command(argv) or 0)
    except ArgumentError as error:
        said = " ".join(error.message.split())
        for length in (2, 1):  # the library names an argument with its command before it: recover.trial
            said = said.replace(".".join([*argv[:length], ""]), "")
        print(f"hpc-rl: {said}", file=sys.stderr)
        command = f"hpc-rl {argv[0]}" if argv[0] in COMMANDS else "hpc-rl"
        print(f"        `{command} --help` shows the options.", file=sys.stderr)
        return ExitCode.USAGE
    except HpcRlError as error:
        print(f"hpc-rl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hpc-rl: interrupted", file=sys.stderr)
        return ExitCode.KILLED_BY_PERSON
    except BrokenPipeError:
        raise  # of our own output
    except Exception as error:  # the boundary: everything else is a defect of this program
        _report_internal(error)
        return ExitCode.FAILED


def _call_command(argv: list[str]) -> int:
    parsers = build_parsers([name for name in argv[:1] if name in COMMANDS])
    path = next(tuple(argv[:length]) for length in (2, 1, 0) if tuple(argv[:length]) in parsers)
    own = argv[len(path) :]
    if options.print_help(parsers[path], own):
        return ExitCode.DONE
    args = parsers[()].parse_args([*path, *options.arrange_arguments(parsers[path], own)])
    for name in path:
        args = args[name]
    args.argv = argv
    owner = load_module(path[0])
    return (owner.ACTIONS[path[1]] if len(path) > 1 else owner).main(args)


def _report_internal(error: Exception) -> None:
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(where.filename)}:{where.lineno}"
    more = "\n        Set HPC_RL_TRACEBACK=1 and run it again for the whole traceback; please report it."
    if os.environ.get("HPC_RL_TRACEBACK"):
        traceback.print_exception(error)
        more = ""
    print(f"hpc-rl: internal error at {place}: {type(error).__name__}: {error}{more}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
