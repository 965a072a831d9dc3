"""What the commands share: jsonargparse parsers, and options of a configuration among the arguments."""

import argparse
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from jsonargparse import ArgumentParser, Namespace

from hpc_rl.core.errors import ConfigError

__all__ = ["Namespace"]
T = TypeVar("T", int, float)
# The attribute that shtab reads to complete an argument; the function is written by `config completion`.
TRIAL_NAMES = ("complete", dict.fromkeys(("bash", "zsh"), "_hpc_rl_trials"))
METRIC_NAMES = ("complete", dict.fromkeys(("bash", "zsh"), "_hpc_rl_metrics"))
CONFIG_FILES = (".yaml", ".yml", ".json")
DELETION = re.compile(r"~[A-Za-z_][\w.]*(=.*)?", re.DOTALL)  # as in Hydra: an option that is deleted
OVERRIDES = "overrides"  # destination of the options of a configuration, as they were typed
COMMON = (  # letters as sbatch has them, option, metavar, help
    ("-N", "--n_nodes", "N", "number of nodes"),
    ("-p", "--partition", "NAME", "Slurm partition"),
    ("-A", "--account", "NAME", "Slurm account to charge"),
    ("-t", "--time", "TIME", "time limit of a job, as 24:00:00"),
    ("-q", "--qos", "NAME", "Slurm quality of service"),
    (None, "--model", "DIR", "directory of the model (actor.path, or model.path)"),
    (None, "--data", "FILE", "training data (train_dataset.path)"),
    (None, "--lr", "RATE", "peak learning rate (actor.optimizer.lr)"),
    (None, "--name", "NAME", "trial_name"),
    (None, "--fileroot", "DIR", "directory of all trials (cluster.fileroot)"),
)
OF_A_CONFIGURATION = """Options of the configuration may follow, as --a.b VALUE or a.b=VALUE; ~a.b deletes
one. `--help SECTION` explains the options of a section, `--help lr` or `--help "learning rate"` those with
these words in their names or texts, `--help all` every one."""


class CommandParser(ArgumentParser):
    """The parser of one command; its usage errors are raised as jsonargparse.ArgumentError."""

    def __init__(self, description: str = "", epilog: str = "", **settings: Any) -> None:
        super().__init__(
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            exit_on_error=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **settings,
        )

    def add_flag(self, *names: str, help: str) -> None:
        """Declare an option without a value."""
        self.add_argument(*names, action="store_true", help=help)

    def add_json(self, what: str) -> None:
        self.add_flag("--json", help=f"print {what} as JSON")

    def add_trial(self, default: str = "") -> None:
        """Declare the trial that a command is about; with `default`, which one it is if none is named."""
        text = "a path, experiment/trial, or a trial name that only one trial has"
        if default:
            self.add_completed("trial", nargs="?", help=f"{text} (default: {default})")
        else:
            self.add_completed("trial", help=text)

    def add_trials(self, default: str) -> None:
        """Declare the trials that a command is about; `default` says which one it is if none is named."""
        text = "paths, experiment/trial, or trial names that only one trial has; * and ? match"
        self.add_completed("trial", nargs="*", help=f"{text} (default: {default})")

    def add_completed(self, name: str, **settings: Any) -> None:
        """Declare an argument that the shell completes with the names of trials."""
        setattr(self.add_argument(name, **settings), *TRIAL_NAMES)

    def add_metrics(self, name: str, **settings: Any) -> None:
        """Declare an argument that the shell completes with the names of metrics of the user's trials."""
        setattr(self.add_argument(name, **settings), *METRIC_NAMES)

    def add_config(self) -> None:
        """Declare where a configuration comes from, and its options."""
        files = "YAML file (--config may be omitted); several are merged from left to right"
        self.add_argument("--config", action="append", default=[], metavar="FILE", help=files)
        presets = "atlas, atlas-teacher: its defaults, below the files; cpu: this machine, no GPU, over them"
        self.add_argument("--preset", action="append", default=[], metavar="NAME", help=presets)
        profile = "profile of the cluster, below the files (hpc-rl templates list names them)"
        self.add_argument("--cluster", metavar="NAME", help=profile)
        self.add_overrides()

    def add_overrides(self) -> None:
        """Declare the options of a configuration: the common ones by name, the others as they come."""
        repeated: dict[str, Any] = {"dest": OVERRIDES, "action": "append", "default": []}
        self.add_argument(f"--{OVERRIDES}", **repeated, help=argparse.SUPPRESS)
        group = self.add_argument_group("common options of the configuration")
        for letter, name, metavar, text in COMMON:
            if name not in self._option_string_actions:
                group.add_argument(*filter(None, (letter, name)), **repeated, metavar=metavar, help=text)
        from hpc_rl.config.reference import list_section_names

        self.epilog = f"{self.epilog}\n{OF_A_CONFIGURATION}\nsections: {', '.join(list_section_names())}"


