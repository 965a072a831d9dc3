"""LoRA: each adapted matrix W is frozen, and B A is trained beside it: W x + alpha / rank * B (A x).

Hu et al., arXiv 2106.09685, section 4.1. A [rank, in] begins with random values, B [out, rank] with zeros, as
in peft. The names of A and B are `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, where `<layer>` is a
linear layer of the Hugging Face model: all layouts of all engines use them.
"""

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core import adapters
from hpc_rl.core.adapters import AdapterSettings
from hpc_rl.core.errors import ConfigError
from hpc_rl.engines.shared.expert_files import Shapes
from hpc_rl.engines.shared.pieces import Piece

A, B = adapters.A, adapters.B
HEAD = f"{adapters.HEAD}.weight"
_EXPERTS, _ROUTER = ".experts.", ".gate"

Tensors = Mapping[str, torch.Tensor]


def is_factor(name: str) -> bool:
    """Return whether this is the name of an A or B."""
    return name.endswith((A, B))


def find_targets(hf: Any, wanted: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the sizes (out, in) of the linear layers to adapt, by name. Raises ConfigError.

    `wanted` are last parts of names; empty, or `all-linear`, selects all but the head and experts.
    """
    head = hf.get_output_embeddings()
    linear = {
        name: (module.out_features, module.in_features)
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name != adapters.HEAD
    }
    usable = {
        name: sizes for name, sizes in linear.items() if _EXPERTS not in name and not name.endswith(_ROUTER)
    }
    if not wanted or adapters.ALL_LINEAR in wanted:
        return usable
    leaves = {name.rpartition(".")[2] for name in usable}
    if unknown := [one for one in wanted if one not in leaves]:
        why = "the model has no such linear layers"
        if any(_EXPERTS in name for name, _ in hf.named_parameters()):
            why += " outside of its experts, and experts can't have adapters"
        raise ConfigError(f"target_modules {', '.join(unknown)}: {why}; it has {', '.join(sorted(leaves))}")
    return {name: sizes for name, sizes in usable.items() if name.rpartition(".")[2] in wanted}


def list_shapes(targets: Mapping[str, tuple[int, int]], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A and B of each layer, by name."""
    for name, (num_out, num_in) in targets.items():
        if rank > min(num_out, num_in):
            raise ConfigError(f"lora_rank {rank} exceeds the smallest width of {name}: [{num_out}, {num_in}]")
    return adapters.list_factor_shapes(targets, rank)


# -- in a model of transformers


class Factor(nn.Module):
    """A or B. Not a linear layer, so that transformers draws no values for it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter."""

    lora_A: Factor
    lora_B: Factor
    scale: float
    uses_adapter: bool

    @classmethod
    def adapt(cls, linear: nn.Linear, rank: int, scale: float) -> None:
        """Turn a linear layer, which tensor parallelism may have cut, into an adapted one."""
        weight = linear.weight
        first = torch.empty(rank, weight.shape[1], device=weight.device, dtype=torch.float32)
        second = torch.empty(weight.shape[0], rank, device=weight.device, dtype=torch.float32)
        if isinstance(weight, DTensor):
            mesh, cuts_outputs = weight.device_mesh, weight.placements[0] == Shard(0)
            first = distribute_tensor(first, mesh, [Replicate() if cuts_outputs else Shard(1)])
            second = distribute_tensor(second, mesh, [Shard(0) if cuts_outputs else Replicate()])
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.lora_A, linear.lora_B = Factor(first), Factor(second)
        linear.scale, linear.uses_adapter = scale, True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        if not self.uses_adapter:
            return output
        return output + self.scale * F.linear(F.linear(input, self.lora_A.weight), self.lora_B.weight)


def attach(hf: Any, targets: Collection[str], config: TrainEngineConfig) -> None:
    """Add adapters to linear layers of a model; freeze all other parameters but a reward model's head."""
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(config.is_critic and name == HEAD)
    for name in targets:
        AdaptedLinear.adapt(hf.get_submodule(name), config.lora_rank, config.lora_alpha / config.lora_rank)


@contextmanager
def disable(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Compute with the base model alone in some modules."""
    adapted: list[Any] = [one for part in parts for one in part.modules() if hasattr(one, "uses_adapter")]
    for module in adapted:
        module.uses_adapter = False
    try:
        yield
    finally:
        for module in adapted:
            module.uses_adapter = True


# -- values


def draw(pieces: Iterable[Piece], seed: int) -> None:
    """Draw the initial values of a rank's pieces; they do not depend on ranks or on other tensors."""
    for piece in pieces:
        if piece.name.endswith(B):
            piece.local.detach().zero_()
        elif piece.name.endswith(A):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(piece.name.encode()))
            whole = torch.empty(piece.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            piece.local.detach().copy_(whole[piece.slices()])


def load(folder: Path, pieces: Iterable[Piece], shapes: Shapes) -> None:
    """Load a rank's pieces from an adapter's files. Raises ConfigError, OSError."""
    if problem := adapters.explain_difference(adapters.load_tensor_shapes(folder), shapes):
        raise ConfigError(
            f"the adapter {folder} {problem}. It must have the trial's base (path), lora_rank and "
            "target_modules."
        )
    try:
        with safe_open(folder / adapters.WEIGHTS_NAME, framework="pt") as opened:
            for piece in pieces:
                tensor = opened.get_tensor(adapters.PREFIX + piece.name)
                if not tensor.isfinite().all():
                    raise ConfigError(
                        f"the adapter {folder} has values in {piece.name} that are not finite. Use another."
                    )
                piece.local.detach().copy_(tensor[piece.slices()])
    except SafetensorError as error:
        raise ConfigError(f"the adapter {folder} can't be read: {error}. Copy it again.") from error


def gather(pieces: Iterable[Piece], shapes: Shapes, device: torch.device) -> dict[str, torch.Tensor]:
    """Return whole tensors, float32, of pieces that are divided among the ranks. Collective."""
    flat = torch.zeros(sum(map(math.prod, shapes.values())), device=device)
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    wholes = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
    for piece in pieces:
        wholes[piece.name][piece.slices()] = piece.local.detach().to(device, torch.float32)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(flat)
    return wholes


class Merge(NamedTuple):
    """Merges an adapter into the weights of its base. `factors` are whole."""

    factors: Tensors
    scale: float

    def apply(self, piece: Piece) -> Piece:
        """Return a piece of a weight with the adapter; the piece itself if it is not adapted."""
        layer = piece.name.removesuffix(".weight")
        if layer + A not in self.factors:
            return piece
        rows, columns = piece.slices()
        device = piece.local.device
        first, second = self.factors[layer + A][:, columns], self.factors[layer + B][rows]
        product = second.to(device) @ first.to(device)
        merged = piece.local.detach().float() + self.scale * product
        return piece._replace(local=merged.to(piece.local.dtype))


# -- files


def write(folder: Path, tensors: Tensors, settings: AdapterSettings) -> None:
    """Write an adapter's files. Raises OSError."""
    named = {adapters.PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / adapters.WEIGHTS_NAME, metadata={"format": "pt"})
    settings.write(folder)


def make_settings(config: TrainEngineConfig, targets: Collection[str]) -> AdapterSettings:
    """Return the settings of the adapter that is trained."""
    modules = tuple(sorted({name.rpartition(".")[2] for name in targets}))
    return AdapterSettings(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        modules=modules,
        base=config.path,
        has_head=config.is_critic,
        kind=config.peft_type,
    )
