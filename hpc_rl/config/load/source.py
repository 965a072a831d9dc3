"""Read settings from YAML files and the command line: each value by dotted name, with its origin.

Files are YAML 1.2: `24:00:00`, `0123`, `no` and `1_0` are text, `1e-6` is a number.
"""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hpc_rl.config.load.fields import find_members, find_section, list_options, make_generic
from hpc_rl.config.options.experiment import CONFIGS
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import find_similar_file
from hpc_rl.core.refusal import Kind, Refusal


@dataclass(frozen=True)
class SourceValue:
    """A value with its origin. A mapping or a list holds SourceValues; `text` is the source text of a scalar.

    If an option accepts text, an argument of the command line is text: `--launcher.slurm.time 90` needs no
    quotes.
    """

    value: Any
    origin: str
    text: str | None = None
    is_argument: bool = False
    is_deletion: bool = False  # `~a.b`, or `~a.b=value`, which deletes only this value

    def to_plain(self) -> Any:
        """Return the value without origins."""
        if isinstance(self.value, dict):
            return {key: item.to_plain() for key, item in self.value.items()}
        return [item.to_plain() for item in self.value] if isinstance(self.value, list) else self.value

    @property
    def shown(self) -> str:
        """The value as messages show it."""
        value = self.to_plain()
        if value is None:
            return "nothing" if self.is_argument and not self.text else "null"
        shown = self.text if self.text is not None else repr(value)
        if not shown.isprintable():
            shown = repr(shown)
        if len(shown) > LONGEST_SHOWN:
            shown = f"{shown[: LONGEST_SHOWN // 2]}… ({len(shown)} characters)"
        return shown

    def __str__(self) -> str:
        """Return the value with its type, for messages about a wrong type."""
        value = self.to_plain()
        return (
            self.shown
            if value is None
            else f"{self.shown} ({_TYPE_NAMES.get(type(value), type(value).__name__)})"
        )


LONGEST_SHOWN = 200  # characters of a value in a message
Settings = dict[str, SourceValue]  # by dotted name; a section is an entry only if it is empty or null
_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


def add_origin(data: Any, origin: str) -> SourceValue:
    """Convert plain data to a SourceValue with one origin."""
    if isinstance(data, dict):
        return SourceValue({str(key): add_origin(item, origin) for key, item in data.items()}, origin)
    if isinstance(data, list):
        return SourceValue([add_origin(item, origin) for item in data], origin)
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    return SourceValue(data, origin, str(data) if is_number else None)


class Yaml12(yaml.SafeLoader):
    """PyYAML with the scalars of YAML 1.2's core schema, except octal and hexadecimal numbers."""

    num_values = 0
    has_references = True  # else `${` is text
    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [
            (tag, rx)
            for tag, rx in pairs
            if tag.rsplit(":", 1)[1] not in {"bool", "int", "float", "timestamp"}
        ]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class FastYaml12(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same with libyaml's parser, which is several times as fast."""

    num_values = 0
    has_references = True
    yaml_implicit_resolvers = Yaml12.yaml_implicit_resolvers


MOST_VALUES = 100_000  # in one file; an alias counts at each use
WHOLE_REFERENCE = re.compile(r"\$\{([\w.-]+)\}")  # names of sets and pools may have hyphens
MAX_EXPANSIONS = 10
_REFERENCE = re.compile(r"(\\*)\$\{")
_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge", "value")
}
_FLOAT = (
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
for _tag, _regex, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
):
    Yaml12.add_implicit_resolver("tag:yaml.org,2002:" + _tag, re.compile(f"^(?:{_regex})$"), list(_first))


MAX_FILE_BYTES = 1 << 19


def _refuse(why: str, kind: Kind = Kind.FILE) -> ConfigError:
    return ConfigError(Refusal(option="", kind=kind, why=why))


