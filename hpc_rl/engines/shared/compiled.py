"""Compiles the layers of a model of transformers with torch.compile.

Each layer is compiled by itself, and layers with equal code and sizes share what was compiled. It serves all
sizes of micro-batches, except that a size of 1 is compiled separately. FSDP, the recomputation of
activations, and attention within packed rows stay outside of the compiled code.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.exc import CppCompileError

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.engines.shared import attention

logger = logging.getLogger(__name__)
OPTION = "enable_torch_compile"
BACKEND: str | Callable[..., Any] = "inductor"  # of torch.compile
# Of one function, in all models of the process: with and without gradients, with and without an adapter, one
# row or several, one token or several. Beyond the limit PyTorch would run the function as it is.
MAX_VARIANTS = 64
MAX_COMPILERS = 4  # processes of a rank, where PyTorch would start one for each core of the node
MAX_REASON = 300  # characters


@functools.cache
def check(device: str) -> None:
    """Compile a trivial function for a type of device. Raises ConfigError if the machine can't, OSError."""
    logger.info("a trivial function is compiled first, to try the compiler (%s)", OPTION)
    try:
        _configure()
        torch.compile(lambda x: 2 * x + 1, dynamic=True, backend=BACKEND)(torch.ones(8, device=device))
    except Exception as error:  # PyTorch has many types for a missing compiler, header or package
        cause = getattr(error, "inner_exception", error)
        if isinstance(cause, OSError):
            raise cause from error
        needed = "a C++ compiler (g++)" if device == "cpu" else "a C compiler (gcc) and Triton"
        remedy = "install it on the trainer's nodes"
        reason = " ".join(str(cause).split())[:MAX_REASON]
        if isinstance(cause, CppCompileError):  # its text begins with a long command
            logger.error("the compiler failed: %s", cause)
            remedy = "correct its installation on the trainer's nodes"
            reason = " ".join(cause.output.split())[-MAX_REASON:]
        raise ConfigError(
            Refusal(
                option=OPTION,
                value="true",
                kind=Kind.MACHINE,
                why=f": torch.compile needs {needed}, and failed: {reason.rstrip('.')}",
                use=f"{remedy}, or set {OPTION} false",
            )
        ) from error


def compile_layers(layers: Sequence[Any]) -> None:
    """Let modules compile their forward passes when they first run.

    Raises ConfigError if there are no layers.
    """
    if not layers:
        raise ConfigError(
            Refusal(
                option=OPTION,
                value="true",
                kind=Kind.UNSUPPORTED,
                why=": the model does not declare its layers, so none can be compiled",
                use="set it to false",
            )
        )
    _configure()
    attention.keep_uncompiled()
    functions = {layer.forward.__func__ for layer in layers}  # usually one, which all layers share
    compiled = {one: torch.compile(one, dynamic=True, backend=BACKEND) for one in functions}
    for layer in layers:
        recompute = None
        if getattr(layer, "gradient_checkpointing", False):
            # transformers would recompute within the compiled code, or go around it
            recompute, layer.gradient_checkpointing = layer._gradient_checkpointing_func, False
        forward = functools.partial(compiled[layer.forward.__func__], layer)
        layer.forward = functools.partial(_run, layer, forward, recompute)
    logger.info(
        "%d layers are compiled when they first run (%s): the first passes take up to some minutes more",
        len(layers),
        OPTION,
    )


def _run(
    layer: Any,
    forward: Callable[..., Any],
    recompute: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if recompute is not None and layer.training and torch.is_grad_enabled():
        return recompute(functools.partial(forward, **kwargs), *args)
    return forward(*args, **kwargs)


def _configure() -> None:
    dynamo: Any = torch._dynamo.config
    inductor: Any = torch._inductor.config
    shapes: Any = torch.fx.experimental._config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
    dynamo.specialize_float = True  # else it compiles twice, to find that constants of a layer are constant
    inductor.compile_threads = min(inductor.compile_threads or 1, MAX_COMPILERS)
    shapes.use_duck_shape = False  # sizes that are equal in the first micro-batch may differ later
