"""Models without memory for their parameters, and random values for them once they are sharded.

A model is built with its parameters on `meta`, its buffers real. The random numbers of a new model are those
that transformers draws for the whole model on one CPU: every rank draws each tensor whole, one after another,
and keeps its own rows. So they depend on the seed alone, and not on ranks, devices and types.
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

from hpc_rl.engines.shared.pieces import Piece, offset_of

# a model, or its trunk, and the random state from which its weights are drawn
Draws = list[tuple[Any, torch.Tensor]]


@contextmanager
def without_parameters(draw: bool) -> Iterator[Draws]:
    """Build models with parameters on `meta` and real buffers; yields what `draw_all` needs if `draw`.

    A model initializes its weights when it is built, its trunk before its head exists. With `draw` numbers
    are drawn for that, in vain; without, none are.
    """
    module_class, model_class = cast(Any, nn.Module), cast(Any, PreTrainedModel)
    register, initialize = module_class.register_parameter, model_class.initialize_weights
    draws: Draws = []

    def on_meta(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        register(module, name, value)
        if value is not None and not value.is_meta:
            module._parameters[name] = nn.Parameter(value.to("meta"), requires_grad=value.requires_grad)

    def noted(hf: Any) -> None:
        if draw:
            draws.append((hf, torch.get_rng_state()))
            initialize(hf)

    module_class.register_parameter, model_class.initialize_weights = on_meta, noted
    try:
        with Drawn() if draw else nullcontext():
            yield draws
    finally:
        module_class.register_parameter, model_class.initialize_weights = register, initialize


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the parameters on `meta` uninitialized memory on the device; those that are tied remain so."""

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
    with torch.no_grad(), Drawn(), _untied(hf):
        for one, random_state in draws:
            torch.set_rng_state(random_state)
            one.initialize_weights()


def draw_module(hf: Any, module: nn.Module) -> None:
    """Draw the weights of one module."""
    with torch.no_grad(), Drawn():
        hf._init_weights(module)


@contextmanager
def into(pieces: Iterable[Piece], hf: Any) -> Iterator[None]:
    """Draw weights of a model that remains on `meta`: module by module, each to be copied to the pieces."""
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
    """Random in-place operations as if their tensor was whole, in float32 and on the CPU.

    Those on `meta` draw their numbers in vain, as do weights that transformers overwrites.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else None
        if not isinstance(target, torch.Tensor):
            return func(*args, **kwargs)
        if func is torch.ops.aten.select.int and isinstance(target, DTensor):
            return _row(target, *args[1:])  # one of DTensor is a copy: the row of a padding token is zeroed
        drawn = torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket.__name__.endswith("_")
        if not drawn or (target.device.type == "cpu" and not isinstance(target, DTensor)):
            return func(*args, **kwargs)
        dtype = torch.float32 if target.is_floating_point() else target.dtype
        whole = func(torch.empty(target.shape, dtype=dtype), *args[1:], **kwargs)
        if isinstance(target, DTensor):
            piece = Piece("", target.to_local(), offset_of(target), tuple(target.shape))
            piece.local.copy_(whole[piece.slices()])
        elif not target.is_meta:
            target.copy_(whole)
        return target


def _row(tensor: DTensor, dim: int, index: int) -> torch.Tensor:
    """Return memory of one row, to write to; another rank's is a scratch one."""
    assert dim == 0
    local, at = tensor.to_local(), index % tensor.shape[0] - offset_of(tensor)[0]
    return local[at] if 0 <= at < len(local) else torch.empty(tensor.shape[1:], device=local.device)


@contextmanager
def _untied(hf: Any) -> Iterator[None]:
    """Set tied weights apart from those that they share: transformers draws both, and ties them later."""
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
