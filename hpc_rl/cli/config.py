"""`hpc-rl config`: show a resolved configuration, compare two, and print schema, reference page and completion scripts."""

from __future__ import annotations

import argparse
import json
import sys

from hpc_rl.cli.options import add_config, new_parser, print_json
from hpc_rl.config.loading.load import Loaded, load
from hpc_rl.config.rules.check import check
from hpc_rl.config.sections.experiment import CONFIGS
from hpc_rl.config.show import Shown, as_json, as_yaml, derived_values, diff, show

ACTIONS = {
    "show": "every option with its value and where that came from, as YAML that loads again",
    "diff": "the options in which two configurations differ",
    "schema": "a JSON Schema, for editors that complete and check YAML",
    "reference": "the reference page, in Markdown",
    "completion": "a completion script for bash or zsh",
}


def run(argv: list[str]) -> int:
    if not argv or argv[0] not in ACTIONS:
        made = new_parser("config", "\n".join(f"{name:<11} {text}" for name, text in ACTIONS.items()))
        made.add_argument("action", choices=ACTIONS, metavar=f"{{{','.join(ACTIONS)}}}")
        made.parse_args(argv)
    return {
        "show": _show,
        "diff": _diff,
        "schema": _schema,
        "reference": _reference,
        "completion": _completion,
    }[argv[0]](argv[1:])


def _show(argv: list[str]) -> int:
    made = new_parser(
        "config show", ACTIONS["show"], "Options of the configuration may follow, as in submit."
    )
    add_config(made)
    made.add_argument("--json", action="store_true", help="one object: dotted option -> {value, origin}")
    args, overrides = made.parse_known_args(argv)
    loaded = check(load(args.config, overrides, presets=args.preset, cluster=args.cluster), files=False)
    shown = resolved(loaded)
    if args.json:
        print(json.dumps(as_json(shown), indent=2, default=str))
        return 0
    for note in loaded.notes:
        print(f"# note: {' '.join(note.split())}")
    print(as_yaml(shown), end="")
    return 0


def resolved(loaded: Loaded) -> dict[str, Shown]:
    """Everything, what is derived included. Raises ConfigError where no plan can be made."""
    from hpc_rl.plan.plan import make_plan

    plan = make_plan(loaded.config, loaded.explicit, interpreter=sys.executable, scheduler="slurm")
    return show(loaded, derived_values(loaded.config, plan.allocation))


def _diff(argv: list[str]) -> int:
    made = new_parser(
        "config diff", "Show the options in which two configurations differ. Exit code 1 if there are any."
    )
    made.add_argument("a", help="YAML file, or the config.json of a trial")
    made.add_argument("b", help="the same")
    made.add_argument("--json", action="store_true", help="one object: dotted option -> {a, b}")
    args = made.parse_args(argv)
    found = diff(*(resolved(check(load([path]), files=False)) for path in (args.a, args.b)))
    if args.json:
        print_json({name: {"a": a and vars(a), "b": b and vars(b)} for name, (a, b) in found.items()})
    else:
        for name, (a, b) in found.items():
            print(f"{name}: {_side(a)} -> {_side(b)}")
    return 1 if found else 0


def _side(shown: Shown | None) -> str:
    return "absent" if shown is None else f"{json.dumps(shown.value, ensure_ascii=False)} ({shown.origin})"


def _schema(argv: list[str]) -> int:
    from hpc_rl.config.json_schema import schema

    made = new_parser("config schema", "Print a JSON Schema (draft 2020-12) of a configuration file.")
    made.add_argument("--trainer", choices=CONFIGS, help="of one trainer only")
    print(json.dumps(schema(made.parse_args(argv).trainer), indent=2))
    return 0


def _reference(argv: list[str]) -> int:
    from hpc_rl.config.reference import reference

    new_parser("config reference", "Print the reference page of the configuration, in Markdown.").parse_args(
        argv
    )
    print(reference(), end="")
    return 0


def _completion(argv: list[str]) -> int:
    from hpc_rl.cli.completion import script

    made = new_parser(
        "config completion", 'Print a completion script: eval "$(hpc-rl config completion bash)".'
    )
    made.add_argument("shell", choices=["bash", "zsh"])
    args: argparse.Namespace = made.parse_args(argv)
    print(script(args.shell, ACTIONS), end="")
    return 0
