"""`hpc-rl config`: show a resolved configuration, compare two; print schema, reference, completion."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_rl.cli import completion
from hpc_rl.cli.options import Action, CommandParser, Namespace, print_result
from hpc_rl.config.json_schema import make_schema
from hpc_rl.config.load.load import Loaded, load
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.config.reference import make_pages, make_reference
from hpc_rl.config.rules.check import check
from hpc_rl.config.show import DEFAULT, ResolvedValue, derive_values, diff, format_yaml, show
from hpc_rl.core.trial import load_object
from hpc_rl.plan.plan import make_plan
from hpc_rl.trials import trial_index
from hpc_rl.trials.user_code import code_differences


def make_parser() -> CommandParser:
    return CommandParser("Show and compare resolved configurations; print what describes them.")


def _make_show_parser() -> CommandParser:
    made = CommandParser(
        "every option with its value and where that came from", "Prints YAML that loads again."
    )
    made.add_config()
    made.add_flag("--json", help="one object: dotted option -> {value, origin}")
    return made


def _show(args: Namespace) -> int:
    found = load(args.config, args.overrides, presets=args.preset, cluster=args.cluster, environ=os.environ)
    loaded = check(found, files=False)
    if args.json:
        shown = {name: vars(item) for name, item in resolve_values(loaded).items()}
        print(json.dumps(shown, indent=2, default=str))
    else:
        print_resolved(loaded, found.notes)
    return 0


def resolve_values(loaded: Loaded) -> dict[str, ResolvedValue]:
    """Return every option with its value and origin, derived values included.

    Raises ConfigError if no plan can be made.
    """
    plan = make_plan(loaded.config, loaded.explicit, interpreter=sys.executable, scheduler="slurm")
    return show(loaded, derive_values(loaded.config, plan.allocation))


def print_resolved(loaded: Loaded, notes: Sequence[object]) -> None:
    """Print a checked configuration as YAML with origins, after these notes.

    A default that was replaced has the reason at its value; `check` and `submit` have all notes.
    """
    shown = resolve_values(loaded)
    for note in notes:
        print(f"# note: {' '.join(str(note).split())}")
    print(format_yaml(shown), end="")


def print_config(loaded: Loaded) -> int:
    """Print the resolved configuration of a command, with the origin of each value."""
    print_resolved(check(loaded, files=False), loaded.notes)
    return 0


def _make_diff_parser() -> CommandParser:
    made = CommandParser("the options that differ in two configurations", "Exit code 1 if there are any.")
    made.add_completed("a", help="YAML file, the config.json of a trial, or a trial, with its user code")
    made.add_completed("b", help="the same")
    made.add_flag(
        "--json", help="one object: dotted option -> {a, b}; `code` of an option: files that differ"
    )
    return made


def _diff(args: Namespace) -> int:
    sides = [_find_side(name) for name in (args.a, args.b)]
    found = diff(*(resolve_values(check(load([path]), files=False)) for path, _ in sides))
    # If the other side lacks a section or member, keep only the explicit values.
    found = {name: pair for name, pair in found.items() if None not in pair or not _is_default(pair)}
    rows = {name: {"a": a and vars(a), "b": b and vars(b)} for name, (a, b) in found.items()}
    lines = [f"{name}: {_describe_side(a)} -> {_describe_side(b)}" for name, (a, b) in found.items()]
    known = [code for _, code in sides if code is not None]
    if len(known) == 2:
        code = code_differences(known[0], known[1])
        rows |= {f"{name} code": {"a": a, "b": b} for name, (a, b) in code.items()}
        lines += [f"{name} code: {_describe_code(a)} -> {_describe_code(b)}" for name, (a, b) in code.items()]
    print_result(args.json, rows, lines)
    return 1 if rows else 0


def _find_side(name: str) -> tuple[Path, dict[str, Any] | None]:
    """Return the file of a configuration; of a trial also its user code. Raises TrialNameError."""
    path = Path(name).expanduser()
    if path.is_file() or name.endswith((".yaml", ".yml", ".json")):
        return path, None
    trial = trial_index.resolve(name)
    return trial.config_yaml, dict(load_object(trial.provenance_json).get("code") or {})


def _describe_code(side: dict[str, Any] | None) -> str:
    if side is None:
        return "none"
    git = side.get("git") or {}
    commit = (
        f", commit {git['commit'][:12]}{' with changes' if git.get('dirty') else ''}"
        if git.get("commit")
        else ""
    )
    return f"{side.get('file')} (sha256 {str(side.get('sha256'))[:12]}{commit})"


def _is_default(pair: tuple[ResolvedValue | None, ResolvedValue | None]) -> bool:
    return all(one is None or one.origin == DEFAULT for one in pair)


def _describe_side(shown: ResolvedValue | None) -> str:
    return "absent" if shown is None else f"{json.dumps(shown.value, ensure_ascii=False)} ({shown.origin})"


def _make_schema_parser() -> CommandParser:
    made = CommandParser("a JSON Schema (draft 2020-12), for editors that complete and check YAML")
    made.add_argument("--trainer", choices=list(CONFIGS), help="only options of this trainer")
    return made


def _print_schema(args: Namespace) -> int:

    print(json.dumps(make_schema(args.trainer), indent=2))
    return 0


def _make_reference_parser() -> CommandParser:
    made = CommandParser("a reference of all options, in Markdown")
    made.add_argument("--output", metavar="DIR", help="write one page per section into DIR; print nothing")
    return made


def _print_reference(args: Namespace) -> int:
    if args.output is None:
        print(make_reference(), end="")
        return 0
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in make_pages().items():
        (folder / name).write_text(text)
    return 0


ACTIONS = {
    "show": Action(_make_show_parser, _show),
    "diff": Action(_make_diff_parser, _diff),
    "schema": Action(_make_schema_parser, _print_schema),
    "reference": Action(_make_reference_parser, _print_reference),
    "completion": Action(completion.make_parser, completion.main),
}