def load_yaml(path: Path) -> Settings:
    """Return the settings of a file. Raises ConfigError if it is missing, invalid YAML or no mapping.

    In a .json file, such as a trial's config.json, `${` is text, not a reference.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)  # a device may never end
        if len(data) > MAX_FILE_BYTES:
            raise _refuse(
                f"config file {path} has more than {MAX_FILE_BYTES >> 10} KiB, which no configuration needs: "
                "did you name the right file?"
            )
        text = data.decode("utf-8")
    except OSError as error:
        near = find_similar_file(path) if isinstance(error, FileNotFoundError) else ""
        hint = f" Did you mean {path.with_name(near)}?" if near else ""
        raise _refuse(f"config file {path} can't be read: {error.strerror}.{hint}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise _refuse(f"config file {path} can't be read: line {line} is not UTF-8 text.") from error
    tree = _parse(text, str(path), has_references=path.suffix != ".json")
    if not isinstance(tree.value, dict | None):
        raise _refuse(
            f"config file {path} must hold a mapping of options (key: value), "
            f"not {type(tree.value).__name__}."
        )
    return flatten_settings(tree) if tree.value else {}


def flatten_settings(tree: SourceValue, prefix: str = "") -> Settings:
    """Flatten sections to dotted names. Raises ConfigError for an option that is set twice."""
    found: Settings = {}
    for key, value in tree.value.items():
        name, item = prefix + key, replace(value, is_argument=value.is_argument or tree.is_argument)
        is_section = isinstance(item.value, dict) and item.value and _is_section(name)
        for inner, setting in (flatten_settings(item, f"{name}.") if is_section else {name: item}).items():
            if inner in found:
                why, origin = (
                    f"set twice in one file, also at {found[inner].origin}; remove one",
                    setting.origin,
                )
                raise ConfigError(Refusal(option=inner, origin=origin, kind=Kind.CONFLICT, why=why))
            found[inner] = setting
    return found


def _is_section(name: str) -> bool:
    return _find_section(name) is not None


def _find_section(name: str) -> type | None:
    """Return the class of a section."""
    known = _list_sections()
    return next((known[one] for cls in CONFIGS.values() if (one := make_generic(cls, name)) in known), None)


@cache
def _list_sections() -> dict[str, type]:
    every = (item for cls in CONFIGS.values() for item in list_options(cls).items())
    return {name: section for name, hint in every if (section := find_section(hint)) is not None}


def merge(sources: Iterable[Settings]) -> Settings:
    """Merge sources; later ones win. Null removes a section, and a later option in it brings it back."""
    merged: Settings = {}
    for source in sources:
        for name, item in source.items():
            if item.value is None:
                merged = {other: kept for other, kept in merged.items() if not other.startswith(f"{name}.")}
            above = name
            while above := above.rpartition(".")[0]:
                if above in merged and merged[above].value is None:
                    del merged[above]
            merged[name] = item
    return merged


def expand_references(settings: Settings) -> Settings:
    """Replace `a: ${b}` by the settings of b; options in a stay.

    Both are sections, of one kind, or one has further options, as `actor` has for `ref`.
    """
    expanded = dict(settings)
    for _ in range(MAX_EXPANSIONS):  # each resolves one level of references to references
        before = dict(expanded)
        for name, item in before.items():
            match = WHOLE_REFERENCE.fullmatch(item.value) if isinstance(item.value, str) else None
            kind, other_kind = _find_section(name), _find_section(match[1]) if match else None
            if match is None or kind is None or other_kind is None:
                continue
            if not issubclass(kind, other_kind) and not issubclass(other_kind, kind):
                continue
            del expanded[name]
            inside = {other: one for other, one in before.items() if f"{other}.".startswith(f"{match[1]}.")}
            for other, one in inside.items():
                expanded.setdefault(name + other.removeprefix(match[1]), one)
        if expanded == before:
            break
    return expanded


def remove_setting(settings: Settings, name: str) -> Settings:
    """Remove an option, a section, or a key of a mapping."""
    kept = {
        other: item for other, item in settings.items() if other != name and not other.startswith(f"{name}.")
    }
    above = name
    while above := above.rpartition(".")[0]:
        item = kept.get(above)
        if item is not None and isinstance(item.value, dict):
            inside = remove_setting(item.value, name.removeprefix(f"{above}."))
            kept[above] = replace(item, value=inside)
    return kept


def escape_references(value: Any) -> Any:
    """Escape each `${` in plain data, so that it begins no reference."""
    if isinstance(value, dict):
        return {key: escape_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_references(item) for item in value]
    return _REFERENCE.sub(lambda found: 2 * found[1] + r"\${", value) if isinstance(value, str) else value


def is_reference(value: str) -> bool:
    """Return whether a `${` in a text begins a reference; an odd number of backslashes escapes it."""
    return any(len(found[1]) % 2 == 0 for found in _REFERENCE.finditer(value))


def parse_argument(text: str, origin: str) -> SourceValue:
    """Parse one argument as YAML, or as text if it is not valid YAML."""
    try:
        value = _parse(text, origin).value
    except ConfigError:
        value = text
    if value is None and text.strip() not in ("", "~", "null", "Null", "NULL"):
        value = text  # such as '#1': the command line has no comments
    quoted = isinstance(value, str) and text[:1] in ("'", '"')
    return SourceValue(value, origin, value if quoted else text, is_argument=True)


def parse_overrides(tokens: list[str]) -> list[tuple[str, SourceValue]]:
    """Parse `a.b=c`, `--a.b=c`, `--a.b c` and `~a.b` to (dotted name, value), in order. Raises ConfigError.

    As in Hydra, a name may begin with `+` or `++`.
    """
    found: list[tuple[str, SourceValue]] = []
    rest = iter(tokens)
    for token in rest:
        name, equals, value = token.partition("=")
        if token.startswith("--") and len(name) > 2:
            name = _replace_hyphens(name[2:])
            if not equals:
                value = next(rest, "--")
                if value.startswith("--"):
                    raise _refuse(f"{token} needs a value: {token} VALUE, or {token}=VALUE", Kind.MISSING)
        elif token.startswith("~") and len(name) > 1:
            item = parse_argument(value, f"command line: {token}")
            found.append((name[1:], replace(item, text=value if equals else None, is_deletion=True)))
            continue
        elif token.startswith(("-", "~")) or not equals or not name:
            why = f"argument {token!r} is not understood: an option is set with --a.b VALUE or a.b=VALUE, "
            raise _refuse(f"{why}and ~a.b deletes it", Kind.VALUE)
        found.append((name.lstrip("+"), parse_argument(value, f"command line: {token.partition('=')[0]}")))
    return found


def _replace_hyphens(name: str) -> str:
    """Replace `-` by `_` in the name of a flag, except in the key of a member, which the user chose."""
    member = next((one for cls in CONFIGS.values() for one in find_members(cls, [name])), "")
    return member + name.removeprefix(member).replace("-", "_")


_Loader = Yaml12 | FastYaml12
# libyaml accepts some tabs that PyYAML refuses, and counts other ends of lines.
_NOT_FOR_LIBYAML = re.compile(r"[^\n -~\xa0-\u2027\u202a-\ud7ff]")
MOST_NESTED = 500  # brackets and columns; libyaml's composer has no limit


def _compose(text: str) -> tuple[_Loader, yaml.Node | None]:
    """Return a loader and the root node of a text. Raises yaml.YAMLError with PyYAML's words."""
    nested = text.count("[") + text.count("{") + max(map(len, text.split("\n")))
    if nested <= MOST_NESTED and not _NOT_FOR_LIBYAML.search(text):
        fast = FastYaml12(text)
        with contextlib.suppress(yaml.YAMLError):
            return fast, fast.get_single_node()
    loader = Yaml12(text)
    return loader, loader.get_single_node()


