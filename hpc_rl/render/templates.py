"""The Jinja environment of every rendered file: strict about what is missing, and nothing reaches a shell unquoted.

Three filters, one for each place where a value may stand: `sh` (a shell word), `directive` (an `#SBATCH` value),
`comment` (one line of a comment). None of them takes None, and neither does a bare `{{ value }}`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from hpc_rl.errors import ConfigError
from hpc_rl.render.layers import LayeredEnvironment, Layers
from hpc_rl.render.roots import template_root

PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")
LINE_BREAK = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")


def sh(value: Any) -> str:
    """One shell word. Raises jinja2.UndefinedError for None, ConfigError for a NUL, which no shell can hold."""
    text = str(_present(value))
    if "\0" in text:
        raise ConfigError(f"{text!r} holds a NUL byte, which no shell word can.")
    return shlex.quote(text)


def directive(value: Any) -> str:
    """The value of an `#SBATCH` option, in sbatch's own quoting (a backslash escapes, inside quotes too).

    Raises ConfigError for line breaks: the rest of the value would become a line of the script.
    """
    text = str(_present(value))
    if LINE_BREAK.search(text):
        raise ConfigError(
            f"{text!r} can't be given to sbatch: an #SBATCH line holds no line breaks or control characters."
        )
    if PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def comment(value: Any) -> str:
    """Text that stays within one comment line."""
    return LINE_BREAK.sub(" ", str(_present(value)))


def environment(folders: Sequence[Path] = ()) -> LayeredEnvironment:
    """The environment over these directories, highest first, and ours below them (layers.py)."""
    jinja = LayeredEnvironment(
        loader=Layers([*folders, template_root()]),
        undefined=jinja2.StrictUndefined,
        finalize=_present,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    jinja.filters |= {"sh": sh, "directive": directive, "comment": comment}
    return jinja


def _present(value: Any) -> Any:
    if value is None:
        raise jinja2.UndefinedError("None reached a template: test for it there, or give a value")
    if isinstance(value, jinja2.Undefined):
        str(value)  # StrictUndefined raises, with the name
    return value
