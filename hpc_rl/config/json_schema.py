"""JSON Schema (draft 2020-12) of a configuration file, for editors that complete and check YAML; from the dataclasses."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from hpc_rl.config.loading.arguments import docstring_texts
from hpc_rl.config.loading.build import alternatives, default_of, hints, is_optional, section_of
from hpc_rl.config.sections.experiment import CONFIGS
from hpc_rl.config.sections.limits import Grammar, Limits
from hpc_rl.config.tables.atlas import ALIASES

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_BOUNDS = {
    "at_least": "minimum",
    "at_most": "maximum",
    "above": "exclusiveMinimum",
    "below": "exclusiveMaximum",
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}


def schema(trainer: str | None = None) -> dict[str, Any]:
    """Of one trainer's configuration, or of any. A file that is laid over another one need not have what is required."""
    defs: dict[str, Any] = {
        "interpolation": {
            "type": "string",
            "pattern": r"\$\{",
            "description": "A value taken from another option: ${a.b}.",
        }
    }
    chosen = [trainer] if trainer else list(CONFIGS)
    refs = [_define(CONFIGS[name], defs) for name in chosen]
    for name in chosen:  # other names stand at the top level, and options by their whole dotted names
        top = defs[CONFIGS[name].__name__]
        top["properties"] |= {
            alias: {"description": f"ATLAS: {what.describe()}"} for alias, what in ALIASES.items()
        }
        top["patternProperties"] = {r"^[a-z0-9_]+\.[a-z0-9_.]+$": {}}
    whole = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"$schema": DRAFT, "title": "hpc-rl configuration", **whole, "$defs": defs}


def _define(cls: type, defs: dict[str, Any]) -> dict[str, str]:
    ref = {"$ref": f"#/$defs/{cls.__name__}"}
    if cls.__name__ in defs:
        return ref
    made: dict[str, Any] = {"type": "object", "additionalProperties": False}
    defs[cls.__name__] = made
    made["description"] = (cls.__doc__ or "").partition("\n\n")[0].replace("\n", " ").strip()
    texts = docstring_texts(cls)
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        hint = hints(cls)[field.name]
        section = section_of(hint)
        if section:
            of: dict[str, Any] = dict(_define(section, defs))
            if is_optional(hint):
                of = {"anyOf": [of, {"type": "null"}]}
        else:
            of = _option(hint)
        default = default_of(field)
        if default is dataclasses.MISSING:
            required.append(field.name)
        elif not section:
            of["default"] = default
        properties[field.name] = {**of, "description": texts[field.name]}
    made |= {"properties": properties, "required": required}
    return ref


def _option(hint: Any) -> dict[str, Any]:
    kinds = [_kind(kind) for kind in alternatives(hint)]
    return {"anyOf": [*kinds, {"$ref": "#/$defs/interpolation"}]}


def _kind(kind: Any) -> dict[str, Any]:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        base, *extras = typing.get_args(kind)
        made = _kind(base)
        for extra in extras:
            if isinstance(extra, Limits):
                found = {word: getattr(extra, name) for name, word in _BOUNDS.items()}
                made |= {word: bound for word, bound in found.items() if bound is not None}
            elif isinstance(extra, Grammar):
                made = {
                    "type": "string" if extra.quoted else made["type"],
                    "pattern": f"^(?:{extra.pattern})$",
                }
        return made
    if origin is Literal:
        return {"enum": list(typing.get_args(kind))}
    if origin is list:
        return {
            "type": "array",
            "items": {"anyOf": [_kind(typing.get_args(kind)[0]), {"$ref": "#/$defs/interpolation"}]},
        }
    if origin is dict:
        return {"type": "object", "additionalProperties": _kind(typing.get_args(kind)[1])}
    if kind is str:
        return {"type": ["string", "number"]}  # `account: 1234` keeps its digits
    if kind is Any:
        return {}
    return {"type": _TYPES[kind]}
