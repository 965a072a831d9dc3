"""What a site changes of our templates: their blocks, overrides of them, and what is wrong with those."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2 import nodes

from hpc_rl.errors import ConfigError
from hpc_rl.render.jinja_environment import LayeredEnvironment, template_root

FOLDERS = ("sbatch", "templates")
# Blocks that were elsewhere in earlier versions -> where they are now.
MOVED = {
    "site": "all scripts of a trial share it: move it to templates/site.sh.j2 (hpc-rl templates eject site)",
}
# Templates with one block that is meant to be ejected.
MAIN_BLOCK = {"templates/site.sh.j2": "site", "templates/steps.sh.j2": "trainer"}


@dataclass(frozen=True)
class Override:
    """A file above ours."""

    template: str
    path: Path
    blocks: list[str]  # that it replaces
    extends: str  # empty: it replaces the whole file


@functools.cache
def shipped() -> dict[str, list[str]]:
    """Return the templates with blocks that may be overridden -> their blocks, in their order."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((template_root() / folder).glob("*.j2")):
            if blocks := blocks_of(path):
                found[f"{folder}/{path.name}"] = blocks
    return found


def blocks_of(path: Path) -> list[str]:
    """Return the blocks of a file. Raises ConfigError for one that Jinja can't read."""
    return [node.name for node in _parsed(path).find_all(nodes.Block)]


def _parsed(path: Path) -> nodes.Template:
    try:
        return LayeredEnvironment().parse(path.read_text(encoding="utf-8"))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.message}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from error


def known(template: str) -> str:
    """Return the full name of a template, by `trial.sbatch.j2` or `trial` as well. Raises ConfigError."""
    for name in shipped():
        file = name.partition("/")[2]
        if template in (name, file, file.split(".")[0]):
            return name
    raise ConfigError(f"there is no template {template!r}; known: {', '.join(shipped())}.")


def overrides(layers: Sequence[Path]) -> list[Override]:
    """Return the files that change a template, highest precedence first. Raises ConfigError."""
    found = []
    for template in shipped():
        for path in (folder / template for folder in layers):
            if path.is_file():
                parents = [node.template for node in _parsed(path).find_all(nodes.Extends)]
                extends = next((one.value for one in parents if isinstance(one, nodes.Const)), "")
                found.append(Override(template, path, blocks_of(path), extends))
    return found


def _no_such_block(template: str, block: str) -> str:
    place = MOVED.get(block, f"it has {', '.join(shipped()[template])}")
    return f"{template} has no block {block!r}: {place}."


def unknown_blocks(layers: Sequence[Path]) -> list[str]:
    """Return the overrides of blocks that ours does not have: Jinja would drop them silently."""
    return [
        f"{override.path}: {_no_such_block(override.template, block)}"
        for override in overrides(layers)
        for block in override.blocks
        if override.extends and block not in shipped()[override.template]
    ]


def refuse_overrides(layers: Sequence[Path]) -> None:
    """Raise ConfigError for overrides of blocks that ours does not have."""
    if wrong := unknown_blocks(layers):
        raise ConfigError(" ".join(wrong))


def problems(layers: Sequence[Path]) -> list[str]:
    """Return likely mistakes: unknown blocks, whole files instead of blocks, unused files."""
    found = unknown_blocks(layers)
    found += [
        f"{override.path}: it replaces the whole file and will miss what a new version changes; "
        f"begin it with {_extends(override.template)}"
        for override in overrides(layers)
        if not override.extends
    ]
    paths = [path for layer in layers for folder in FOLDERS for path in sorted((layer / folder).glob("*"))]
    found += [
        f"{path}: not used; templates that can be overridden: {', '.join(shipped())}."
        for path in paths
        if path.is_file() and f"{path.parent.name}/{path.name}" not in shipped()
    ]
    return found


def _extends(template: str) -> str:
    return f'{{% extends "below/{template}" %}}'


def ejected(template: str, blocks: Sequence[str]) -> str:
    """Return an override of some blocks as they are in ours. Raises ConfigError for unknown blocks."""
    source = (template_root() / template).read_text(encoding="utf-8")
    texts = [
        _extends(template),
        "{# `below` is what this file changes: another site's override, or ours.",
        '   {{ super() }} keeps its text; {{ super() | without("--mem") }} drops an #SBATCH line. #}',
    ]
    for block in blocks or [MAIN_BLOCK.get(template, shipped()[template][0])]:
        match = re.search(
            rf"{{%-? block {re.escape(block)}(?: scoped)? %}}\n?(.*?)({{%-? endblock %}})", source, re.DOTALL
        )
        if match is None:
            raise ConfigError(_no_such_block(template, block))
        body = match[1].rstrip("\n") if match[1].strip() else "{{ super() }}"
        texts += ["", f"{{% block {block} %}}", body, match[2]]
    return "\n".join(texts) + "\n"
