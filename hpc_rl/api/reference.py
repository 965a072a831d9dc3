"""The API reference, docs/api.md, from the docstrings of every public name of `hpc_rl`.

Run it to write the page:

    python -m hpc_rl.api.reference docs/api.md
"""

import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hpc_rl

HEAD = """# API reference

Every name of `import hpc_rl`, from its docstring. [Python](python.md) shows how to use them. This page is
generated: `python -m hpc_rl.api.reference docs/api.md`.
"""
ORDER = ("load", "check", "submit", "list_trials", "Trial", "sweep", "Sweep")  # first; others by name
_MODULES = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Za-z_])")  # of types in a signature


def make_reference() -> str:
    """Return the page."""
    names = [
        *ORDER,
        *sorted(set(hpc_rl.__all__) - {*ORDER, "__version__"}, key=lambda name: (name.lower(), name)),
    ]
    parts = [HEAD]
    for name in names:
        parts += _describe(name, getattr(hpc_rl, name))
    return "\n".join(parts).rstrip() + "\n"


def _describe(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"## {name}\n"
        yield from _describe_function(name, value)
        return
    yield f"## {name}\n"
    if issubclass(value, Exception):
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        yield f"An exception; a kind of {bases}.\n"
    elif not issubclass(value, enum.Enum) and "__init__" in vars(value):
        yield f"```text\n{_format_signature(name, value.__init__, skips_self=True, returns=False)}\n```\n"
    yield f"{format_docstring(inspect.getdoc(value) or '')}\n"
    if issubclass(value, enum.Enum):
        yield f"Values: {', '.join(f'`{member.value}`' for member in value)}.\n"
    if dataclasses.is_dataclass(value):
        yield "| field | type |\n|---|---|"
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                yield f"| `{field.name}` | `{_format_type(field.type)}` |"
        yield ""
    for key, member in _list_members(value):
        yield f"### {name}.{key}\n"
        if isinstance(member, property):
            returned = _find_signature(member.fget).return_annotation if member.fget else ""
            yield f"A property: `{_format_type(returned)}`.\n"
            yield f"{format_docstring(inspect.getdoc(member) or '')}\n"
        else:
            yield from _describe_function(f"{name}.{key}", member, skips_self=True)


def _list_members(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class of this package defines itself."""
    for key, member in vars(value).items():
        if not key.startswith("_") and (isinstance(member, property) or inspect.isfunction(member)):
            yield key, member


def _describe_function(name: str, function: Any, skips_self: bool = False) -> Iterator[str]:
    yield f"```text\n{_format_signature(name, function, skips_self)}\n```\n"
    yield f"{format_docstring(inspect.getdoc(function) or '')}\n"


def _format_signature(name: str, function: Any, skips_self: bool, returns: bool = True) -> str:
    signature = _find_signature(function)
    parameters = list(signature.parameters.values())[1 if skips_self else 0 :]
    shown = signature.replace(parameters=parameters)
    if not returns:
        shown = shown.replace(return_annotation=inspect.Signature.empty)
    form = _MODULES.sub("", str(shown))
    if len(name) + len(form) <= 100:
        return f"{name}{form}"
    result = form.rpartition(") -> ")[2] if returns and ") -> " in form else ""
    lines = [_MODULES.sub("", str(one)) for one in parameters]
    named = next((number for number, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY), None)
    has_star = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if named is not None and not has_star:
        lines.insert(named, "*")
    end = f") -> {result}" if result else ")"
    return "\n".join([f"{name}(", *(f"    {line}," for line in lines), end])


def _find_signature(function: Any) -> inspect.Signature:
    """Return the signature with its types, or with their names if only type checkers import them."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:
        return inspect.signature(function)


def _format_type(kind: Any) -> str:
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return _MODULES.sub("", text).replace("|", "\\|")


def format_docstring(text: str) -> str:
    """Return a docstring of Google's style as Markdown: arguments become a list."""
    lines: list[str] = []
    in_arguments = False
    for line in text.splitlines():
        if line == "Args:":
            in_arguments = True
            continue
        if in_arguments and line.startswith("    "):
            match = re.match(r"    (\w+): (.*)", line)
            lines.append(f"- `{match[1]}`: {match[2]}" if match else f"  {line.strip()}")
            continue
        in_arguments = in_arguments and not line.strip()
        if line.startswith("    ") and lines and not lines[-1]:
            lines.append("```text")  # an example
            lines.append(line)
            continue
        lines.append(line)
    return "\n".join(_close_fences(lines))


def _close_fences(lines: list[str]) -> Iterator[str]:
    """Yield lines with the end of each example, which is not indented in a fence."""
    is_open = False
    for line in lines:
        if is_open and line.strip() and not line.startswith("    "):
            yield "```\n"
            is_open = False
        is_open = is_open or line == "```text"
        yield line.removeprefix("    ") if is_open else line
    if is_open:
        yield "```"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_reference())
