"""`hpc-rl config completion`: the script by which a shell completes commands, options, trials and metrics."""

from hpc_rl.cli.options import CommandParser, Namespace
from hpc_rl.config.load.parser import add_options
from hpc_rl.config.options.experiment import CONFIGS

# Commands whose options of a configuration are completed; the others take them too, but seldom.
COMPLETED = (("submit",), ("check",), ("render",), ("recover",), ("config", "show"))
# The names in the files of the trial index, in a hundredth of the time that Python takes to start.
INDEXED = (
    """find "${XDG_STATE_HOME:-$HOME/.local/state}/hpc-rl/trials" -name '*.json' -exec awk -F'"' """
    """'$2 == "experiment" {e = $4} $2 == "trial" {print $4; print e "/" $4}' {} + 2>/dev/null"""
)
# The names in the newest rows of metrics, of the trials among the words of the line, else of all trials.
LIST_METRICS = r"""
_hpc_rl_list_metrics() {
  {
    find "${XDG_STATE_HOME:-$HOME/.local/state}/hpc-rl/trials" -name '*.json' \
      -exec awk -F'"' -v named=" $* " '
        $2 == "dir" { dir = $4 }
        $2 == "experiment" { experiment = $4 }
        $2 == "trial" {
          all = all dir "\n"
          if (index(named, " " $4 " ") || index(named, " " experiment "/" $4 " ")) some = some dir "\n"
        }
        END { printf "%s", some ? some : all }' {} + |
      while IFS= read -r dir; do tail -n 3 "$dir"/attempts/*/metrics.*.jsonl; done |
      grep -oE '"[^"]+": *-?[0-9]' | cut -d'"' -f2 | grep -vxE 'step|time|lineage|total_steps'
    echo held-out
  } 2>/dev/null | sort -u
}
"""
COMPLETE_METRICS = {  # names are separated by commas
    "bash": r"""
_hpc_rl_metrics() {
  local before=
  [[ $1 != *,* ]] || before="${1%,*},"
  compgen -P "$before" -W "$(_hpc_rl_list_metrics "${COMP_WORDS[@]}")" -- "${1##*,}"
}
""",
    "zsh": r"""
_hpc_rl_metrics() { compset -P '*,'; compadd -- $(_hpc_rl_list_metrics $words) }
""",
}
# Completes options of a configuration as submit does, and a.b=VALUE as --a.b, and names of files.
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


COMPLETION = """It knows commands, options and their values, the names of trials and of metrics. To use it:
  hpc-rl config completion bash > ~/.hpc-rl.bash; echo "source ~/.hpc-rl.bash" >> ~/.bashrc"""


def make_parser() -> CommandParser:
    made = CommandParser("a completion script", COMPLETION)
    made.add_argument("shell", choices=["bash", "zsh"])
    return made


def main(args: Namespace) -> int:
    from hpc_rl.cli.__main__ import COMMANDS, build_parsers

    parsers = build_parsers(COMMANDS)
    options = CommandParser("the options of all configurations")
    for cls in CONFIGS.values():
        add_options(options, cls)
    for path in COMPLETED[: 1 if args.shell == "bash" else None]:  # bash: see AS_SUBMIT
        _copy_options(options, parsers[path])
    offer = {"bash": 'compgen -W "$({names})" -- "$1"', "zsh": "compadd -- $({names})"}[args.shell]
    names = f"_hpc_rl_trials() {{ {offer.format(names=INDEXED)}; }}"
    preambles = [names, LIST_METRICS, COMPLETE_METRICS[args.shell]]
    script = parsers[()].get_completion_script(f"shtab-{args.shell}", preambles=preambles)
    print(script, AS_SUBMIT if args.shell == "bash" else "", sep="\n", end="")
    return 0


def _copy_options(source: CommandParser, target: CommandParser) -> None:
    """Give a parser the options that it lacks: to copy one takes a hundredth of the time of making it."""
    for action in source._actions:
        if not target._option_string_actions.keys() & set(action.option_strings):
            target._add_action(action)
