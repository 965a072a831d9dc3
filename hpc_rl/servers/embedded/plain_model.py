"""Llama, Qwen2 and Qwen3 from their files, without transformers, whose import takes longer than PyTorch's.

A checkpoint has a plain model if each option in its config.json is known here. `load_plain` returns None for
others, and transformers loads them (hf_decoder.py). The module only holds weights; FusedDecoder computes.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from hpc_rl.servers.embedded.decoder import FUSED_TYPES

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
)
# the only values that FusedDecoder supports
FIXED: dict[str, tuple[object, ...]] = {
    "model_type": FUSED_TYPES,
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "rope_scaling": (None,),
    "pretraining_tp": (1,),
}
# no effect on the results of a trained model
NEUTRAL = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "max_window_layers"),
    "sliding_window",  # without use_sliding_window
}
KNOWN = {*SIZES, *FIXED, *NEUTRAL}
KNOWN |= {"head_dim", "tie_word_embeddings", "layer_types", "rope_theta", "rope_parameters"}


class PlainModel(nn.Module):
    """Weights with the names of transformers, and `config` with the options of config.json."""

    def __init__(self, config: SimpleNamespace, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.config = config
        for name, tensor in tensors.items():
            path, _, last = name.rpartition(".")
            self._make_module(path).register_parameter(last, nn.Parameter(tensor))
        base: Any = self.model
        if config.tie_word_embeddings:
            self._make_module("lm_head").register_parameter("weight", base.embed_tokens.weight)
        for layer in base.layers:
            layer.self_attn.head_dim, layer.self_attn.scaling = config.head_dim, config.head_dim**-0.5
        base.rotary_emb = Rotary(config.head_dim, config.rope_theta)

    def _make_module(self, path: str) -> nn.Module:
        module: nn.Module = self
        for name in path.split("."):
            if name not in module._modules:
                module.add_module(name, nn.ModuleList() if name == "layers" else nn.Module())
            module = module.get_submodule(name)
        if "bias" not in module._parameters:
            module.register_parameter("bias", None)
        return module

    def get_output_embeddings(self) -> nn.Module:
        return self.get_submodule("lm_head")


class Rotary:
    """Rotary position embeddings of type "default".

    Not a method of the model: a model in a reference cycle would not free its memory at once.
    """

    def __init__(self, size: int, theta: float) -> None:
        self._size, self._theta = size, theta

    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [1, T, D] at positions [1, T], with the type of `like`."""
        pairs = torch.arange(0, self._size, 2, device=positions.device).float()
        angles = positions[..., None].float() / self._theta ** (pairs / self._size)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def list_shapes(config: SimpleNamespace) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a checkpoint."""
    width, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    layer = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if config.model_type == "qwen2":
        layer |= {"self_attn.q_proj.bias": (queries,)}
        layer |= {f"self_attn.{name}_proj.bias": (keys,) for name in "kv"}
    if config.model_type == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (width,)
    return shapes if config.tie_word_embeddings else shapes | {"lm_head.weight": (config.vocab_size, width)}


def load_plain(folder: Path, dtype: torch.dtype) -> PlainModel | None:
    """Return the model of a checkpoint, or None if transformers must load it. Raises OSError, ValueError."""
    config = load_options(folder)
    if config is None or not any(folder.glob("*.safetensors")):
        return None
    tensors, shapes = load_tensors(folder), list_shapes(config)
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
        return None
    # copies, because the tensors are views of the files
    return PlainModel(config, {name: tensors[name].to(dtype, copy=True) for name in shapes})


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the safetensors files of a checkpoint. Raises OSError, ValueError."""
    index = path / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(files):
        if not (path / file).is_file():
            raise FileNotFoundError(f"{path / file} does not exist")
        try:
            tensors |= load_file(path / file)
        except SafetensorError as error:
            raise ValueError(f"{path / file}: {error}") from error
    return tensors


def load_options(folder: Path) -> SimpleNamespace | None:
    """Return the options of config.json with their defaults, or None if transformers must read them."""
    options, generation = (_load_json(folder / name) for name in ("config.json", "generation_config.json"))
    rope = options.get("rope_parameters") or {"rope_theta": options.get("rope_theta")}
    is_known = (
        {"model_type", "hidden_act", *SIZES} <= options.keys() <= KNOWN
        and all(options[name] in allowed for name, allowed in FIXED.items() if name in options)
        and set(options.get("layer_types") or ()) <= {"full_attention"}
        and isinstance(rope, dict)
        and rope.keys() <= {"rope_theta", "rope_type"}
        and rope.get("rope_type", "default") == "default"
        and isinstance(rope.get("rope_theta"), int | float)
        and ("head_dim" in options or options["model_type"] != "qwen3")
    )
    if not is_known:
        return None
    size = options.get("head_dim") or options["hidden_size"] // options["num_attention_heads"]
    options = {
        "tie_word_embeddings": False,
        "eos_token_id": None,
        **options,
        "head_dim": size,
        "rope_theta": rope["rope_theta"],
    }
    if generation.get("eos_token_id") is not None:
        options["eos_token_id"] = generation["eos_token_id"]
    return SimpleNamespace(**options)


def _load_json(path: Path) -> dict[str, Any]:
    """Return an object; an empty one if the file is missing or damaged, which transformers then reports."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
