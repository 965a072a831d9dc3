"""What a site changes of our templates: which blocks there are, who overrides them, how an override looks, what is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2 import nodes

from hpc_rl.errors import ConfigError
from hpc_rl.render.roots import template_root
from hpc_rl.render.templates import environment

FOLDERS = ("sbatch", "templates")
_COMMENT = {"site": "what this machine or cluster needs: module load …; it runs with `set +u`"}


@dataclass(frozen=True)
class Override:
    """A file above ours, and the blocks that it replaces."""

    template: str
    path: Path
    blocks: list[str]
    extends: str  # empty: it replaces the whole file


def shipped() -> dict[str, list[str]]:
    """Templates with blocks that may be overridden -> their blocks, in their order."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((template_root() / folder).glob("*.j2")):
            blocks = blocks_of(path)
            if blocks:
                found[f"{folder}/{path.name}"] = blocks
    return found


def blocks_of(path: Path) -> list[str]:
    """Raises ConfigError for a file that Jinja can't read."""
    return [node.name for node in _parsed(path).find_all(nodes.Block)]


def _parsed(path: Path) -> nodes.Template:
    try:
        return environment().parse(path.read_text(encoding="utf-8"))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.message}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from error


def known(template: str) -> str:
    """The full name of one of our templates, `trial.sbatch.j2` and `trial` included. Raises ConfigError."""
    names = [
        name
        for name in shipped()
        if template in (name, name.partition("/")[2], name.partition("/")[2].split(".")[0])
    ]
    if not names:
        raise ConfigError(f"there is no template {template!r}; known: {', '.join(shipped())}.")
    return names[0]


def overrides(layers: Sequence[Path]) -> list[Override]:
    """Everything in these directories that has a say, highest precedence first. Raises ConfigError."""
    found = []
    for template in shipped():
        for folder in layers:
            path = folder / template
            if path.is_file():
                parents = [
                    node.template.value
                    for node in _parsed(path).find_all(nodes.Extends)
                    if isinstance(node.template, nodes.Const)
                ]
                found.append(Override(template, path, blocks_of(path), parents[0] if parents else ""))
    return found


def problems(layers: Sequence[Path]) -> list[str]:
    """What can't be meant: blocks that ours does not have, whole files instead of blocks, files that nothing reads."""
    found = []
    ours = shipped()
    for override in overrides(layers):
        where = f"{override.path}"
        for block in override.blocks:
            if block not in ours[override.template] and override.extends:
                has = ", ".join(ours[override.template])
                found.append(
                    f"{where}: {override.template} has no block {block!r}, so it has no effect; it has {has}."
                )
        if not override.extends:
            whole = "it replaces the whole file and will miss what a new version changes"
            found.append(f"{where}: {whole}; begin it with {_extends(override.template)}")
    for folder in layers:
        for path in sorted(path for name in FOLDERS for path in (folder / name).glob("*") if path.is_file()):
            if f"{path.parent.name}/{path.name}" not in ours:
                found.append(
                    f"{path}: nothing reads it; templates that can be overridden: {', '.join(ours)}."
                )
    return found


def _extends(template: str) -> str:
    return f'{{% extends "below/{template}" %}}'


def ejected(template: str, blocks: Sequence[str]) -> str:
    """An override of some blocks as they are in ours, to be edited. Raises ConfigError for a block that is not there."""
    source = (template_root() / template).read_text(encoding="utf-8")
    texts = [
        _extends(template),
        "{# `below` is what lies beneath this file: another site's override, or ours. {{ super() }} keeps its text. #}",
    ]
    for block in blocks:
        match = re.search(rf"{{%-? block {re.escape(block)} %}}\n?(.*?){{%-? endblock %}}", source, re.DOTALL)
        if match is None:
            raise ConfigError(f"{template} has no block {block!r}; it has {', '.join(shipped()[template])}.")
        body = match[1]
        # Macros and imports of ours are not visible in a block of another file.
        body = body if body.strip() and "lines(" not in body else "{{ super() }}"
        note = f"# {_COMMENT[block]}\n" if block in _COMMENT else ""
        texts += [
            "",
            f"{{% block {block} %}}",
            *([note.rstrip()] if note else []),
            body.strip("\n"),
            "{% endblock %}",
        ]
    return "\n".join(texts) + "\n"
