"""The files of a LoRA adapter, as peft writes them: names, and the settings in `adapter_config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import load_object

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of each tensor's name in the file
ALL_LINEAR = "all-linear"
# key -> value without effect; another value changes what an adapter computes
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
            "base_model_name_or_path": self.base,
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
        """Read the settings of an adapter. Raises ConfigError if it is no plain LoRA adapter."""
        path = folder / CONFIG_NAME
        content = load_object(path)
        if not content or not (folder / WEIGHTS_NAME).is_file():
            raise ConfigError(f"{folder} is no adapter: it must have {CONFIG_NAME} and {WEIGHTS_NAME}")
        odd = {
            key: content.get(key) for key, plain in _PLAIN.items() if content.get(key) not in (plain, None)
        }
        if content.get("peft_type") != "LORA":
            odd["peft_type"] = content.get("peft_type")
        if odd:
            named = ", ".join(f"{key}: {value}" for key, value in odd.items())
            raise ConfigError(f"{path} has {named}: only plain LoRA adapters are supported")
        rank, alpha, targets = (content.get(key) for key in ("r", "lora_alpha", "target_modules"))
        if not isinstance(rank, int) or not isinstance(alpha, int | float) or not targets:
            raise ConfigError(f"{path} lacks r, lora_alpha or target_modules")
        modules = [targets] if isinstance(targets, str) else sorted(map(str, targets))
        base = str(content.get("base_model_name_or_path") or "")
        return cls(rank, alpha, tuple(modules), base, HEAD in (content.get("modules_to_save") or ()))


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter instead of a whole model."""
    return (folder / CONFIG_NAME).is_file()
