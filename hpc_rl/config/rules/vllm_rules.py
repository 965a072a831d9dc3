"""Rules about the section `vllm`."""

from collections.abc import Collection, Iterator

from hpc_rl.config.flags import check_flags
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.rules.training_rules import refuse_without_gpus
from hpc_rl.config.vllm_versions import FLAGS, RESERVED
from hpc_rl.core.refusal import Refusal


def check_devices(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    if config.cluster.n_gpus_per_node:
        return
    if config.vllm.dtype == "float16":
        yield refuse_without_gpus("vllm.dtype", "float16", "auto, bfloat16, float32")
    if config.vllm.cpu_offload_gb:
        yield refuse_without_gpus("vllm.cpu_offload_gb", config.vllm.cpu_offload_gb, "0")


def check_extra_args(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    yield from check_flags("vllm", config.vllm, FLAGS[config.vllm.version], RESERVED)


GRPO_RULES = [check_devices, check_extra_args]
