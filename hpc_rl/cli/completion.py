"""Static completion scripts: commands, their actions, and every option that their `--help` has. Nothing is started at TAB."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Collection

from hpc_rl.cli import checkpoint, templates
from hpc_rl.cli.__main__ import COMMANDS, main
from hpc_rl.config.sections.experiment import CONFIGS

_LINE = re.compile(r"^  (-.*?)(?:  |$)", re.MULTILINE)  # of an option, without what it means
_OPTION = re.compile(r"--[a-z][\w.]*(?![\w.-])")


def script(shell: str, actions_of_config: Collection[str]) -> str:
    """For `bash` or `zsh` (which runs the bash one)."""
    groups = {"config": actions_of_config, "checkpoint": checkpoint.ACTIONS, "templates": templates.ACTIONS}
    of_a_configuration = (
        options_of("submit") - options_of("status") - {"--dry_run", "--no_check", "--parsable"}
    )
    cases = []
    for command in COMMANDS:
        for action in groups.get(command, ("",)):
            options = options_of(f"{command} {action}".strip())
            if (command, action) == ("config", "show"):
                options |= of_a_configuration
            cases.append(f'    "{command} {action}") options="{" ".join(sorted(options))}" ;;')
    of_actions = "\n".join(
        f'    {command}) words="{" ".join(actions)}" ;;' for command, actions in groups.items()
    )
    body = f"""# made by `hpc-rl config completion {shell}`
_hpc_rl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
  local action="" words="" options=""
  COMPREPLY=()
  case $command in
{of_actions}
  esac
  if [[ -n $words ]] && ((COMP_CWORD > 2)); then action=${{COMP_WORDS[2]}}; fi
  if ((COMP_CWORD == 1)); then
    words="{" ".join(COMMANDS)}"
  elif [[ $before == --preset ]]; then
    words="atlas cpu"
  elif [[ $before == --trainer ]]; then
    words="{" ".join(CONFIGS)}"
  elif [[ "$command $action" == "config completion" ]]; then
    words="bash zsh"
  elif [[ -z $words ]] || ((COMP_CWORD > 2)); then
    words=""
  fi
  if [[ $word == --* ]]; then
    case "$command $action" in
{chr(10).join(cases)}
    esac
    words=$options
  fi
  if [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -F _hpc_rl hpc-rl
"""
    return "autoload -U +X bashcompinit && bashcompinit\n" + body if shell == "zsh" else body


def options_of(command: str) -> set[str]:
    """The options that the help of a command lists, those of the configuration among them."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return {option for line in _LINE.findall(said.getvalue()) for option in _OPTION.findall(line)} - {"--a.b"}
