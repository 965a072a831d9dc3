"""Make a JSON Schema (draft 2020-12) of a configuration file, for editors that complete and check YAML.

jsonargparse writes a draft. This module adds limits, references (`${a.b}`), ATLAS names and dotted keys.
"""

import functools
import json
import typing
from typing import Any

from hpc_rl.config.compat.areal_names import AT_TOP
from hpc_rl.config.compat.atlas import ALIASES
from hpc_rl.config.load.fields import (
    FREE_KEY,
    find_section,
    is_mapping,
    is_optional,
    list_alternatives,
    list_hints,
    list_limits,
    strip_limits,
)
from hpc_rl.config.load.parser import make_parser, parse_docstrings
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.config.options.limits import AsWritten, Grammar, Limits

REFERENCE = {"$ref": "#/$defs/reference"}
_BOUNDS = {
    "at_least": "minimum",
    "at_most": "maximum",
    "above": "exclusiveMinimum",
    "below": "exclusiveMaximum",
}


def make_schema(trainer: str | None = None) -> dict[str, Any]:
    """Return the schema of one trainer's configuration, or of all trainers'."""
    text = "A value taken from another option: ${a.b}."
    defs: dict[str, Any] = {"reference": {"type": "string", "pattern": r"\$\{", "description": text}}
    chosen = [trainer] if trainer else list(CONFIGS)
    draft = ""
    for name in chosen:
        made = json.loads(_make_draft(CONFIGS[name]))
        draft = made.pop("$schema")
        defs[CONFIGS[name].__name__] = _complete_section(CONFIGS[name], made)
        for alias, what in ALIASES.items():
            made["properties"][alias] = {"description": f"ATLAS: {what.describe()}"}
        made["properties"] |= {alias: {"description": "A name of AReaL's files."} for alias in AT_TOP}
        made["patternProperties"] = {r"^[a-z0-9_]+\.[A-Za-z0-9_.-]+$": {}}
    refs = [{"$ref": f"#/$defs/{CONFIGS[name].__name__}"} for name in chosen]
    whole = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"$schema": draft, "title": "hpc-rl configuration", **whole, "$defs": defs}


@functools.cache
def _make_draft(cls: type) -> str:
    return make_parser(cls).get_completion_script("jsonschema")


def _complete_section(cls: type, made: dict[str, Any]) -> dict[str, Any]:
    """Complete the schema of a section in place."""
    made["properties"].pop("$schema", None)
    texts = parse_docstrings(cls)
    inner: dict[str, Any]
    for name, hint in list_hints(cls).items():
        of = made["properties"][name]
        section = find_section(hint)
        if section and is_mapping(hint):
            (key,) = list_limits(typing.get_args(hint)[0])
            member = {"anyOf": [_complete_section(section, of["properties"][FREE_KEY]), {"type": "null"}]}
            members = {f"^(?:{key.pattern})$": member}
            inner = {"type": "object", "patternProperties": members, "additionalProperties": False}
        elif section:
            inner = _complete_section(section, of)
            if is_optional(hint):
                inner = {"anyOf": [inner, {"type": "null"}]}
                if name in made.get("required", []):
                    made["required"].remove(name)
        else:
            inner = _complete_option(hint, of)
        made["properties"][name] = inner | {"description": texts[name]}
    return made


def _complete_option(hint: Any, of: dict[str, Any]) -> dict[str, Any]:
    kept = {key: of.pop(key) for key in ("default",) if key in of}
    of.pop("description", None)
    extras = list_limits(hint)
    if typing.get_origin(hint) is dict and any(
        isinstance(one, AsWritten) for one in list_limits(typing.get_args(hint)[1])
    ):
        of["additionalProperties"] = True
    for extra in extras:
        if isinstance(extra, Grammar):
            of["pattern"] = f"^(?:{extra.pattern})$"
        elif isinstance(extra, Limits):
            of |= {_BOUNDS[name]: bound for name, bound in vars(extra).items() if bound is not None}
    is_text = any(strip_limits(kind) is str for kind in list_alternatives(hint))
    quoted = any(isinstance(extra, Grammar) and extra.quoted for extra in extras)
    # `account: 1234` is text: the loader keeps the digits as written.
    number = [{"type": "number"}] if is_text and not quoted else []
    return {"anyOf": [of, *number, REFERENCE], **kept}
