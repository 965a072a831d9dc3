"""Presets: named sets of values. `atlas` is overridden by every file, `cpu` overrides every file."""

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hpc_rl.config.loading.source import SourceValue, read_yaml
from hpc_rl.errors import ConfigError

BELOW = ("atlas",)
OVER = ("cpu",)
_ONLY_GRPO = ("sglang", "launcher.rollout_", "launcher.inference_server_")


def read_preset(name: str) -> SourceValue:
    """Return a preset. Raises ConfigError for an unknown name."""
    if name not in (*BELOW, *OVER):
        near = difflib.get_close_matches(name, [*BELOW, *OVER], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"preset {name!r} is not known; allowed: {', '.join([*BELOW, *OVER])}.{hint}")
    tree = read_yaml(Path(__file__).with_name(f"{name}.yaml"))
    return _named(tree, f"preset {name}")


def _named(item: SourceValue, origin: str) -> SourceValue:
    if isinstance(item.value, dict):
        return SourceValue({key: _named(value, origin) for key, value in item.value.items()}, origin)
    return SourceValue(item.value, origin, item.text)


def fit(
    preset: SourceValue, known: Mapping[str, Any], present: Collection[str], prefix: str = ""
) -> SourceValue:
    """Return the part of a preset that a trainer has; `actor` includes `model`.

    An optional section that the preset does not complete is left out unless it is in `present`.
    """
    tree: dict[str, SourceValue] = {}
    for key, item in preset.value.items():
        own = "model" if not prefix and key == "actor" and "actor" not in known else key
        name = prefix + own
        if "actor" not in known and name.startswith(_ONLY_GRPO):
            continue  # it is there in every configuration, but only grpo has servers
        absent = not prefix and own in ("ref", "valid_dataset") and own not in present
        if name not in known or (absent and "path" not in item.value):
            continue
        tree[own] = fit(item, known, present, f"{name}.") if isinstance(item.value, dict) else item
    return SourceValue(tree, preset.origin)
