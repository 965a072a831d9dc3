"""The files of a LoRA adapter, as peft writes them: names, and the settings in `adapter_config.json`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.tensor_files import IncompleteFile, Shape, load_shapes
from hpc_rl.core.trial import load_object

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of each tensor's name in the file
BASE_KEY = "base_model_name_or_path"  # in the settings
ALL_LINEAR = "all-linear"
# key -> value without effect; another value changes the adapter's result
_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "exclude_modules": None,
}
HEAD = "score"  # the head of a reward model, which is trained and saved whole
A, B = ".lora_A.weight", ".lora_B.weight"  # ends of the names of the two factors of a layer
_MOST_NAMED = 3  # tensors in a message


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of an adapter that this program reads and writes."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # of the base, by the last part of their names
    base: str  # path of the base model
    has_head: bool = False
    kind: str = "lora"  # option `peft_type`

    def write(self, folder: Path) -> None:
        """Write `adapter_config.json`. Raises OSError."""
        content = {
            "peft_type": self.kind.upper(),
            "task_type": "SEQ_CLS" if self.has_head else "CAUSAL_LM",
            BASE_KEY: self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.modules),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": [HEAD] if self.has_head else None,
        }
        (folder / CONFIG_NAME).write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> AdapterSettings:
        """Read the settings of an adapter. Raises ConfigError if it is not a plain LoRA adapter."""
        path = folder / CONFIG_NAME
        content = load_object(path)
        if not path.is_file() or not (folder / WEIGHTS_NAME).is_file():
            raise ConfigError(f"{folder} is not an adapter: it must have {CONFIG_NAME} and {WEIGHTS_NAME}")
        if not content:
            raise ConfigError(f"{path} must be a JSON object with settings; copy the adapter again")
        odd = {
            key: content.get(key) for key, plain in _PLAIN.items() if content.get(key) not in (plain, None)
        }
        if content.get("peft_type") != "LORA":
            odd["peft_type"] = content.get("peft_type")
        whole = content.get("modules_to_save") or []
        if {*whole} - {HEAD}:
            odd["modules_to_save"] = whole
        if odd:
            named = ", ".join(f"{key}: {value}" for key, value in odd.items())
            raise ConfigError(f"{path} has {named}: only plain LoRA adapters are supported")
        rank, alpha, targets = (content.get(key) for key in ("r", "lora_alpha", "target_modules"))
        if not isinstance(rank, int) or not isinstance(alpha, int | float) or not targets:
            raise ConfigError(f"{path} lacks r, lora_alpha or target_modules; copy the adapter again")
        modules = [targets] if isinstance(targets, str) else sorted(map(str, targets))
        base = str(content.get(BASE_KEY) or "")
        return cls(rank, alpha, tuple(modules), base, HEAD in whole)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter instead of a whole model."""
    return (folder / CONFIG_NAME).is_file()


def load_tensor_shapes(folder: Path) -> dict[str, Shape]:
    """Return the shapes of an adapter's tensors, by their names in the model.

    Raises ConfigError for a damaged file, OSError.
    """
    path = folder / WEIGHTS_NAME
    try:
        found = load_shapes(path)
    except IncompleteFile as error:
        raise ConfigError(f"{folder} can't be used: {error}. Copy it again.") from error
    return {name.removeprefix(PREFIX): shape for name, shape in found.items()}


def list_factor_shapes(layers: Mapping[str, tuple[int, int]], rank: int) -> dict[str, Shape]:
    """Return the shapes of A and B of each layer, by name; `layers` has its (out, in) features."""
    shapes: dict[str, Shape] = {}
    for name, (num_out, num_in) in layers.items():
        shapes |= {name + A: (rank, num_in), name + B: (num_out, rank)}
    return shapes


def explain_difference(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> str:
    """Return how the tensors of an adapter differ from the wanted ones; empty if they are the same."""
    if missing := wanted.keys() - found.keys():
        return f"lacks {_name_some(missing)}"
    if more := found.keys() - wanted.keys():
        return f"has {_name_some(more)}, which the trial would not train"
    for name in sorted(wanted):
        if tuple(found[name]) != tuple(wanted[name]):
            return f"has {name} with the shape {list(found[name])}, but the trial needs {list(wanted[name])}"
    return ""


def _name_some(names: Collection[str]) -> str:
    shown, more = sorted(names)[:_MOST_NAMED], len(names) - _MOST_NAMED
    return f"{', '.join(shown)}{f' and {more} more tensors' if more > 0 else ''}"
