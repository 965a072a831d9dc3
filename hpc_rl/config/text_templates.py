r"""Fill texts with named values: `{name}` stands for a value, every other brace is text.

This is not `str.format`, which fails on `\boxed{}`. Values are not searched for names. Braces around the
argument of a LaTeX command, as in `\boxed{x}`, or around both arguments, as in `\frac{a}{b}`, are text too;
`\boxed{{question}}` contains a value. Only the commands in _TWO have two arguments, so
`\section{Approach}{approach}` ends with a value. A command has at least two letters, because `\n` before a
name may be a line break in an unquoted YAML text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_TWO = r"(?:[dtc]?frac|[dt]?binom|overset|underset|stackrel|textcolor|colorbox|href)"
_COMMAND = rf"\\(?:{_TWO}\{{[^{{}}]*\}}|[A-Za-z]{{2,}})\{{[^{{}}]*\}}"
_NAMED = re.compile(_COMMAND + r"|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")


def list_names(template: str) -> list[str]:
    """Return the names in a template, in order, each once."""
    found = (match["name"] for match in _NAMED.finditer(template))
    return list(dict.fromkeys(name for name in found if name))


def fill_template(template: str, values: Mapping[str, Any]) -> str:
    """Fill in the values, which are not searched for names. Raises KeyError for an unknown name."""
    return _NAMED.sub(lambda match: make_text(values[match["name"]]) if match["name"] else match[0], template)


def make_text(value: Any) -> str:
    """Convert a column, or the content of a message, to text: null to nothing, other types to JSON.

    A content in parts becomes its texts, joined.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "type" in one for one in value):
        return "".join(str(one.get("text", "")) for one in value)
    return json.dumps(value, ensure_ascii=False, default=str)
