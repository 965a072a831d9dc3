"""A resolved configuration for the user: every option with its origin, as YAML that loads again; and diffs.

What follows from other options (`derived_values`) is filled in to be shown: the roles derive it themselves.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.config.loading.fields import default_of, hints, section_of
from hpc_rl.config.loading.source import literal
from hpc_rl.config.loading.stored import Loaded, redact
from hpc_rl.config.sections.experiment import Config, GRPOConfig

_PLAIN = re.compile(r"[A-Za-z_./~][A-Za-z0-9_./+-]*")
_UNPRINTABLE = re.compile(
    r"[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010fffd]"
)  # to YAML
_WORDS = {"true", "false", "null", "~", ".nan", ".inf"}


@dataclass(frozen=True)
class ResolvedValue:
    """A value and its origin: `file:line`, an argument, a preset, `default`, `adapted` or `derived: …`."""

    value: Any
    origin: str


def show(loaded: Loaded, derived: Mapping[str, ResolvedValue] | None = None) -> dict[str, ResolvedValue]:
    """Return value and origin of every option by dotted name; a section that is null has its own name."""
    found: dict[str, ResolvedValue] = {}
    for name, value, default in _options(loaded.config, type(loaded.config), ""):
        without = "default" if value == default else "adapted"
        if name == "trainer":
            without = "derived: the section of the model"
        found[name] = ResolvedValue(redact(name, value), loaded.origins.get(name, without))
    for name, shown in (derived or {}).items():
        if name in found and found[name].value in (None, ""):
            found[name] = shown
    return found


def _options(section: Any, cls: type, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(cls):
        value, name = getattr(section, field.name), prefix + field.name
        if section_of(hints(cls)[field.name]) and value is not None:
            yield from _options(value, type(value), f"{name}.")
        elif field.name == "trainer" and not prefix:
            yield name, value, value
        else:
            yield name, value, default_of(field)


def derived_values(config: Config, allocation: str = "") -> dict[str, ResolvedValue]:
    """Return what follows for options that are left out."""
    model = config.actor if isinstance(config, GRPOConfig) else config.model
    section = "actor" if isinstance(config, GRPOConfig) else "model"
    found = {"tokenizer_path": ResolvedValue(model.path, f"derived: {section}.path")}
    if allocation:
        found["allocation_mode"] = ResolvedValue(
            allocation, "derived: cluster.n_nodes, cluster.n_gpus_per_node"
        )
    if isinstance(config, GRPOConfig):
        batch_size = config.train_dataset.batch_size
        found |= {
            "actor.group_size": ResolvedValue(config.gconfig.n_samples, "derived: gconfig.n_samples"),
            **{
                f"actor.{norm}.group_size": ResolvedValue(
                    config.gconfig.n_samples, "derived: gconfig.n_samples"
                )
                for norm in ("reward_norm", "adv_norm")
            },
            "actor.max_new_tokens": ResolvedValue(
                config.gconfig.max_new_tokens, "derived: gconfig.max_new_tokens"
            ),
            "sglang.model_path": ResolvedValue(model.path, "derived: actor.path"),
            "actor.temperature": ResolvedValue(config.gconfig.temperature, "derived: gconfig.temperature"),
            "rollout.consumer_batch_size": ResolvedValue(batch_size, "derived: train_dataset.batch_size"),
            "rollout.max_concurrent_rollouts": ResolvedValue(
                2 * batch_size, "derived: twice train_dataset.batch_size"
            ),
        }
    return found


def as_yaml(shown: Mapping[str, ResolvedValue]) -> str:
    """Return YAML that loads to the same configuration; each line ends with the origin of its value."""
    rows: list[tuple[str, str]] = []
    above: list[str] = []
    for name, item in shown.items():
        *sections, leaf = name.split(".")
        common = next(
            (i for i, (a, b) in enumerate(zip(sections, above, strict=False)) if a != b),
            min(len(sections), len(above)),
        )
        rows += [(f"{'  ' * depth}{sections[depth]}:", "") for depth in range(common, len(sections))]
        above = sections
        rows.append((f"{'  ' * len(sections)}{leaf}: {scalar(literal(item.value))}", item.origin))
    width = min(max((len(text) for text, origin in rows if origin), default=0), 60)
    return "".join(
        f"{text:<{width}}  # {_line(origin)}\n" if origin else f"{text}\n" for text, origin in rows
    )


def _line(text: str) -> str:
    return " ".join(text.split())


def scalar(value: Any) -> str:
    """Return a value as one line of YAML 1.2: JSON, with text unquoted where it can only be text."""
    if (
        isinstance(value, str)
        and _PLAIN.fullmatch(value)
        and value.lower() not in _WORDS
        and not value.startswith(".")
    ):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\U{ord(found[0]):08x}", text)


def as_json(shown: Mapping[str, ResolvedValue]) -> dict[str, dict[str, Any]]:
    return {name: dataclasses.asdict(item) for name, item in shown.items()}


def diff(
    a: Mapping[str, ResolvedValue], b: Mapping[str, ResolvedValue]
) -> dict[str, tuple[ResolvedValue | None, ResolvedValue | None]]:
    """Return the options whose values differ, in the order of `a`; None where one has no such option."""
    names = [*a, *(name for name in b if name not in a)]
    pairs = {name: (a.get(name), b.get(name)) for name in names}
    return {
        name: (old, new)
        for name, (old, new) in pairs.items()
        if (old.value if old else ...) != (new.value if new else ...)
    }