def _parse(text: str, name: str, has_references: bool = True) -> SourceValue:
    try:
        loader, node = _compose(text)
        loader.has_references = has_references
        return SourceValue(None, name) if node is None else _convert(loader, node, name)
    except RecursionError:
        why = "this YAML is nested too deeply, or an alias (*name) contains itself"
        raise _refuse(f"{name}: {why}.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise _refuse(f"{where}: not valid YAML: {error.problem or error.context}.") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _refuse(f"{name}:{line}: not valid YAML: {error.reason}.") from error


def _convert(loader: _Loader, node: yaml.Node, name: str) -> SourceValue:
    origin = f"{name}:{node.start_mark.line + 1}"
    loader.num_values += 1
    if loader.num_values > MOST_VALUES:
        raise _refuse(
            f"{origin}: the file has more than {MOST_VALUES} values, probably because its aliases (*name) "
            "contain aliases."
        )
    if node.tag not in _TAGS:
        raise _refuse(
            f"{origin}: remove {node.tag.replace('tag:yaml.org,2002:', '!!')}: this YAML tag is not allowed."
        )
    if isinstance(node, yaml.MappingNode):
        return SourceValue(_convert_mapping(loader, node, name), origin)
    if isinstance(node, yaml.SequenceNode):
        return SourceValue([_convert(loader, item, name) for item in node.value], origin)
    try:
        value = loader.construct_object(node)
        return SourceValue(value if loader.has_references else escape_references(value), origin, node.value)
    except ValueError as error:  # thousands of digits, or `!!int ten`
        shown = node.value if len(node.value) < 40 else f"{node.value[:20]}… ({len(node.value)} characters)"
        raise _refuse(f"{origin}: {shown} can't be read as a number.") from error


def _convert_mapping(loader: _Loader, node: yaml.MappingNode, name: str) -> dict[str, SourceValue]:
    own: dict[str, SourceValue] = {}
    merged: dict[str, SourceValue] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            kind = "list" if isinstance(key_node, yaml.SequenceNode) else "mapping"
            raise _refuse(
                f"{name}:{line}: this key is a {kind}; write it as plain text, as in `name: value`."
            )
        item = _convert(loader, value_node, name)
        if key_node.tag == "tag:yaml.org,2002:merge":
            for part in item.value if isinstance(item.value, list) else [item]:
                if not isinstance(part.value, dict):
                    raise _refuse(f"{name}:{line}: the value of << must be a mapping, or a list of mappings.")
                merged = {**part.value, **merged}
        elif key_node.value in own:
            first = own[key_node.value].origin
            raise _refuse(
                f"{name}:{line}: key {key_node.value} is given twice in one section, first at {first}."
            )
        else:
            # The origin of a section is the line of its key.
            own[key_node.value] = SourceValue(item.value, f"{name}:{line}", item.text)
    return {**merged, **own}
