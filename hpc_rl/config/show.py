"""Show a resolved configuration: every option with its origin, as YAML that loads again; and differences.

Values that follow from other options (`derive_values`) are filled in for display only; the roles derive
them themselves.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.config.load.fields import is_mapping, list_defaults, list_options
from hpc_rl.config.load.source import escape_references
from hpc_rl.config.load.stored import Loaded, redact
from hpc_rl.config.options.experiment import ABSENT, Config, GRPOConfig, get_value
from hpc_rl.config.rules.consistency import FOLLOWS, list_members
from hpc_rl.config.rules.training_rules import find_trained_model

_PLAIN = re.compile(r"[A-Za-z_./~][A-Za-z0-9_./+-]*")
_UNPRINTABLE = re.compile(
    r"[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010fffd]"
)  # to YAML
_WORDS = {"true", "false", "null", "~", ".nan", ".inf"}


DEFAULT = "default"


@dataclass(frozen=True)
class ResolvedValue:
    """A value and its origin: `file:line`, an argument, a preset, `default`, `adapted: …` or `derived: …`."""

    value: Any
    origin: str


def show(loaded: Loaded, derived: Mapping[str, ResolvedValue] | None = None) -> dict[str, ResolvedValue]:
    """Return value and origin of every option by dotted name; a null section is one entry."""
    found: dict[str, ResolvedValue] = {}
    cls: type = type(loaded.config)
    members = list_members(loaded.config)
    for name, hint in list_options(cls, members=members).items():
        value = get_value(loaded.config, name)
        if value is ABSENT or dataclasses.is_dataclass(value) or (is_mapping(hint) and value):
            continue
        is_default = value == list_defaults(cls, members=members).get(name, dataclasses.MISSING)
        origin = DEFAULT if is_default else f"adapted: {loaded.adapted.get(name, 'the trainer')}"
        if name == "trainer":
            origin = "derived: the section of the model"
        found[name] = ResolvedValue(redact(value, name), loaded.origins.get(name, origin))
    for name, shown in (derived or {}).items():
        if name in found and found[name].value in (None, ""):
            found[name] = shown
    return found


def derive_values(config: Config, allocation: str = "") -> dict[str, ResolvedValue]:
    """Return the values of omitted options that follow from other options."""
    section, model = find_trained_model(config)
    found = {"tokenizer_path": ResolvedValue(model.path, f"derived: {section}.path")}
    if allocation:
        found["allocation_mode"] = ResolvedValue(
            allocation, "derived: cluster.n_nodes, cluster.n_gpus_per_node"
        )
    if isinstance(config, GRPOConfig):
        batch_size = config.train_dataset.batch_size
        found |= {
            name: ResolvedValue(get_value(config, root), f"derived: {root}") for name, root in FOLLOWS.items()
        }
        found["rollout.max_concurrent_rollouts"] = ResolvedValue(
            2 * batch_size, "derived: twice train_dataset.batch_size"
        )
    return found


def format_yaml(shown: Mapping[str, ResolvedValue]) -> str:
    """Return YAML that loads to the same configuration; each line ends with the origin of its value."""
    rows: list[tuple[str, str]] = []
    above: list[str] = []
    for name, item in shown.items():
        *sections, leaf = name.split(".")
        shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sections, above, strict=False))
        common = len(list(shared))
        rows += [(f"{'  ' * depth}{sections[depth]}:", "") for depth in range(common, len(sections))]
        above = sections
        rows.append(
            (f"{'  ' * len(sections)}{leaf}: {format_scalar(escape_references(item.value))}", item.origin)
        )
    width = min(max((len(text) for text, origin in rows if origin), default=0), 60)
    return "".join(
        f"{text:<{width}}  # {' '.join(origin.split())}\n" if origin else f"{text}\n" for text, origin in rows
    )


def format_scalar(value: Any) -> str:
    """Return a value as one line of YAML 1.2: JSON, with unquoted text if it can't be another type."""
    if (
        isinstance(value, str)
        and _PLAIN.fullmatch(value)
        and value.lower() not in _WORDS
        and not value.startswith(".")
    ):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\U{ord(found[0]):08x}", text)


def diff(
    a: Mapping[str, ResolvedValue], b: Mapping[str, ResolvedValue]
) -> dict[str, tuple[ResolvedValue | None, ResolvedValue | None]]:
    """Return the options whose values differ, in the order of `a`; None stands for a missing option."""
    pairs = {name: (a.get(name), b.get(name)) for name in [*a, *b]}
    values = {name: [one.value if one else ABSENT for one in pair] for name, pair in pairs.items()}
    return {name: pair for name, pair in pairs.items() if values[name][0] != values[name][1]}
