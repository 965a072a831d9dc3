"""The Hugging Face model as the engine sees it: built from a directory, with a forward pass that ends in token log-probabilities.

The log-probabilities are made inside the forward pass of the outermost module, because that is where FSDP has the output
head gathered. What a model does to its logits beyond the head's product is not reproduced: such models are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from hpc_rl.config.sections.training import TrainEngineConfig
from hpc_rl.engines import hf_io
from hpc_rl.engines.logprobs import token_logprobs
from hpc_rl.errors import ConfigError, NotBuilt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOGIT_TRANSFORMS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
}  # key -> value that does nothing


class LanguageModel(nn.Module):
    """A causal language model that returns log-probabilities and entropies of wanted tokens.

    Args:
        hf: The model of transformers.
        unread: Tensors that its files have and the model has no place for.
    """

    def __init__(self, hf: Any, unread: Sequence[str] = ()) -> None:
        super().__init__()
        self.hf = hf
        self.unread = unread

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        source_N: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.hf.get_decoder()(input_ids=input_ids, use_cache=False, **positions).last_hidden_state
        return token_logprobs(
            hidden.flatten(0, 1)[source_N], self.hf.get_output_embeddings().weight, targets_N, temperature
        )

    def blocks(self, wanted: list[str] | None = None) -> list[nn.Module]:
        """The repeated layers, which FSDP shards one by one: of these classes, or as the model says. Raises ConfigError."""
        names = set(self.hf._no_split_modules or () if wanted is None else wanted)
        found = [module for module in self.hf.modules() if type(module).__name__ in names]
        if wanted and not found:
            there = ", ".join(sorted({type(module).__name__ for module in self.hf.modules()}))
            raise ConfigError(
                f"fsdp.wrap_policy: the model has no module of {', '.join(wanted)}; it has {there}"
            )
        return found


class ScoreModel(LanguageModel):
    """A model with one number per token in place of a vocabulary: a reward model."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        source_N: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.hf.base_model(input_ids=input_ids, use_cache=False, **positions).last_hidden_state
        scores_N = (hidden.flatten(0, 1)[source_N] @ self.hf.score.weight.T).squeeze(1).float()
        return scores_N, torch.zeros_like(scores_N, requires_grad=False)


def check(config: TrainEngineConfig, device: torch.device) -> None:
    """Raises ConfigError for what this engine can't do with the configuration on the device."""
    if device.type == "cpu" and config.attn_impl.startswith("flash"):
        raise ConfigError(
            f"attn_impl {config.attn_impl!r} needs a GPU and the trainer is on the CPU; use attn_impl: sdpa"
        )
    if not (Path(config.path) / "config.json").is_file():
        raise ConfigError(
            f"path {config.path!r} is not a directory with a Hugging Face checkpoint: config.json is missing"
        )


def build(config: TrainEngineConfig, seed: int, frozen: bool = False) -> LanguageModel:
    """The model in float32 on the CPU, the same on every rank. Raises ConfigError, OSError."""
    hf: Any
    disable_progress_bar()  # one per rank, into the role's log
    torch.manual_seed(seed)  # what the weights lack (all of them, or the head of a reward model) is drawn
    try:
        hf, unread = _make(config)
    except ConfigError:
        raise  # it is a ValueError too
    except (OSError, SafetensorError):
        hf_io.refuse_damage(
            Path(config.path)
        )  # in whose words no file is named, and which would be tried again
        raise
    except (
        ImportError,
        ValueError,
    ) as error:  # a package that the attention needs, a name or an architecture that is unknown
        hf_io.refuse_damage(Path(config.path))
        raise ConfigError(
            f"{config.path} can't be built with attn_impl {config.attn_impl!r} here: {error} "
            "Install what is missing in the trainer's environment, or use attn_impl: sdpa."
        ) from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
    ) as error:  # of a number or a name that no model can have
        hf_io.refuse_damage(Path(config.path))
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{Path(config.path) / 'config.json'} describes no model that can be built: {said}"
        ) from error
    if config.is_critic and not isinstance(getattr(hf, "score", None), nn.Linear):
        raise NotBuilt(
            f"{hf.config.model_type} models can't be reward models yet: their head is not a linear layer `score`"
        )
    if not config.is_critic:
        _refuse_other_heads(hf)
    if config.disable_dropout:
        _disable_dropout(hf)
    if config.gradient_checkpointing and not frozen:
        _recompute_activations(hf)
    return ScoreModel(hf, unread) if config.is_critic else LanguageModel(hf, unread)


