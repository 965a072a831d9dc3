"""A site's overrides of shipped templates: find them, check them, make new ones."""

import base64
import functools
import hashlib
import importlib.metadata
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2 import nodes

from hpc_rl.core.errors import ConfigError
from hpc_rl.render.jinja_environment import FilterCall, LayeredEnvironment, find_template_root

FOLDERS = ("sbatch", "templates")
GIT_TIMEOUT_S = 10.0
# Templates with a block that sites usually override.
MAIN_BLOCK = {"templates/site.sh.j2": "site", "templates/steps.sh.j2": "trainer"}


@dataclass(frozen=True)
class Override:
    """A file that overrides a shipped template."""

    template: str
    path: Path
    blocks: list[str]  # replaced blocks
    extends: str  # parent template; empty: the whole file is replaced


@functools.cache
def list_templates() -> dict[str, list[str]]:
    """Return the templates with overridable blocks -> their blocks, in order."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((find_template_root() / folder).glob("*.j2")):
            if blocks := list_blocks(path):
                found[f"{folder}/{path.name}"] = blocks
    return found


def list_blocks(path: Path) -> list[str]:
    """Return the blocks of a file. Raises ConfigError if Jinja can't parse it."""
    return [node.name for node in _parse(path).find_all(nodes.Block)]


def _parse(path: Path) -> nodes.Template:
    try:
        return LayeredEnvironment().parse(path.read_text(encoding="utf-8"))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.message}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from error


def resolve_template(template: str) -> str:
    """Return the full name of a template; accepts `trial.sbatch.j2` and `trial`. Raises ConfigError."""
    for name in list_templates():
        file = name.partition("/")[2]
        if template in (name, file, file.split(".")[0]):
            return name
    raise ConfigError(f"there is no template {template!r}; known: {', '.join(list_templates())}.")


def find_overrides(layers: Sequence[Path]) -> list[Override]:
    """Return the overrides of a template, highest precedence first. Raises ConfigError."""
    found = []
    for template in list_templates():
        for path in (folder / template for folder in layers):
            if path.is_file():
                parents = [node.template for node in _parse(path).find_all(nodes.Extends)]
                extends = next((one.value for one in parents if isinstance(one, nodes.Const)), "")
                found.append(Override(template, path, list_blocks(path), extends))
    return found


def _make_block_error(template: str, block: str) -> str:
    others = [name for name, blocks in list_templates().items() if block in blocks]
    place = f"; {' and '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else ""
    return f"{template} has no block {block!r}{place}. Its blocks: {', '.join(list_templates()[template])}."


def find_unknown_blocks(layers: Sequence[Path]) -> list[str]:
    """Return overrides of missing blocks: Jinja would drop them silently."""
    return [
        f"{override.path}: {_make_block_error(override.template, block)}"
        for override in find_overrides(layers)
        for block in override.blocks
        if override.extends and block not in list_templates()[override.template]
    ]


def refuse_overrides(layers: Sequence[Path]) -> None:
    """Raise ConfigError for overrides of blocks that the shipped template does not have."""
    if wrong := find_unknown_blocks(layers):
        raise ConfigError(" ".join(wrong))


def find_problems(layers: Sequence[Path]) -> list[str]:
    """Return likely mistakes: unknown blocks, whole files instead of blocks, unused files."""
    found = find_unknown_blocks(layers)
    found += [
        f"{override.path}: this file replaces the whole file {override.template}, so it misses changes of "
        f"new versions of hpc-rl; begin it with {_make_extends(override.template)}"
        for override in find_overrides(layers)
        if not override.extends
    ]
    paths = [path for layer in layers for folder in FOLDERS for path in sorted((layer / folder).glob("*"))]
    found += [
        f"{path}: no template has this name, so the file has no effect; the templates are "
        f"{', '.join(list_templates())}."
        for path in paths
        if path.is_file() and f"{path.parent.name}/{path.name}" not in list_templates()
    ]
    return found


def find_useless_filters(effects: Mapping[FilterCall, bool], layers: Sequence[Path]) -> list[str]:
    """Return filters in overrides that changed nothing in any sample."""
    return [
        f"{used.path}:{used.line}: {used.call} matches nothing in any sample script. Correct or remove it; "
        "if only some trials have that text, put it within {% if … %}."
        for used, has_effect in effects.items()
        if not has_effect and any(Path(used.path).is_relative_to(layer) for layer in layers)
    ]


def find_edited() -> list[Path]:
    """Return the shipped templates that were edited by hand, according to the installation or git."""
    root = find_template_root()
    if root.name == "_data":
        files = importlib.metadata.files("hpc-rl") or []
        hashes = {Path(str(file.locate())): file.hash for file in files if file.hash}
        paths = [path for folder in FOLDERS for path in sorted((root / folder).glob("*"))]
        return [
            path for path in paths if path in hashes and _hash(path, hashes[path].mode) != hashes[path].value
        ]
    if not (root / ".git").exists():
        return []
    command = ["git", "--no-optional-locks", "-C", str(root), "diff", "--name-only", "HEAD", "--", *FOLDERS]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [root / line for line in said.splitlines()]


def _hash(path: Path, algorithm: str) -> str:
    """Return the hash of a file in the format of wheels."""
    digest = hashlib.new(algorithm, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _make_extends(template: str) -> str:
    return f'{{% extends "below/{template}" %}}'


def eject(template: str, blocks: Sequence[str]) -> str:
    """Return an override with a copy of some shipped blocks. Raises ConfigError for unknown blocks."""
    source = (find_template_root() / template).read_text(encoding="utf-8")
    texts = [
        _make_extends(template),
        "{# This file overrides `below`: another override of the site, or the shipped template.",
        '   {{ super() }} keeps its text; {{ super() | without("--mem") }} drops an #SBATCH line. #}',
    ]
    for block in blocks or [MAIN_BLOCK.get(template, list_templates()[template][0])]:
        match = re.search(
            rf"{{%-? block {re.escape(block)}(?: scoped)? %}}\n?(.*?)({{%-? endblock %}})", source, re.DOTALL
        )
        if match is None:
            raise ConfigError(_make_block_error(template, block))
        body = match[1].rstrip("\n") if match[1].strip() else "{{ super() }}"
        texts += ["", f"{{% block {block} %}}", body, match[2]]
    return "\n".join(texts) + "\n"
