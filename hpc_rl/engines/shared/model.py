"""Hugging Face models, built from a directory. Their forward pass returns token log-probabilities.

The log-probabilities are computed inside the forward pass of the outermost module, because FSDP gathers the
output head only there. Models that transform their logits after the head's product are refused.
"""

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.config.rules.file_rules import explain_untrainable
from hpc_rl.core.errors import ConfigError, NotBuilt
from hpc_rl.core.trial import load_json
from hpc_rl.engines.shared import (
    attention,
    drawing,
    fast_layers,
    hf_io,
    loading,
)
from hpc_rl.engines.shared.expert_files import Shapes
from hpc_rl.engines.shared.logprobs import token_logprobs
from hpc_rl.engines.shared.pieces import Piece
from hpc_rl.engines.shared.tensor_parallel import get_local

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# key of config.json -> value without effect
LOGIT_TRANSFORMS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


class LanguageModel(nn.Module):
    """A causal model of transformers that returns log-probabilities and entropies of wanted tokens."""

    def __init__(self, hf: Any, draws: drawing.Draws, layout: attention.Layout = "padded") -> None:
        super().__init__()
        self.hf = hf
        self.draws = draws
        self.tensor_group: dist.ProcessGroup | None = None  # ranks that share each matrix
        self.context_group: dist.ProcessGroup | None = None  # ranks that share the tokens
        self.layout = layout  # of its inputs
        self.entropy_clamp = 0.0  # see token_logprobs
        self.unread: Sequence[str] = ()  # names of tensors in its files that the model does not use
        self.has_fast_layers = fast_layers.fits(hf)
        if self.has_fast_layers:
            fast_layers.install(hf)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        source_N: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float | torch.Tensor,
        rows: attention.PackedRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        more: dict[str, Any] = {}
        if rows is not None and self.hf.config._attn_implementation in attention.NAMES:
            more |= {"packed_rows": rows, "context_group": self.context_group}
        if self.has_fast_layers:
            hidden = fast_layers.compute_trunk(self.trunk(), input_ids, position_ids, **more)
        else:
            more |= {} if position_ids is None else {"position_ids": position_ids}
            hidden = self.trunk()(input_ids=input_ids, use_cache=False, **more).last_hidden_state
        return self.outputs(hidden.flatten(0, 1)[source_N], targets_N, temperature)

    def trunk(self) -> Any:
        return self.hf.get_decoder()

    def outputs(
        self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, temperature: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and entropy of each target, float32 [N]; no entropy outside of training."""
        head_VH = get_local(self.hf.get_output_embeddings().weight)
        return token_logprobs(
            hidden_NH,
            head_VH,
            targets_N,
            temperature,
            group=self.tensor_group,
            entropy_clamp=self.entropy_clamp,
            needs_entropy=self.training,
        )

    def blocks(self, wanted: list[str] | None = None) -> list[nn.Module]:
        """Return the layers that FSDP shards: modules of the `wanted` classes, else the model's choice.

        Raises ConfigError if there is no such module.
        """
        names = set(self.hf._no_split_modules or () if wanted is None else wanted)
        found = [module for module in self.hf.modules() if type(module).__name__ in names]
        if wanted and not found:
            there = ", ".join(sorted({type(module).__name__ for module in self.hf.modules()}))
            raise ConfigError(
                f"fsdp.wrap_policy: the model has no module of class {', '.join(wanted)}; it has {there}"
            )
        return found


class ScoreModel(LanguageModel):
    """A reward model: one number per token in place of log-probabilities."""

    def trunk(self) -> Any:
        return self.hf.base_model

    def outputs(
        self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, temperature: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores_N = (hidden_NH @ self.hf.score.weight.T).squeeze(1).float()
        return scores_N, torch.zeros_like(scores_N, requires_grad=False)


def check(config: TrainEngineConfig, device: torch.device) -> None:
    """Raise ConfigError if the engine can't use the configuration on the device."""
    if device.type == "cpu" and config.attn_impl.startswith(("flash", "flex")):
        raise ConfigError(
            f"attn_impl {config.attn_impl!r} needs a GPU, but the trainer runs on the CPU; use attn_impl sdpa"
        )
    if not (Path(config.path) / "config.json").is_file():
        raise ConfigError(
            f"path {config.path!r} is not a directory with a Hugging Face checkpoint: config.json is missing"
        )
    if why := explain_untrainable(load_json(Path(config.path) / "config.json"), config.is_critic):
        raise ConfigError(f"path {config.path!r} {why}")


def build(
    config: TrainEngineConfig,
    seed: int,
    frozen: bool = False,
    device: torch.device | str = "cpu",
    layout: attention.Layout | None = None,
) -> LanguageModel:
    """Build the model with its parameters on `meta`, in float32; call `fill` next.

    The model will run on `device`. `layout` requests a layout of the inputs. Raises ConfigError, OSError.
    """
    torch.manual_seed(seed)
    with _clear_errors(config):
        read = load_architecture(Path(config.path), **_make_label_options(config))
        implementation, layout = attention.choose(
            config.attn_impl, read, torch.device(device), config.dtype, config.disable_dropout, layout
        )
        with drawing.build_without_parameters(draw=config.init_from_scratch) as draws:
            hf = _choose_class(config).from_config(
                read, dtype=torch.float32, attn_implementation=implementation
            )
    if config.is_critic and not isinstance(getattr(hf, "score", None), nn.Linear):
        raise NotBuilt(
            f"{hf.config.model_type} models can't be reward models yet: "
            "their head is not a linear layer `score`; use another model"
        )
    if not config.is_critic:
        _refuse_other_heads(hf)
    if config.disable_dropout:
        _disable_dropout(hf)
    if config.gradient_checkpointing and not frozen:
        _recompute_activations(hf)
        if config.fsdp.offload_activations:
            _offload_activations(hf)
    return (ScoreModel if config.is_critic else LanguageModel)(hf, draws, layout)


def fill(
    model: LanguageModel,
    config: TrainEngineConfig,
    seed: int,
    parts: Sequence[Piece],
    rank: int,
    shapes: Shapes | None = None,
) -> None:
    """Initialize a built and sharded model with random values or from the checkpoint. Collective.

    `parts` are this rank's pieces of its parameters and saved buffers. `shapes` are the shapes of the tensors
    of all ranks; by default the ones in `parts`. Random values do not depend on the number of ranks. Raises
    OSError, and ConfigError with the names of tensors that are missing or have another shape.
    """
    if config.init_from_scratch:
        drawing.draw_all(model.hf, model.draws)
        return
    head = {"score.weight"} if config.is_critic else set[str]()  # missing in checkpoints of language models
    with _clear_errors(config):
        match = loading.load(
            model.hf, Path(config.path), parts, head, lambda: _load_whole(config, seed), rank, shapes
        )
    if head - match.sources.keys():
        torch.manual_seed(seed)
        drawing.draw_module(model.hf, model.hf.score)
    model.unread = match.unread


@contextmanager
def _clear_errors(config: TrainEngineConfig) -> Iterator[None]:
    """Raise errors of transformers and safetensors as ConfigError that names the file, or as OSError."""
    folder = Path(config.path)
    try:
        yield
    except ConfigError:
        raise  # ConfigError is a ValueError too
    except (OSError, SafetensorError):
        hf_io.refuse_damage(folder)  # their message names no file, and an OSError would be retried
        raise
    except (ImportError, ValueError) as error:  # a missing package, an unknown attention or architecture
        hf_io.refuse_damage(folder)
        reason = " ".join(str(error).split())
        problem = f"transformers can't build the model {folder} (attn_impl {config.attn_impl!r}): {reason}"
        if isinstance(error, ImportError):
            problem += " Install the missing package in the trainer's Python, or set attn_impl sdpa."
        raise ConfigError(problem) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # impossible sizes or names
        hf_io.refuse_damage(folder)
        raise ConfigError(
            f"{folder / 'config.json'} does not describe a model that can be built: "
            f"{type(error).__name__}: {error}"
        ) from error


def load_architecture(folder: Path, **more: Any) -> Any:
    """Load a checkpoint's config.json with transformers. Raises OSError, ConfigError with the file's name."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, **more)
    except OSError:
        hf_io.refuse_damage(folder)  # transformers' message names no file
        raise
    except Exception as error:  # contradicting keys raise errors of many types, some of huggingface_hub
        hf_io.refuse_damage(folder)
        problem = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{folder / 'config.json'} can't be read as an architecture: {problem}. "
            "Correct it, or copy it again."
        ) from error


def _load_whole(config: TrainEngineConfig, seed: int) -> loading.Whole:
    """Load the whole model with transformers; return its tensors and the names of unused ones in files.

    Raises ConfigError, ImportError, OSError, ValueError.
    """
    disable_progress_bar()
    torch.manual_seed(seed)  # a missing head is drawn
    loaded: Any = _choose_class(config).from_pretrained(
        config.path,
        dtype=torch.float32,
        attn_implementation=config.attn_impl,
        local_files_only=True,
        output_loading_info=True,
        **_make_label_options(config),
    )
    hf, found = loaded
    wrong = sorted({str(name) for problem in ("missing_keys", "mismatched_keys") for name in found[problem]})
    wrong = [name for name in wrong if not (config.is_critic and name == "score.weight")]
    if wrong:
        raise ConfigError(
            f"the weights at {config.path} do not fit its config.json: {loading.format_some(wrong)} are "
            "missing or have another shape; use the complete files of one model"
        )
    tensors = {**dict(hf.named_parameters()), **dict(hf.named_buffers())}
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    return tensors, sorted(map(str, found["unexpected_keys"]))


def _choose_class(config: TrainEngineConfig) -> Any:
    return AutoModelForSequenceClassification if config.is_critic else AutoModelForCausalLM


def _make_label_options(config: TrainEngineConfig) -> dict[str, Any]:
    return {"num_labels": 1} if config.is_critic else {}


def _recompute_activations(hf: Any) -> None:
    # newer versions of transformers renamed the method and warn about the old name
    if hasattr(hf, "activation_checkpointing_enable"):
        hf.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _offload_activations(hf: Any) -> None:
    """Keep the inputs of layers, from which activations are recomputed, in CPU memory."""
    for module in hf.modules():
        if recompute := getattr(module, "_gradient_checkpointing_func", None):
            module._gradient_checkpointing_func = functools.partial(_recompute_with_offload, recompute)


def _recompute_with_offload(recompute: Callable[..., Any], *args: Any) -> Any:
    # tensors saved inside use the hooks of the recomputation, so these hooks see only the layer's input
    with torch.autograd.graph.saved_tensors_hooks(copy_to_cpu, copy_from_cpu):
        return recompute(*args)


def copy_to_cpu(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    """Copy a tensor to CPU memory without waiting, in the order of the GPU's work."""
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, held.copy_(tensor, non_blocking=True)


def copy_from_cpu(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    """Copy a tensor back to its device."""
    device, held = packed
    return held.to(device, non_blocking=True)


def _refuse_other_heads(hf: Any) -> None:
    for key, neutral in LOGIT_TRANSFORMS.items():
        if getattr(hf.config, key, neutral) not in (neutral, None):
            raise NotBuilt(f"models with {key} in config.json ({hf.config.model_type}) can't be trained yet")
    if getattr(hf.get_output_embeddings(), "bias", None) is not None:
        raise NotBuilt(f"{hf.config.model_type} models with a bias in the output head can't be trained yet")


def has_dropout(hf: Any) -> bool:
    """Return whether two training passes of a model differ."""
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in hf.modules())
    return modules or any(_is_dropout(name) and value for name, value in vars(hf.config).items())


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("pdrop")


def _disable_dropout(hf: Any) -> None:
    for name, value in vars(hf.config).items():
        if isinstance(value, float) and _is_dropout(name):
            setattr(hf.config, name, 0.0)
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def write_export(
    folder: Path,
    config: TrainEngineConfig,
    hf: Any,
    buckets: Iterable[Sequence[tuple[str, torch.Tensor]]],
    tokenizer: Path | None,
    writes: bool,
) -> None:
    """Write and fsync a Hugging Face checkpoint of a model built from `config`, on the rank that `writes`.

    The other ranks only iterate over the buckets, which are collective. Raises OSError after the last bucket.
    """
    problem: OSError | None = None
    try:
        writer = hf_io.CheckpointWriter(folder) if writes else None
    except OSError as error:
        writer, problem = None, error
    for bucket in buckets:
        try:
            for name, tensor in bucket if writer else ():
                assert writer is not None
                writer.add(name, tensor)
        except OSError as error:  # the other ranks are in a collective
            writer, problem = None, error
    if problem:
        raise problem
    if writer is None:
        return
    writer.finish()
    write_model_files(folder, config, hf, tokenizer)
    hf_io.fsync_folder(folder)


def write_model_files(folder: Path, config: TrainEngineConfig, hf: Any, tokenizer: Path | None) -> None:
    """Write config.json, and copy the generation config and the tokenizer's files. Raises OSError."""
    source = Path(config.path)
    (folder / "config.json").write_text(_make_exported_config(source, hf, config))
    generation = source / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)
    if tokenizer is not None:
        hf_io.copy_tokenizer(tokenizer, folder)


def _make_exported_config(path: Path, hf: Any, config: TrainEngineConfig) -> str:
    """Return the config.json of an export: the user's file with the new dtype, so any server can read it.

    A reward model also gets its class, its label, and the padding token that transformers needs to find the
    end of a row.
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
