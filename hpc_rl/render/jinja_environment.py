"""Templates: where they are, how layers override blocks of ours, and the filters that keep values inert.

Layers are directories: a trial's own, the site's, ours. An override begins with `{% extends
"below/sbatch/trial.sbatch.j2" %}`: `below` is the next layer that has the file, so that a user's override and
the site's add up. `builtin/<name>` is ours, whatever overrides it.

Every value passes a filter for its place: `sh` (a shell word), `lines` (lines of shell words), `directive`
(an `#SBATCH` value), `comment` (one line of a comment). None of them takes None, and neither does a bare `{{
value }}`.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2
from jinja2.bccache import Bucket
from jinja2.loaders import split_template_path

from hpc_rl.core.errors import ConfigError

BELOW, BUILTIN = "below", "builtin"
PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")
LINE_BREAK = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")


def template_root() -> Path:
    """Return the folder of our `templates/` and `sbatch/`: in the wheel, or beside the package."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_data"
    return packaged if packaged.is_dir() else package.parent


# -- filters


def sh(value: Any) -> str:
    """Return one shell word. Raises jinja2.UndefinedError for None, ConfigError for a NUL byte."""
    text = str(_present(value))
    if "\0" in text:
        raise ConfigError(f"{text!r} holds a NUL byte, which no shell word can.")
    return shlex.quote(text)


def lines(groups: Iterable[Iterable[str]]) -> str:
    """Return groups of shell words, each with a line of its own in a command that continues after them."""
    return "".join(f"{' '.join(sh(word) for word in group)} \\\n    " for group in groups if group)


def directive(value: Any) -> str:
    """Return the value of an `#SBATCH` option in sbatch's quoting: a backslash escapes, also inside quotes.

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


def sbatch(options: Iterable[tuple[str, str | None]]) -> str:
    """Return `#SBATCH` lines of (name, value); an empty value is an option without one, None an unused."""
    text = ""
    for name, value in options:
        if value is None:
            text += f"##SBATCH --{name}=\n"
        else:
            text += f"#SBATCH --{name}={directive(value)}\n" if value else f"#SBATCH --{name}\n"
    return text


def sbatch_words(arguments: Iterable[Sequence[str]]) -> str:
    """Return an `#SBATCH` line for each list of words."""
    return "".join(f"#SBATCH {' '.join(directive(word) for word in words)}\n" for words in arguments)


def without(text: str, *names: str) -> str:
    """Return `#SBATCH` lines without these options, as `{{ super() | without("--mem") }}` in an override."""
    if wrong := [name for name in names if not name.startswith("--")]:
        raise ConfigError(f"the filter without takes long options of sbatch, as --mem, not {wrong[0]!r}.")
    for name in names:
        text, count = re.subn(rf"(?m)^##?SBATCH {re.escape(name)}(=.*)?\n", "", text)
        _record(f'without("{name}")', bool(count))
    return text


def replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """Return text with `old` replaced by `new`, as Jinja's own filter does."""
    text = str(_present(text))
    _record(f'replace("{old}", …)', old in text)
    return text.replace(old, new, -1 if count is None else count)


@dataclass(frozen=True)
class FilterCall:
    """A place in a template that changes text by a filter."""

    path: str
    line: int
    call: str  # as `without("--mem")`


_effects: ContextVar[dict[FilterCall, bool] | None] = ContextVar("effects", default=None)


@contextmanager
def filter_effects() -> Iterator[dict[FilterCall, bool]]:
    """Give each use of `without` and `replace` in what is rendered meanwhile, and whether it changed text."""
    effects: dict[FilterCall, bool] = {}
    token = _effects.set(effects)
    try:
        yield effects
    finally:
        _effects.reset(token)


def _record(call: str, has_effect: bool) -> None:
    effects = _effects.get()
    if effects is None:
        return
    # The caller of the filter is the compiled template, which knows its file and its lines.
    frame = sys._getframe(2)
    template = frame.f_globals.get("__jinja_template__")
    line = template.get_corresponding_lineno(frame.f_lineno) if template else 0
    used = FilterCall(frame.f_code.co_filename, line, call)
    effects[used] = effects.get(used, False) or has_effect


def comment(value: Any) -> str:
    """Return text that stays within one comment line."""
    return LINE_BREAK.sub(" ", str(_present(value)))


FILTERS = (sh, lines, directive, sbatch, sbatch_words, without, replace, comment)


def _present(value: Any) -> Any:
    if value is None:
        raise jinja2.UndefinedError("None reached a template: test for it there, or give a value")
    if isinstance(value, jinja2.Undefined):
        str(value)  # StrictUndefined raises, with the name
    return value


# -- layers


class CompiledTemplates(jinja2.BytecodeCache):
    """What this process compiled: a submission renders in several environments."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        """Give the code of the same text under the same name."""
        bucket.code = self._compiled.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep the code."""
        if bucket.code is not None:
            self._compiled[bucket.key, bucket.checksum] = bucket.code


COMPILED = CompiledTemplates()


class LayeredEnvironment(jinja2.Environment):
    """An environment over directories, highest precedence first, and ours below them."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self.folders = [*folders, template_root()]
        super().__init__(
            loader=jinja2.FunctionLoader(self._source),
            undefined=jinja2.StrictUndefined,
            finalize=_present,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
            bytecode_cache=COMPILED,
        )
        self.filters |= {made.__name__: made for made in FILTERS}

    def _find(self, template: str) -> tuple[int, Path] | None:
        """Return the layer that has a template, and its file. `@2/<name>` is searched from layer 2 on."""
        first, (place, _, name) = 0, template.partition("/")
        if place == BUILTIN:
            first = len(self.folders) - 1
        elif place.startswith("@"):
            first = int(place[1:])
        else:
            name = template
        parts = split_template_path(name)  # refuses what would lead out of the folder
        for layer in range(first, len(self.folders)):
            path = self.folders[layer].joinpath(*parts)
            if path.is_file():
                return layer, path
        return None

    def _source(self, template: str) -> tuple[str, str, None] | None:
        found = self._find(template)
        return (found[1].read_text(encoding="utf-8"), str(found[1]), None) if found else None

    def join_path(self, template: str, parent: str) -> str:
        """Return the name of a template that `parent` names: `below/…` is searched below its own layer."""
        place, _, name = template.partition("/")
        found = self._find(parent) if place == BELOW else None
        return f"@{found[0] + 1}/{name}" if found else template

    def overrides(self, name: str) -> list[Path]:
        """Return the files above ours that change a template, highest first."""
        return [path for folder in self.folders[:-1] if (path := folder / name).is_file()]
