"""Models without memory for their parameters, and random values for them once they are sharded.

A model is built with parameters on `meta` and real buffers. A new model gets the same random numbers that
transformers draws for the whole model on one CPU: every rank draws each tensor whole, one after another, and
keeps its own rows. So the numbers depend on the seed only, not on ranks, devices or types.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hpc_rl.engines.shared.pieces import Piece, find_offset

# a model, or its trunk, and the random state before its weights are drawn
Draws = list[tuple[Any, torch.Tensor]]


@contextmanager
def build_without_parameters(draw: bool) -> Iterator[Draws]:
    """Build models with parameters on `meta` and real buffers; if `draw`, yields the input of `draw_all`.

    Transformers initializes the weights while it builds a model, the trunk before the head exists. If `draw`,
    this consumes random numbers and discards them, to record the random states.
    """
    module_class, model_class = cast(Any, nn.Module), cast(Any, PreTrainedModel)
    register, initialize = module_class.register_parameter, model_class.initialize_weights
    draws: Draws = []

    def on_meta(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        register(module, name, value)
        if value is not None and not value.is_meta:
            module._parameters[name] = nn.Parameter(value.to("meta"), requires_grad=value.requires_grad)

    def record_draw(hf: Any) -> None:
        if draw:
            draws.append((hf, torch.get_rng_state()))
            initialize(hf)

    module_class.register_parameter, model_class.initialize_weights = on_meta, record_draw
    try:
        with Drawn() if draw else nullcontext():
            yield draws
    finally:
        module_class.register_parameter, model_class.initialize_weights = register, initialize


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the parameters on `meta` uninitialized memory on the device. Tied parameters stay tied."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # keeps each parameter the same object
    try:
        model._apply(real)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def draw_all(hf: Any, draws: Draws) -> None:
    """Draw the weights of a sharded model, in the order of transformers."""
    for module in hf.modules():
        module._is_hf_initialized = False
    with torch.no_grad(), Drawn(), _untie(hf):
        for one, random_state in draws:
            torch.set_rng_state(random_state)
            one.initialize_weights()


def draw_module(hf: Any, module: nn.Module) -> None:
    """Draw the weights of one module."""
    with torch.no_grad(), Drawn():
        hf._init_weights(module)


@contextmanager
def draw_into(pieces: Iterable[Piece], hf: Any) -> Iterator[None]:
    """Draw the weights of a model on `meta`, module by module, and copy them to the pieces."""
    names = {id(one): name for name, one in hf.named_parameters()}
    targets = defaultdict[str, list[Piece]](list)
    for piece in pieces:
        targets[piece.name].append(piece)

    def instead(initialize: Any) -> Any:
        def draw(module: nn.Module) -> None:
            described = {
                name: one for name, one in module._parameters.items() if one is not None and one.is_meta
            }
            for name, one in described.items():
                module._parameters[name] = nn.Parameter(torch.empty(one.shape), requires_grad=False)
            initialize(module)
            for name, one in described.items():
                drawn = module._parameters[name]
                module._parameters[name] = one
                for piece in targets[names.get(id(one), "")]:
                    assert drawn is not None
                    piece.local.detach().copy_(drawn[piece.slices()])

        return draw

    models = [one for one in hf.modules() if isinstance(one, PreTrainedModel)]
    for one in models:
        one.__dict__["_init_weights"] = instead(one._init_weights)
    try:
        yield
    finally:
        for one in models:
            del one.__dict__["_init_weights"]


class Drawn(TorchDispatchMode):
    """Runs random in-place operations as if their tensor were whole, in float32 and on the CPU.

    Operations on `meta` tensors consume random numbers and discard them.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else None
        if not isinstance(target, torch.Tensor):
            return func(*args, **kwargs)
        if func is torch.ops.aten.select.int and isinstance(target, DTensor):
            # DTensor returns a copy, but transformers zeroes the row of the padding token in place
            return _select_row(target, *args[1:])
        drawn = torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket.__name__.endswith("_")
        if not drawn or (target.device.type == "cpu" and not isinstance(target, DTensor)):
            return func(*args, **kwargs)
        dtype = torch.float32 if target.is_floating_point() else target.dtype
        whole = func(torch.empty(target.shape, dtype=dtype), *args[1:], **kwargs)
        if isinstance(target, DTensor):
            piece = Piece("", target.to_local(), find_offset(target), tuple(target.shape))
            piece.local.copy_(whole[piece.slices()])
        elif not target.is_meta:
            target.copy_(whole)
        return target


def _select_row(tensor: DTensor, dim: int, index: int) -> torch.Tensor:
    """Return the memory of one row, for writing; scratch memory if another rank has the row."""
    assert dim == 0
    local, at = tensor.to_local(), index % tensor.shape[0] - find_offset(tensor)[0]
    return local[at] if 0 <= at < len(local) else torch.empty(tensor.shape[1:], device=local.device)


@contextmanager
def _untie(hf: Any) -> Iterator[None]:
    """Untie weights for a while: transformers draws each of them and ties them later."""
    kept = {name for name, _ in hf.named_parameters()}
    tied = [(name, one) for name, one in hf.named_parameters(remove_duplicate=False) if name not in kept]
    owners = [(hf.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], one) for name, one in tied]
    for owner, name, one in owners:
        owner._parameters[name] = nn.Parameter(torch.empty(one.shape, device="meta"))
    try:
        yield
    finally:
        for owner, name, one in owners:
            owner._parameters[name] = one
