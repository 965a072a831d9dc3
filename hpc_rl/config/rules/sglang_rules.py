"""Rules about the section `sglang`; each server backend has such a file."""

from collections.abc import Collection, Iterator

from hpc_rl.config.flags import check_flags
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.rules.consistency import list_server_pools
from hpc_rl.config.rules.training_rules import list_samplings
from hpc_rl.config.sglang_versions import DROPPED, FLAGS, RESERVED


def check_devices(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    if config.cluster.n_gpus_per_node:
        return
    uses_sglang = any(pool.backend == "sglang" for pool in list_server_pools(config))
    backend, allowed = config.sglang.attention_backend, ("torch_native", "intel_amx")
    without = "can't be used without GPUs (cluster.n_gpus_per_node 0)"
    if backend is not None and backend not in allowed:
        yield f"sglang.attention_backend {backend} {without}; allowed: {', '.join(allowed)}."
    if config.sglang.dtype == "float16":
        yield f"sglang.dtype float16 {without}; allowed: bfloat16, float32."
    # otherwise SGLang 0.5.23 ends at the first request
    if not config.sglang.disable_overlap_schedule and uses_sglang:
        yield f"sglang.disable_overlap_schedule false {without}; allowed: true."


def check_options(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    sglang = config.sglang
    for name, why in DROPPED.get(sglang.version, {}).items():
        if value := getattr(sglang, name):
            lacking = f"can't be used: SGLang {sglang.version} has no such option; {why}"
            yield f"sglang.{name} {str(value).lower()} {lacking}."
    for section, g in list_samplings(config).items():
        if g.stop and sglang.skip_tokenizer_init:
            use = f"set sglang.skip_tokenizer_init to false, or use {section}.stop_token_ids"
            yield f"{section}.stop needs the server's tokenizer: {use}."


def check_extra_args(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    yield from check_flags("sglang", config.sglang, FLAGS[config.sglang.version], RESERVED)


GRPO_RULES = [check_devices, check_options, check_extra_args]