def _make_number_parser(kind: Callable[[str], T], what: str, least: int = 0) -> Callable[[str], T]:
    """Return a parser of numbers of at least `least`; its error names the allowed values."""

    def parse(text: str) -> T:
        with suppress(ValueError):
            if least <= (number := kind(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"{text} can't be used; allowed: {what}, at least {least}")

    return parse


Count = _make_number_parser(int, "an integer")
PositiveCount = _make_number_parser(int, "an integer", least=1)
Seconds = _make_number_parser(float, "a number of seconds")


def parse_checkpoint_step(text: str | int) -> int:
    """Return the step of `40` or `gen-00000040`; 0 is an imported checkpoint."""
    match = re.fullmatch(r"(?:gen-)?([0-9]+)", str(text))  # jsonargparse may convert a value twice
    if match is None:
        expected = "expected a step such as 40 or gen-00000040"
        raise argparse.ArgumentTypeError(f"invalid checkpoint {text!r}: {expected}")
    return int(match[1])


class Action(NamedTuple):
    """One action of a command that has several."""

    make_parser: Callable[[], CommandParser]
    main: Callable[[Namespace], int]


def arrange_arguments(parser: ArgumentParser, argv: list[str]) -> list[str]:
    """Return the arguments as the parser of a command takes them: `-` is `_` in flags.

    Where the command has a configuration, files go behind --config and options, as typed, behind --overrides.
    """
    own = parser._option_string_actions  # argparse has no public list of a parser's options
    with_config = f"--{OVERRIDES}" in own
    positional = any(not action.option_strings for action in parser._actions)
    found: list[str] = []
    rest = iter(argv)
    for token in rest:
        flag, equals, value = token.partition("=")
        if token.startswith("--"):
            flag = f"--{flag[2:].replace('-', '_')}"
        action = own.get(flag)
        if token == "--" and "--run" in own:  # attach: a command of the user's
            return [*found, *(f"--run={one}" for one in rest)]
        if action is not None and action.dest != OVERRIDES:
            found.append(f"{flag}{equals}{value}")
            if not equals and action.nargs not in (0, "?"):
                found += islice(rest, 1)
        elif not with_config:
            found.append(token)
        elif token.startswith("-"):
            found += [f"--{OVERRIDES}={one}" for one in _take_override(own, token, rest)]
        elif DELETION.fullmatch(token):
            found.append(f"--{OVERRIDES}={token}")
        elif "=" not in token and positional:
            found.append(token)
        elif "=" not in token and (token.endswith(CONFIG_FILES) or os.path.isfile(token)):
            found.append(f"--config={token}")
        else:
            found.append(f"--{OVERRIDES}={token}")
    return found


def _take_override(own: dict[str, argparse.Action], token: str, rest: Iterator[str]) -> list[str]:
    """Return one option of the configuration, with its value if that is the next argument."""
    letter = own.get(token[:2])
    if letter is not None and not token.startswith("--"):
        value = [token[2:].removeprefix("=")] if len(token) > 2 else islice(rest, 1)
        return [letter.option_strings[-1], *value]
    if token.startswith("--") and (meant := _find_misspelt_flag(own, token)):
        raise ConfigError(f"there is no option {token.partition('=')[0]}: did you mean {meant}?")
    if token == "--":
        raise ConfigError("argument '--' is not understood: set an option by --a.b VALUE or a.b=VALUE.")
    return [token] if "=" in token else [token, *islice(rest, 1)]


def _find_misspelt_flag(own: dict[str, argparse.Action], token: str) -> str:
    """Return the option of the command that a name misspells; empty for one of a configuration."""
    name = token.partition("=")[0].replace("-", "_").lstrip("_")
    flags = [flag for flag, action in own.items() if flag.startswith("--") and action.dest != OVERRIDES]
    near = difflib.get_close_matches(f"--{name}", flags, n=1, cutoff=0.8)
    if not near or "." in name:
        return ""
    from hpc_rl.config.load.names import is_top_level

    return "" if is_top_level(name) else near[0]


def print_help(parser: ArgumentParser, argv: list[str]) -> bool:
    """Print what `--help [SECTION | OPTION | all]` asks for; return whether it was given.

    Raises ConfigError for a name that no configuration has.
    """
    before_command = argv[: argv.index("--")] if "--" in argv else argv
    asked = [number for number, token in enumerate(before_command) if token in ("-h", "--help")]
    if not asked:
        return False
    topic = "".join(before_command[asked[0] + 1 : asked[0] + 2])
    if not topic or topic.startswith("-") or f"--{OVERRIDES}" not in parser._option_string_actions:
        # argparse's own --help ignores that the output can't be written
        print(parser.format_help(), end="")
        return True
    from hpc_rl.config.reference import format_help

    print(format_help(topic.replace("-", "_")), end="")
    return True


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2, sort_keys=True, default=str))


def print_result(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """Print a result for programs where --json was given, else for people."""
    if as_json:
        print_json(value)
    else:
        for line in lines:
            print(line)


def align_columns(rows: list[list[str]], align: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Return rows as lines of equally wide columns; the last one is as wide as it is."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join([*map(align, row, widths), row[-1]]) for row in rows]
