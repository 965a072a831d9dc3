"""The model of the embedded engine: the weights of a causal LM, which may be replaced, and its decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file

from hpc_rl.core import adapters
from hpc_rl.core.adapters import AdapterSettings
from hpc_rl.core.errors import ConfigError
from hpc_rl.servers.embedded.changes import PreparedChanges
from hpc_rl.servers.embedded.decoder import Decoder, FusedDecoder
from hpc_rl.servers.embedded.plain_model import load_plain, load_tensors

_A, _B = ".lora_A.weight", ".lora_B.weight"


class Model:
    """A checkpoint in memory with its decoder and limits."""

    def __init__(self, path: str, dtype: str, scratch: bool = False) -> None:
        """Load the model. Raises ConfigError if it is not supported, OSError if the path can't be read."""
        self.path, self.dtype = path, getattr(torch, dtype)
        self._base: dict[str, torch.Tensor] = {}  # the weights that an adapter has changed, without it
        self._open(path, scratch)

    def _open(self, path: str, scratch: bool = False) -> None:
        """Load a checkpoint of any architecture. Raises ConfigError, OSError, ValueError."""
        module = None if scratch else load_plain(Path(path), self.dtype)
        if module is not None:
            self._adopt(module, FusedDecoder)
            return
        # its import takes longer than PyTorch's
        from hpc_rl.servers.embedded.hf_decoder import choose_decoder, load_module

        self._adopt(load_module(path, self.dtype, scratch), choose_decoder)

    def _adopt(self, module: Any, choose: Callable[[Any], Decoder]) -> None:
        config = module.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ConfigError(
                f"the embedded engine can't serve {config.model_type} models with layers of kind "
                f"{', '.join(sorted(kinds))}; use sglang servers"
            )
        self.module = module.eval().requires_grad_(False)
        self.num_layers = config.num_hidden_layers
        self.vocab_size = module.get_output_embeddings().weight.shape[0]
        self.context_length = config.max_position_embeddings
        self.eos_ids = _find_eos_ids(module)
        self.decoder = choose(self.module)

    def release(self) -> None:
        """Drop the weights; `load` must come next."""
        del self.module, self.decoder
        self._base = {}

    @property
    def device(self) -> torch.device:
        return self.module.get_output_embeddings().weight.device

    @property
    def is_released(self) -> bool:
        return not hasattr(self, "module")

    def load(self, path: str) -> None:
        """Load the weights of another checkpoint with the same architecture.

        If it raises OSError or ValueError, the old weights are unchanged.
        """
        if self.is_released:
            self._open(path)
            self.path = path
            return
        if adapters.is_adapter(Path(path)):
            self._load_adapter(Path(path))
            return
        tensors = load_tensors(Path(path))
        names = dict(self.module.named_parameters(remove_duplicate=False))
        own = {name: p for name, p in names.items() if not (name not in tensors and self._is_tied(name))}
        if tensors.keys() != own.keys():  # transformers renames these tensors when it loads them
            self._open(path)
            self.path, self._base = path, {}
            return
        self._check_shapes(path, tensors, own)
        for name, parameter in own.items():
            parameter.data.copy_(tensors[name])
        self.finish_writing()
        self.path, self._base = path, {}

    def _load_adapter(self, folder: Path) -> None:
        """Merge an adapter into the weights of the base; it replaces the adapter before."""
        settings = AdapterSettings.read(folder)
        tensors = load_file(folder / adapters.WEIGHTS_NAME)
        names = dict(self.module.named_parameters())
        layers = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
        if len(tensors) != 2 * len(layers):
            raise ValueError(f"{folder} has tensors other than LoRA matrices")
        wanted = {f"{layer.removeprefix(adapters.PREFIX)}.weight": layer for layer in layers}
        if unknown := wanted.keys() - names.keys():
            raise ValueError(f"the adapter in {folder} changes {min(unknown)}, which the model does not have")
        for name in self._base.keys() - wanted.keys():
            names[name].data.copy_(self._base.pop(name))
        for name, layer in wanted.items():
            base = self._base.setdefault(name, names[name].detach().clone())
            product = tensors[layer + _B].float() @ tensors[layer + _A].float()
            names[name].data.copy_(base.float() + settings.alpha / settings.rank * product)
        self.path = str(folder)

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrite some weights, by their names in the module; call `finish_writing` after the last ones.

        Raises ValueError if a tensor does not belong to the model; then none is changed.
        """
        names = dict(self.module.named_parameters(remove_duplicate=False))
        if unknown := [name for name in tensors if name not in names]:
            raise ValueError(f"the sent weights have the tensor {unknown[0]}, which the model lacks")
        self._check_shapes("the sent weights", tensors, {name: names[name] for name in tensors})
        for name, tensor in tensors.items():
            names[name].data.copy_(tensor)

    def apply(self, changes: PreparedChanges) -> bool:
        """Overwrite the changed weights; return false if they are not of this module, and change nothing."""
        if self.is_released:
            return False
        tensors = {name: p.data for name, p in self.module.named_parameters(remove_duplicate=False)}
        sizes = {name: tensor.numel() for name, tensor in tensors.items() if not self._is_tied(name)}
        if not changes.fits(tensors) or (changes.base is None and not changes.covers(sizes)):
            return False
        if changes.base is None:
            self._base = {}
        for part in changes.parts:
            part.write(tensors[part.rectangle.name])
        self.finish_writing()
        return True

    def list_names(self) -> set[str]:
        """Return the names of all weights, without an output layer that is tied to the embedding."""
        names = (name for name, _ in self.module.named_parameters(remove_duplicate=False))
        return {name for name in names if not self._is_tied(name)}

    def finish_writing(self) -> None:
        """Compute again the tensors that depend on the weights."""
        if isinstance(self.decoder, FusedDecoder):
            for fused, layer in zip(self.decoder.layers, self.module.model.layers, strict=True):
                if fused["qk_norm"] is not None:
                    heads = self.decoder.num_heads
                    fused["qk_norm"][:heads] = layer.self_attn.q_norm.weight
                    fused["qk_norm"][heads:] = layer.self_attn.k_norm.weight

    @staticmethod
    def _check_shapes(source: str, tensors: dict[str, torch.Tensor], own: dict[str, Any]) -> None:
        for name, parameter in own.items():
            if tensors[name].shape != parameter.shape:
                found, own_shape = list(tensors[name].shape), list(parameter.shape)
                raise ValueError(
                    f"{source}: tensor {name} has the shape {found}, but the model needs {own_shape}"
                )

    def compute_checksums(self) -> dict[str, str]:
        """Return the xxh3 (64 bits, hex) of each parameter's bytes, by its name in memory."""
        return {
            name: xxhash.xxh3_64_hexdigest(one.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            for name, one in self.module.named_parameters()
        }

    def _is_tied(self, name: str) -> bool:
        return name == "lm_head.weight" and bool(getattr(self.module.config, "tie_word_embeddings", False))


def _find_eos_ids(module: Any) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the generation config, else of the config."""
    for config in (getattr(module, "generation_config", None), module.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, list | tuple) else (int(value),)
    return ()
