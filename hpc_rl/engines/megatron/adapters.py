"""LoRA beside Megatron's parallel linear layers, which join several matrices of the Hugging Face model.

A layer that is cut by outputs has A on every tensor rank, and the rows of B of its outputs; one that is cut
by inputs has its columns of A, and B whole. Between the two, only `rank` values per token are exchanged.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn

from hpc_rl.engines.megatron.weight_map import Rectangle
from hpc_rl.engines.shared.lora import A, B


class Factor(NamedTuple):
    """This rank's part of an A or B, and its rectangles."""

    value: nn.Parameter
    rectangles: list[Rectangle]


class LayerAdapter(nn.Module):
    """The adapters of one linear layer; the subclasses compute the part that they add to its output."""

    uses_adapter = True

    def __init__(self, linear: Any, rectangles: list[Rectangle], targets: Collection[str], rank: int) -> None:
        """Make A and B without values. `rectangles` are of the layer's weight, `targets` names of layers."""
        super().__init__()
        self.first, self.second = nn.ParameterList(), nn.ParameterList()
        self.factors: list[Factor] = []
        self.scale = 1.0
        self.sequence_parallel = linear.config.sequence_parallel
        self.like = linear.weight
        self.rectangles = rectangles
        self.layers = [
            name
            for name in dict.fromkeys(one.name.removesuffix(".weight") for one in rectangles)
            if name in targets
        ]
        for layer in self.layers:
            own = [one for one in rectangles if one.name == f"{layer}.weight"]
            self._add_factors(layer, own, rank)

    def _add_factors(self, layer: str, own: list[Rectangle], rank: int) -> None:
        raise NotImplementedError

    def _make(self, rectangles: list[Rectangle], shape: tuple[int, int], is_partial: bool) -> nn.Parameter:
        """Make a parameter. If `is_partial`, each tensor rank computes its gradient from its own tokens."""
        value = nn.Parameter(torch.empty(shape, dtype=self.like.dtype, device=self.like.device))
        setattr(value, "sequence_parallel", is_partial)  # noqa: B010
        self.factors.append(Factor(value, rectangles))
        return value


class ColumnAdapter(LayerAdapter):
    """Beside a layer whose outputs are cut: q, k and v, or gate and up, in one matrix."""

    def _add_factors(self, layer: str, own: list[Rectangle], rank: int) -> None:
        num_out, num_in = own[0].shape
        first = Rectangle(layer + A, 0, (rank, num_in), (0, 0), (rank, num_in))
        self.first.append(self._make([first], (rank, num_in), True))
        rows, second = 0, []
        for one in own:
            offset = (one.offset[0], 0)
            second.append(Rectangle(layer + B, rows * rank, (one.sizes[0], rank), offset, (num_out, rank)))
            rows += one.sizes[0]
        self.second.append(self._make(second, (rows, rank), False))

    def forward(self, input_t1H: torch.Tensor) -> torch.Tensor:
        thin = F.linear(input_t1H, torch.cat(list(self.first)))
        if self.sequence_parallel:
            thin = gather_from_sequence_parallel_region(thin)
        thins = thin.chunk(len(self.layers), -1)
        outputs = {
            f"{layer}.weight": F.linear(one, second)
            for layer, one, second in zip(self.layers, thins, self.second, strict=True)
        }
        used = dict.fromkeys(outputs, 0)
        parts = []
        for one in self.rectangles:  # in the order of the layer's outputs
            if one.name not in outputs:
                parts.append(thin.new_zeros(*thin.shape[:-1], one.sizes[0]))
                continue
            begin = used[one.name]
            used[one.name] = begin + one.sizes[0]
            parts.append(outputs[one.name][..., begin : used[one.name]])
        return self.scale * torch.cat(parts, -1)


class RowAdapter(LayerAdapter):
    """Beside a layer whose inputs are cut."""

    def _add_factors(self, layer: str, own: list[Rectangle], rank: int) -> None:
        (one,) = own
        num_out, num_in = one.shape
        columns = one.sizes[1]
        first = Rectangle(layer + A, 0, (rank, columns), (0, one.offset[1]), (rank, num_in))
        self.first.append(self._make([first], (rank, columns), False))
        second = Rectangle(layer + B, 0, (num_out, rank), (0, 0), (num_out, rank))
        self.second.append(self._make([second], (num_out, rank), True))

    def forward(self, input_t1h: torch.Tensor) -> torch.Tensor:
        thin = F.linear(input_t1h, self.first[0])
        if self.sequence_parallel:
            thin = reduce_scatter_to_sequence_parallel_region(thin)
        return self.scale * F.linear(thin, self.second[0])


def attach(
    chunk: nn.Module,
    rectangles_of: Callable[[str], list[Rectangle]],
    targets: Collection[str],
    rank: int,
    scale: float,
) -> Iterator[Factor]:
    """Add adapters to the linear layers of a chunk; yield their factors.

    `rectangles_of` returns the rectangles of a parameter of the chunk.
    """
    kinds = {ColumnParallelLinear: ColumnAdapter, RowParallelLinear: RowAdapter}
    layers: list[tuple[str, Any]] = [(name, one) for name, one in chunk.named_modules() if type(one) in kinds]
    for name, linear in layers:
        if linear.weight is None or ".experts." in name:
            continue
        found = rectangles_of(f"{name}.weight")
        if any(one.name.removesuffix(".weight") in targets for one in found):
            adapter = kinds[type(linear)](linear, found, targets, rank)
            adapter.scale = scale
            linear.adapter = adapter
            linear.register_forward_hook(_add_output)
            yield from adapter.factors


def _add_output(linear: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
    if not linear.adapter.uses_adapter:
        return output
    return output[0] + linear.adapter(inputs[0]), output[1]
