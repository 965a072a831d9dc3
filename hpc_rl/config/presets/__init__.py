"""Presets: named sets of values. Every file overrides the presets of ATLAS; `cpu` overrides every file."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.config.load.fields import suggest_name
from hpc_rl.config.load.source import Settings, load_yaml
from hpc_rl.core.backends import SERVER_BACKENDS
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

BELOW = ("atlas", "atlas-teacher", "servers")
OVER = ("cpu",)
_BATCH_OF_RANKS = {"train_dataset.sequences_per_rank", "per_device_train_batch_size"}
_ONLY_GRPO = ("launcher.rollout_", "launcher.inference_server_", "actor.beta", "ref.path")
_OPTIONAL = ("ref", "critic", "valid_dataset")


def load_presets(
    names: Sequence[str], known: Mapping[str, Any], sources: Sequence[Settings]
) -> tuple[list[Settings], list[Settings]]:
    """Return the presets that files override, and the ones that override files. Raises ConfigError."""
    given = {
        name: item.value for source in sources for name, item in source.items() if item.value is not None
    }
    made = {name: _fit(_load_preset(name), known, given) for name in names}
    return [made[name] for name in made if name in BELOW], [made[name] for name in made if name in OVER]


def _load_preset(name: str) -> Settings:
    if name not in (*BELOW, *OVER):
        known = [*BELOW, *OVER]
        hint = suggest_name(name, known)
        use = f"allowed: {', '.join(known)}. {hint}".strip()
        why = f"--preset {name!r} is not known"
        raise ConfigError(Refusal(option="", kind=Kind.VALUE, why=why, use=use))
    found = load_yaml(Path(__file__).with_name(f"{name}.yaml"))
    return {option: dataclasses.replace(item, origin=f"preset {name}") for option, item in found.items()}


def _fit(preset: Settings, known: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    """Return the options of a preset that the trainer has and that fit the `given` ones.

    Options of `actor` become options of `model` for a trainer without `actor`. An optional section without a
    path in the preset is left out unless it is given.
    """
    fitting: Settings = {}
    present = {name.partition(".")[0] for name in given}
    makes_own_input = "teacher" in known or given.get("rollout.workflow") == "multi_turn"
    without = {"train_dataset.too_long"} if makes_own_input or "actor" not in known else set()
    without |= {"train_dataset.batch_size"} if _BATCH_OF_RANKS & given.keys() else set()
    only_grpo = (*_ONLY_GRPO, *(f"{backend.section}." for backend in SERVER_BACKENDS.values()))
    for name, item in preset.items():
        if "actor" not in known:
            if name.startswith(only_grpo):
                continue  # other trainers have no servers; dpo has another beta, and `model` as its reference
            name = f"model.{name.removeprefix('actor.')}" if name.startswith("actor.") else name
        top = name.partition(".")[0]
        is_absent = top in _OPTIONAL and top not in present and f"{top}.path" not in preset
        if name in known and name not in without and not is_absent:
            fitting[name] = item
    return fitting
