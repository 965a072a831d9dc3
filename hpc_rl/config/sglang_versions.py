"""The command-line flags of each supported SGLang version."""

from hpc_rl.config.flags import Flags, Reserved, list_flags
from hpc_rl.config.options.inference import SGLangConfig

NO_FLAGS = {"version", "extra_args"}
_SET_BY_THE_ROLE = (
    "tokenizer_path", "host", "port", "weight_version", "device", "sampling_defaults", "is_embedding",
    "incremental_streaming_output", "enable_lora", "max_lora_rank", "lora_target_modules",
    "max_loras_per_batch", "lora_backend", "nnodes", "node_rank", "dist_init_addr",
)  # fmt: skip
_RENAMED_0_5_23: Flags = {
    "tensor_parallel_size": "--tp-size",
    "config_file": "--config",
    "cuda_graph_max_bs": "--cuda-graph-max-bs-decode",
    "cuda_graph_bs": "--cuda-graph-bs-decode",
    "disable_cuda_graph": (
        "--cuda-graph-backend-decode",
        "disabled",
        "--cuda-graph-backend-prefill",
        "disabled",
    ),
}


FLAGS: dict[str, Flags] = {"0.5.23": list_flags(SGLangConfig, NO_FLAGS, _SET_BY_THE_ROLE, _RENAMED_0_5_23)}
RESERVED = Reserved(
    also={
        "--model": "--model-path",
        "--tp": "--tp-size",
        "--tensor-parallel-size": "--tp-size",
        "--ep": "--ep-size",
        "--expert-parallel-size": "--ep-size",
        "--dp": "--dp-size",
        "--data-parallel-size": "--dp-size",
    },
    set_by_the_trial=(
        *("--model-path", "--dp-size", "--nnodes", "--node-rank", "--dist-init-addr"),
        *("--api-key", "--admin-api-key"),
    ),
)
