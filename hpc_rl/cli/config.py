"""`hpc-rl config`: show a resolved configuration, compare two; print schema, reference, completion."""

import json
import sys

from hpc_rl.cli.options import Action, ArgumentParser, Namespace, add_config, new_parser, print_json
from hpc_rl.config.loading.load import Loaded, load
from hpc_rl.config.rules.check import check
from hpc_rl.config.sections.experiment import CONFIGS
from hpc_rl.config.show import ResolvedValue, as_json, as_yaml, derived_values, diff, show

# Commands whose options of a configuration are completed; the others take them too, but seldom.
COMPLETED = (("submit",), ("render",), ("recover",), ("config", "show"))


def parser() -> ArgumentParser:
    """Return the parser of the command; its actions have their own."""
    return new_parser("Show and compare resolved configurations; print what describes them.")


def _show_parser() -> ArgumentParser:
    made = new_parser("Print every option with its value and where that came from, as YAML that loads again.")
    add_config(made)
    made.add_argument("--json", action="store_true", help="one object: dotted option -> {value, origin}")
    return made


def _show(args: Namespace) -> int:
    loaded = check(load(args.config, args.overrides, presets=args.preset, cluster=args.cluster), files=False)
    if args.json:
        print(json.dumps(as_json(resolved(loaded)), indent=2, default=str))
    else:
        print_resolved(loaded)
    return 0


def print_resolved(loaded: Loaded) -> None:
    """Print a checked configuration as YAML with origins, after its notes."""
    shown = resolved(loaded)
    for note in loaded.notes:
        print(f"# note: {' '.join(note.split())}")
    print(as_yaml(shown), end="")


def resolved(loaded: Loaded) -> dict[str, ResolvedValue]:
    """Everything, what is derived included. Raises ConfigError where no plan can be made."""
    from hpc_rl.plan.plan import make_plan

    plan = make_plan(loaded.config, loaded.explicit, interpreter=sys.executable, scheduler="slurm")
    return show(loaded, derived_values(loaded.config, plan.allocation))


def _diff_parser() -> ArgumentParser:
    made = new_parser("Show the options in which two configurations differ. Exit code 1 if there are any.")
    made.add_argument("a", help="YAML file, or the config.json of a trial")
    made.add_argument("b", help="the same")
    made.add_argument("--json", action="store_true", help="one object: dotted option -> {a, b}")
    return made


def _diff(args: Namespace) -> int:
    found = diff(*(resolved(check(load([path]), files=False)) for path in (args.a, args.b)))
    if args.json:
        print_json({name: {"a": a and vars(a), "b": b and vars(b)} for name, (a, b) in found.items()})
    else:
        for name, (a, b) in found.items():
            print(f"{name}: {_side(a)} -> {_side(b)}")
    return 1 if found else 0


def _side(shown: ResolvedValue | None) -> str:
    return "absent" if shown is None else f"{json.dumps(shown.value, ensure_ascii=False)} ({shown.origin})"


def _schema_parser() -> ArgumentParser:
    made = new_parser("Print a JSON Schema (draft 2020-12) of a configuration file.")
    made.add_argument("--trainer", choices=list(CONFIGS), help="of one trainer only")
    return made


def _schema(args: Namespace) -> int:
    from hpc_rl.config.json_schema import schema

    print(json.dumps(schema(args.trainer), indent=2))
    return 0


def _reference(_args: Namespace) -> int:
    from hpc_rl.config.reference import reference

    print(reference(), end="")
    return 0


def _completion_parser() -> ArgumentParser:
    made = new_parser('Print a completion script: eval "$(hpc-rl config completion bash)".')
    made.add_argument("shell", choices=["bash", "zsh"])
    return made


def _completion(args: Namespace) -> int:
    from hpc_rl.cli.__main__ import COMMANDS, build_parsers
    from hpc_rl.config.loading.parser import add_options

    parsers = build_parsers(COMMANDS)
    for path in COMPLETED:
        for cls in CONFIGS.values():
            add_options(parsers[path], cls)
    print(parsers[()].get_completion_script(f"shtab-{args.shell}"), end="")
    return 0


ACTIONS = {
    "show": Action("every option with its value and where that came from", _show_parser, _show),
    "diff": Action("the options in which two configurations differ", _diff_parser, _diff),
    "schema": Action("a JSON Schema, for editors that complete and check YAML", _schema_parser, _schema),
    "reference": Action("the reference page, in Markdown", lambda: new_parser("Print it."), _reference),
    "completion": Action("a completion script for bash or zsh", _completion_parser, _completion),
}
