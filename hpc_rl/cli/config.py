"""`hpc-rl config`: show a resolved configuration, compare two; print schema, reference, completion."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_rl.cli.options import Action, CommandParser, Namespace, print_result
from hpc_rl.config.json_schema import schema
from hpc_rl.config.load.load import Loaded, load
from hpc_rl.config.load.parser import add_options
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.config.reference import reference
from hpc_rl.config.rules.check import check
from hpc_rl.config.show import DEFAULT, ResolvedValue, as_yaml, derived_values, diff, show
from hpc_rl.core.trial import read_object
from hpc_rl.plan.plan import make_plan
from hpc_rl.trials import trial_index
from hpc_rl.trials.user_code import code_differences

# Commands whose options of a configuration are completed; the others take them too, but seldom.
COMPLETED = (("submit",), ("check",), ("render",), ("recover",), ("config", "show"))


def parser() -> CommandParser:
    return CommandParser("Show and compare resolved configurations; print what describes them.")


def _show_parser() -> CommandParser:
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
        shown = {name: vars(item) for name, item in resolved(loaded).items()}
        print(json.dumps(shown, indent=2, default=str))
    else:
        print_resolved(loaded, found.notes)
    return 0


def print_resolved(loaded: Loaded, notes: Sequence[str]) -> None:
    """Print a checked configuration as YAML with origins, after these notes.

    A default that was replaced has the reason at its value; `check` and `submit` have all notes.
    """
    shown = resolved(loaded)
    for note in notes:
        print(f"# note: {' '.join(note.split())}")
    print(as_yaml(shown), end="")


def resolved(loaded: Loaded) -> dict[str, ResolvedValue]:
    """Everything, what is derived included. Raises ConfigError where no plan can be made."""
    plan = make_plan(loaded.config, loaded.explicit, interpreter=sys.executable, scheduler="slurm")
    return show(loaded, derived_values(loaded.config, plan.allocation))


def _diff_parser() -> CommandParser:
    made = CommandParser("the options in which two configurations differ", "Exit code 1 if there are any.")
    made.add_completed("a", help="YAML file, the config.json of a trial, or a trial, with its user code")
    made.add_completed("b", help="the same")
    made.add_flag(
        "--json", help="one object: dotted option -> {a, b}; `code` of an option: files that differ"
    )
    return made


def _diff(args: Namespace) -> int:
    sides = [_named(name) for name in (args.a, args.b)]
    found = diff(*(resolved(check(load([path]), files=False)) for path, _ in sides))
    # Of a section or member that the other side lacks, only what was set.
    found = {name: pair for name, pair in found.items() if None not in pair or not _is_default(pair)}
    rows = {name: {"a": a and vars(a), "b": b and vars(b)} for name, (a, b) in found.items()}
    lines = [f"{name}: {_side(a)} -> {_side(b)}" for name, (a, b) in found.items()]
    known = [code for _, code in sides if code is not None]
    if len(known) == 2:
        code = code_differences(known[0], known[1])
        rows |= {f"{name} code": {"a": a, "b": b} for name, (a, b) in code.items()}
        lines += [f"{name} code: {_code(a)} -> {_code(b)}" for name, (a, b) in code.items()]
    print_result(args.json, rows, lines)
    return 1 if rows else 0


def _named(name: str) -> tuple[Path, dict[str, Any] | None]:
    """Return the file of a configuration; of a trial also its user code. Raises TrialNameError."""
    path = Path(name).expanduser()
    if path.is_file() or name.endswith((".yaml", ".yml", ".json")):
        return path, None
    trial = trial_index.resolve(name)
    return trial.config_yaml, dict(read_object(trial.provenance_json).get("code") or {})


def _code(side: dict[str, Any] | None) -> str:
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


def _side(shown: ResolvedValue | None) -> str:
    return "absent" if shown is None else f"{json.dumps(shown.value, ensure_ascii=False)} ({shown.origin})"


def _schema_parser() -> CommandParser:
    made = CommandParser("a JSON Schema (draft 2020-12), for editors that complete and check YAML")
    made.add_argument("--trainer", choices=list(CONFIGS), help="of one trainer only")
    return made


def _schema(args: Namespace) -> int:

    print(json.dumps(schema(args.trainer), indent=2))
    return 0


def _reference(_args: Namespace) -> int:

    print(reference(), end="")
    return 0


# The names in the files of the trial index, in a hundredth of the time that Python takes to start.
INDEXED = (
    """find "${XDG_STATE_HOME:-$HOME/.local/state}/hpc-rl/trials" -name '*.json' -exec awk -F'"' """
    """'$2 == "experiment" {e = $4} $2 == "trial" {print $4; print e "/" $4}' {} + 2>/dev/null"""
)
# Completes options of a configuration as submit does, and a.b=VALUE as --a.b, beside names of files.
AS_SUBMIT = """
_hpc_rl() {
  local words=("${COMP_WORDS[@]}") word="${COMP_WORDS[COMP_CWORD]}" last=$COMP_CWORD own
  case "$word" in
    =) own=${words[last-1]} word= ;;
    *) [[ ${words[last-1]} != = ]] || own=${words[last-2]} ;;
  esac
  if [[ -n $own ]]; then  # a value: the shell splits at =
    COMP_WORDS=(hpc-rl submit "--${own#--}" "$word") COMP_CWORD=3
    _shtab_hpc_rl
    [[ ${#COMPREPLY[@]} != 0 ]] || COMPREPLY=($(compgen -f -- "$word"))
    return
  fi
  _shtab_hpc_rl
  case "${words[1]} ${words[2]}" in
    "run "* | "render "* | "recover "* | "fork "* | "config show")
      own=("${COMPREPLY[@]}")
      COMP_WORDS=(hpc-rl submit "${words[@]:last-1:2}") COMP_CWORD=3
      if [[ ${#own[@]} = 0 || $word == --* ]]; then
        _shtab_hpc_rl
        COMPREPLY=($(printf "%s\\n" "${own[@]}" "${COMPREPLY[@]}" | sort -u))
      fi ;;
  esac
  if [[ ${#COMPREPLY[@]} = 0 && $word == [a-z]*.* && $word != */* ]]; then
    COMP_WORDS[COMP_CWORD]="--$word"
    _shtab_hpc_rl
    [[ ${#COMPREPLY[@]} = 0 ]] || compopt -o nospace 2>/dev/null
    own=("${COMPREPLY[@]/#--/}")
    COMPREPLY=("${own[@]/%/=}" $(compgen -f -- "$word"))
  fi
}
complete -o bashdefault -F _hpc_rl hpc-rl
"""


COMPLETION = """It knows commands, options and their values, and the names of trials. To use it:
  hpc-rl config completion bash > ~/.hpc-rl.bash; echo "source ~/.hpc-rl.bash" >> ~/.bashrc"""


def _completion_parser() -> CommandParser:
    made = CommandParser("a completion script", COMPLETION)
    made.add_argument("shell", choices=["bash", "zsh"])
    return made


def _completion(args: Namespace) -> int:
    from hpc_rl.cli.__main__ import COMMANDS, build_parsers

    parsers = build_parsers(COMMANDS)
    for path in COMPLETED[: 1 if args.shell == "bash" else None]:  # bash: see AS_SUBMIT
        for cls in CONFIGS.values():
            add_options(parsers[path], cls)
    offer = {"bash": 'compgen -W "$({names})" -- "$1"', "zsh": "compadd -- $({names})"}[args.shell]
    names = f"_hpc_rl_trials() {{ {offer.format(names=INDEXED)}; }}"
    script = parsers[()].get_completion_script(f"shtab-{args.shell}", preambles=[names])
    print(script, AS_SUBMIT if args.shell == "bash" else "", sep="\n", end="")
    return 0


ACTIONS = {
    "show": Action(_show_parser, _show),
    "diff": Action(_diff_parser, _diff),
    "schema": Action(_schema_parser, _schema),
    "reference": Action(lambda: CommandParser("the reference page, in Markdown"), _reference),
    "completion": Action(_completion_parser, _completion),
}
