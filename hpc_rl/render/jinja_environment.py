"""Templates: their layers, overrides of blocks, and filters that quote values.

Layers are directories: the trial's, the site's, the shipped one. An override begins with `{% extends
"below/sbatch/trial.sbatch.j2" %}`: `below` is the next layer with that file, so that overrides of a user and
of a site add up. `builtin/<name>` is always the shipped file.

Every value passes a filter for its place: `sh` (a shell word), `lines` (lines of shell words), `directive`
(an `#SBATCH` value), `comment` (one line of a comment). All of them refuse None, and so does a bare `{{
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


def find_template_root() -> Path:
    """Return the folder of the shipped `templates/` and `sbatch/`: in the wheel, or next to the package."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_data"
    return packaged if packaged.is_dir() else package.parent


# -- filters


def sh(value: Any) -> str:
    """Return one shell word. Raises jinja2.UndefinedError for None, ConfigError for a NUL byte."""
    text = str(_check_present(value))
    if "\0" in text:
        raise ConfigError(f"{text!r} has a NUL byte, which no argument of a command can have.")
    return shlex.quote(text)


def lines(groups: Iterable[Iterable[str]]) -> str:
    """Return groups of shell words, one line each, for a command that continues after them."""
    return "".join(f"{' '.join(sh(word) for word in group)} \\\n    " for group in groups if group)


def directive(value: Any) -> str:
    """Quote the value of an `#SBATCH` option for sbatch: a backslash escapes, also inside quotes.

    Raises ConfigError for line breaks: the rest of the value would become a line of the script.
    """
    text = str(_check_present(value))
    if LINE_BREAK.search(text):
        raise ConfigError(
            f"{text!r} can't be given to sbatch: an #SBATCH line holds no line breaks or control characters."
        )
    if PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def sbatch(options: Iterable[tuple[str, str | None]]) -> str:
    """Return `#SBATCH` lines of (name, value); an empty value is a flag, None an unused option."""
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
    """Drop options from `#SBATCH` lines, as `{{ super() | without("--mem") }}` in an override."""
    if wrong := [name for name in names if not name.startswith("--")]:
        raise ConfigError(
            f"the template filter `without` takes long options of sbatch, such as --mem, not {wrong[0]!r}."
        )
    for name in names:
        text, count = re.subn(rf"(?m)^##?SBATCH {re.escape(name)}(=.*)?\n", "", text)
        _record(f'without("{name}")', bool(count))
    return text


def replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """Return text with `old` replaced by `new`, like Jinja's own filter."""
    text = str(_check_present(text))
    _record(f'replace("{old}", …)', old in text)
    return text.replace(old, new, -1 if count is None else count)


@dataclass(frozen=True)
class FilterCall:
    """A use of a text-changing filter in a template."""

    path: str
    line: int
    call: str  # as `without("--mem")`


_effects: ContextVar[dict[FilterCall, bool] | None] = ContextVar("effects", default=None)


@contextmanager
def filter_effects() -> Iterator[dict[FilterCall, bool]]:
    """Collect the uses of `without` and `replace` while rendering, and whether each changed text."""
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
    # The caller of the filter is the compiled template, which has its file and line.
    frame = sys._getframe(2)
    template = frame.f_globals.get("__jinja_template__")
    line = template.get_corresponding_lineno(frame.f_lineno) if template else 0
    used = FilterCall(frame.f_code.co_filename, line, call)
    effects[used] = effects.get(used, False) or has_effect


def comment(value: Any) -> str:
    """Return text on one line, for a comment."""
    return LINE_BREAK.sub(" ", str(_check_present(value)))


FILTERS = (sh, lines, directive, sbatch, sbatch_words, without, replace, comment)


def _check_present(value: Any) -> Any:
    if value is None:
        raise jinja2.UndefinedError(
            "a value that the template uses is None: test for that with {% if %}, or set its option"
        )
    if isinstance(value, jinja2.Undefined):
        str(value)  # StrictUndefined raises, with the name
    return value


# -- layers


class CompiledTemplates(jinja2.BytecodeCache):
    """Templates compiled in this process: a submission renders in several environments."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        """Load the code of the same text under the same name."""
        bucket.code = self._compiled.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep the code."""
        if bucket.code is not None:
            self._compiled[bucket.key, bucket.checksum] = bucket.code


COMPILED = CompiledTemplates()


class LayeredEnvironment(jinja2.Environment):
    """An environment over directories, highest precedence first, above the shipped templates."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self.folders = [*folders, find_template_root()]
        super().__init__(
            loader=jinja2.FunctionLoader(self._load_source),
            undefined=jinja2.StrictUndefined,
            finalize=_check_present,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
            bytecode_cache=COMPILED,
        )
        self.filters |= {made.__name__: made for made in FILTERS}

    def _find(self, template: str) -> tuple[int, Path] | None:
        """Return the layer with a template, and its file. `@2/<name>` is searched from layer 2 on."""
        first, (place, _, name) = 0, template.partition("/")
        if place == BUILTIN:
            first = len(self.folders) - 1
        elif place.startswith("@"):
            first = int(place[1:])
        else:
            name = template
        parts = split_template_path(name)  # refuses paths out of the folder
        for layer in range(first, len(self.folders)):
            path = self.folders[layer].joinpath(*parts)
            if path.is_file():
                return layer, path
        return None

    def _load_source(self, template: str) -> tuple[str, str, None] | None:
        found = self._find(template)
        return (found[1].read_text(encoding="utf-8"), str(found[1]), None) if found else None

    def join_path(self, template: str, parent: str) -> str:
        """Resolve the name of a template in `parent`: `below/…` is searched below the layer of `parent`."""
        place, _, name = template.partition("/")
        found = self._find(parent) if place == BELOW else None
        return f"@{found[0] + 1}/{name}" if found else template

    def find_overrides(self, name: str) -> list[Path]:
        """Return the files that override a template, highest precedence first."""
        return [path for folder in self.folders[:-1] if (path := folder / name).is_file()]
