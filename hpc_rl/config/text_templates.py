r"""Texts with named values: `{name}` stands for a value, every other brace is text.

Never `str.format`: it fails on `\boxed{}`, and what a value holds is not a template. Braces that are the
argument of a LaTeX command, as in `\boxed{x}`, or its two arguments, as in `\frac{a}{b}`, are text too;
`\boxed{{question}}` has a value in them. Only the commands of _TWO have two arguments, so that
`\section{Approach}{approach}` ends with a value. A command has at least two letters, for `\n` before a name
may be a line's end in an unquoted YAML text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_TWO = r"(?:[dtc]?frac|[dt]?binom|overset|underset|stackrel|textcolor|colorbox|href)"
_COMMAND = rf"\\(?:{_TWO}\{{[^{{}}]*\}}|[A-Za-z]{{2,}})\{{[^{{}}]*\}}"
_NAMED = re.compile(_COMMAND + r"|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")


def names_in(template: str) -> list[str]:
    """Return the names that stand for values, in order, each once."""
    found = (match["name"] for match in _NAMED.finditer(template))
    return list(dict.fromkeys(name for name in found if name))


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return the text with its values, which are not searched for names. Raises KeyError for another name."""
    return _NAMED.sub(lambda match: as_text(values[match["name"]]) if match["name"] else match[0], template)


def as_text(value: Any) -> str:
    """Return a column, or the content of a message, as text: null as nothing, other kinds as JSON.

    Of a content in parts these are the texts.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "type" in one for one in value):
        return "".join(str(one.get("text", "")) for one in value)
    return json.dumps(value, ensure_ascii=False, default=str)
