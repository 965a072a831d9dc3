"""The settings in a model's config.json that the megatron backend supports."""

from collections.abc import Mapping
from typing import Any

# key of config.json -> values that match the layers of Megatron-core
LAYERS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "router_jitter_noise": (0.0,),
}
ROTARY_TYPES = ("default", "linear", "llama3")  # independent of the length of a row


def find_odd_layers(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the unsupported keys of a config.json with their values; empty for a supported model."""
    odd = {key: content[key] for key, known in LAYERS.items() if key in content and content[key] not in known}
    has_windows = not str(content.get("model_type", "")).startswith("qwen")  # if the key is missing
    if not content.get("use_sliding_window", has_windows):
        odd.pop("sliding_window", None)
    kind = find_rotary_type(content)
    return odd | ({} if kind in ROTARY_TYPES else {"rope_type": kind})


def find_rotary_type(content: Mapping[str, Any]) -> str:
    rotary = content.get("rope_parameters") or content.get("rope_scaling") or {}
    return str(rotary.get("rope_type", rotary.get("type", "default")))
