"""Static completion scripts by shtab: commands, actions, and every option. Nothing is started at TAB."""

from __future__ import annotations

from hpc_rl.cli.__main__ import COMMANDS, build_parsers
from hpc_rl.config.loading.parser import add_options
from hpc_rl.config.sections.experiment import CONFIGS

# The other commands take options of a configuration too, but seldom.
WITH_OPTIONS = (("submit",), ("render",), ("recover",), ("config", "show"))


def script(shell: str) -> str:
    """Return the script for `bash` or `zsh`."""
    parsers = build_parsers(COMMANDS)
    for path in WITH_OPTIONS:
        for cls in CONFIGS.values():
            add_options(parsers[path], cls)
    return parsers[()].get_completion_script(f"shtab-{shell}")
