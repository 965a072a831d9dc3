"""Static completion scripts: commands, own options, and every option of a configuration. Nothing is started at TAB."""

from __future__ import annotations

from hpc_rl.cli.__main__ import COMMANDS
from hpc_rl.config.build import options, section_of
from hpc_rl.config.load import ALIASES
from hpc_rl.config.root import CONFIGS

WITH_CONFIG = ("submit", "render", "recover")
_OWN = ("--config", "--preset", "--help")


def script(shell: str) -> str:
    """For `bash` or `zsh` (which runs the bash one)."""
    known = {name for cls in CONFIGS.values() for name, hint in options(cls).items() if not section_of(hint)}
    flags = " ".join(f"--{name}" for name in sorted({*known, *ALIASES}))
    body = f"""# made by `hpc-rl config completion {shell}`
_hpc_rl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)}" -- "$word"))
  elif [[ $before == --config ]]; then
    COMPREPLY=($(compgen -f -- "$word"))
  elif [[ $before == --preset ]]; then
    COMPREPLY=($(compgen -W "atlas cpu" -- "$word"))
  elif [[ $command == config && COMP_CWORD -eq 2 ]]; then
    COMPREPLY=($(compgen -W "show diff schema reference completion" -- "$word"))
  elif [[ $word == --* && ( {" || ".join(f"$command == {name}" for name in (*WITH_CONFIG, "config"))} ) ]]; then
    COMPREPLY=($(compgen -W "{" ".join(_OWN)} {flags}" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -F _hpc_rl hpc-rl
"""
    return "autoload -U +X bashcompinit && bashcompinit\n" + body if shell == "zsh" else body