def architecture(folder: Path, **more: Any) -> Any:
    """The config.json of a checkpoint, as transformers reads it. Raises ConfigError that names the file, OSError."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, **more)
    except OSError:
        hf_io.refuse_damage(folder)  # in whose words no file is named
        raise
    except Exception as error:  # keys that contradict each other come as errors of many kinds, of huggingface_hub among others
        hf_io.refuse_damage(folder)
        said = " ".join(str(error).split()).rstrip(".")  # theirs have lines
        raise ConfigError(
            f"{folder / 'config.json'} can't be read as an architecture: {said}. Mend or copy it again."
        ) from error


def _make(config: TrainEngineConfig) -> tuple[Any, list[str]]:
    """(The model of transformers, its weights from the directory or random; tensors there that it has no place for).

    Raises ConfigError, ImportError, ValueError.
    """
    kind: Any = AutoModelForSequenceClassification if config.is_critic else AutoModelForCausalLM
    labels: dict[str, Any] = {"num_labels": 1} if config.is_critic else {}
    read = architecture(
        Path(config.path), **labels
    )  # first in any case: what from_pretrained says of it names no file
    if config.init_from_scratch:
        return kind.from_config(read, dtype=torch.float32, attn_implementation=config.attn_impl), []
    loaded: Any = kind.from_pretrained(
        config.path,
        dtype=torch.float32,
        attn_implementation=config.attn_impl,
        local_files_only=True,
        output_loading_info=True,
        **labels,
    )
    hf, found = loaded
    wrong = sorted({str(name) for problem in ("missing_keys", "mismatched_keys") for name in found[problem]})
    wrong = [name for name in wrong if not (config.is_critic and name == "score.weight")]
    if wrong:
        raise ConfigError(
            f"the weights at {config.path} lack, or have in another shape: {', '.join(wrong[:5])} ({len(wrong)} in all)"
        )
    return hf, sorted(map(str, found["unexpected_keys"]))


def _recompute_activations(hf: Any) -> None:
    if hasattr(
        hf, "activation_checkpointing_enable"
    ):  # its name in newer versions of transformers, which warn of the older one
        hf.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _refuse_other_heads(hf: Any) -> None:
    for key, neutral in LOGIT_TRANSFORMS.items():
        if getattr(hf.config, key, neutral) not in (neutral, None):
            raise NotBuilt(f"{hf.config.model_type} models with {key} in config.json can't be trained yet")
    if getattr(hf.get_output_embeddings(), "bias", None) is not None:
        raise NotBuilt(f"{hf.config.model_type} models with a bias in the output head can't be trained yet")


def _disable_dropout(hf: Any) -> None:
    for name, value in vars(hf.config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(hf.config, name, 0.0)
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def exported_config(path: Path, hf: Any, config: TrainEngineConfig) -> str:
    """The config.json of an export: the user's own text save for the type, so that servers of any version read what they knew.

    Of a reward model also its class, its one label, and the padding token by which transformers finds where a row ends.
    """
    written = json.loads((path / "config.json").read_text())
    written["torch_dtype" if "torch_dtype" in written else "dtype"] = config.dtype
    written.setdefault("architectures", [type(hf).__name__])
    if config.is_critic:
        written["architectures"] = [type(hf).__name__]
        written |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if written.get("pad_token_id") is None:
            eos = written.get("eos_token_id")
            written["pad_token_id"] = (eos[0] if isinstance(eos, list) else eos) or 0
    return json.dumps(written, indent=2) + "\n"
