"""The command-line flags of each supported vLLM version."""

from hpc_rl.config.flags import Flags, Reserved, list_flags
from hpc_rl.config.options.inference import VLLMConfig

NO_FLAGS = {"version", "extra_args"}
_SET_BY_THE_ROLE = (
    "model", "tokenizer", "uds", "tensor_parallel_size", "enable_scale_out", "logprobs_mode",
    "generation_config", "worker_extension_cls", "runner", "weight_transfer_config", "enable_sleep_mode",
    "enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "nnodes", "node_rank", "master_addr",
    "master_port", "headless", "distributed_executor_backend",
)  # fmt: skip

FLAGS: dict[str, Flags] = {"0.32.0": list_flags(VLLMConfig, NO_FLAGS, _SET_BY_THE_ROLE, {})}
RESERVED = Reserved(
    also={
        **dict.fromkeys(("--tensor-parallel-size", "-tp"), "--tensor-parallel-size"),
        "--device-memory-utilization": "--gpu-memory-utilization",
        "--enable-chunked-prefill": "--no-enable-chunked-prefill",
        "--enable-prefix-caching": "--no-enable-prefix-caching",
        "-ep": "--enable-expert-parallel",
    },
    set_by_the_trial=(
        *("--host", "--port", "--api-key", "--config", "--served-model-name", "--headless", "--grpc"),
        *("--data-parallel-size", "-dp", "--pipeline-parallel-size", "-pp", "--nnodes", "-n"),
        *("--node-rank", "-r", "--master-addr", "--master-port", "--api-server-count", "-asc"),
    ),
)
