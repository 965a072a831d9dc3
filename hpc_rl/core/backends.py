"""The backends that an allocation can name: kinds of generation servers, and train engines.

Configuration and plan read these tables without importing a backend. The classes are named in
hpc_rl/servers/__init__.py and hpc_rl/engines/__init__.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServerBackend:
    """A kind of generation server, as seen by configuration and plan."""

    section: str  # section of the configuration with its options
    dimensions: str = "dtp"  # that an expression may give
    supported: str = "d"  # dimensions that can be above 1 today
    on_gpus: bool = True  # whether it can use GPUs
    is_process: bool = True  # a separate process: only it gets the environment variables of servers
    spans_nodes: bool = True  # whether a replica can have processes on several nodes
    # Options of its section: the maximum number of tokens in a sequence; a divisor of a server's units.
    context_option: str = ""
    divisor_option: str = ""
    without_gpus: Mapping[str, Any] = field(default_factory=dict)  # option -> its default without GPUs
    # Unsupported option of gconfig -> advice.
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainBackend:
    """A train engine, as seen by configuration and plan."""

    dimensions: str  # that an expression may give
    model_types: tuple[str, ...] = ()  # of config.json that it can train; empty: all of transformers
    # A dimension -> model types that it can split along it; a dimension not named here works for all.
    divided_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_USE_SGLANG = (
    "use sglang servers: with this option, vllm returns log-probabilities of the filtered tokens, not of the "
    "model"
)
SERVER_BACKENDS: dict[str, ServerBackend] = {
    "embedded": ServerBackend(
        "embedded",
        dimensions="d",
        on_gpus=False,
        is_process=False,
        spans_nodes=False,
        lacks={
            "stop": "use gconfig.stop_token_ids, or sglang or vllm servers",
            **dict.fromkeys(("frequency_penalty", "min_p", "repetition_penalty"), "use sglang servers"),
        },
    ),
    "sglang": ServerBackend(
        "sglang",
        supported="dt",
        context_option="context_length",
        divisor_option="ep_size",
        without_gpus={
            "dtype": "float32",
            "attention_backend": "torch_native",
            "mem_fraction_static": None,
            "chunked_prefill_size": None,
            "max_prefill_tokens": None,
            "disable_overlap_schedule": True,
        },
    ),
    "vllm": ServerBackend(
        "vllm",
        supported="dt",
        context_option="max_model_len",
        without_gpus={"dtype": "float32", "gpu_memory_utilization": None, "enforce_eager": True},
        lacks=dict.fromkeys(("top_p", "top_k", "min_p"), _USE_SGLANG),
    ),
}
# model_type of config.json
_PLAIN_DECODERS = ("gemma", "granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")
_OTHER_DECODERS = ("mixtral", "olmo2", "phi3", "qwen3_moe")
TRAIN_BACKENDS: dict[str, TrainBackend] = {
    "fsdp": TrainBackend(
        "dtc",
        divided_types={"t": _PLAIN_DECODERS, "c": (*_PLAIN_DECODERS, *_OTHER_DECODERS)},
    ),
    "megatron": TrainBackend(
        "dptce",
        model_types=("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    ),
}


def choose_server_backend(n_gpus_per_node: int) -> str:
    """Return the default backend, for an empty `allocation_mode`."""
    return "sglang" if n_gpus_per_node else "embedded"
