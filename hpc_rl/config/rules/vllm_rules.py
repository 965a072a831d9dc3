"""Rules about the section `vllm`."""

from collections.abc import Collection, Iterator

from hpc_rl.config.flags import check_flags
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.vllm_versions import FLAGS, RESERVED


def check_devices(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    if config.cluster.n_gpus_per_node:
        return
    without = "can't be used without GPUs (cluster.n_gpus_per_node 0)"
    if config.vllm.dtype == "float16":
        yield f"vllm.dtype float16 {without}; allowed: auto, bfloat16, float32."
    if config.vllm.cpu_offload_gb:
        yield f"vllm.cpu_offload_gb {config.vllm.cpu_offload_gb} {without}; allowed: 0."


def check_extra_args(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    yield from check_flags("vllm", config.vllm, FLAGS[config.vllm.version], RESERVED)


GRPO_RULES = [check_devices, check_extra_args]
