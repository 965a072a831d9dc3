"""Rules about the section `sglang`; another server backend has a file like this."""

from collections.abc import Collection, Iterator

from hpc_rl.config.flags import refusals
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.rules.consistency import server_pools
from hpc_rl.config.rules.training_rules import samplings
from hpc_rl.config.sglang_versions import DROPPED, FLAGS, RESERVED


def devices(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    if config.cluster.n_gpus_per_node:
        return
    uses_sglang = any(pool.backend == "sglang" for pool in server_pools(config))
    backend, allowed = config.sglang.attention_backend, ("torch_native", "intel_amx")
    without = "can't be used without GPUs (cluster.n_gpus_per_node 0)"
    if backend is not None and backend not in allowed:
        yield f"sglang.attention_backend {backend} {without}; allowed: {', '.join(allowed)}."
    if config.sglang.dtype == "float16":
        yield f"sglang.dtype float16 {without}; allowed: bfloat16, float32."
    # SGLang 0.5.23 ends at the first request otherwise
    if not config.sglang.disable_overlap_schedule and uses_sglang:
        yield f"sglang.disable_overlap_schedule false {without}; allowed: true."


def options(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    sglang = config.sglang
    for name, why in DROPPED.get(sglang.version, {}).items():
        if value := getattr(sglang, name):
            lacking = f"can't be used: SGLang {sglang.version} has no such option; {why}"
            yield f"sglang.{name} {str(value).lower()} {lacking}."
    for section, g in samplings(config).items():
        if g.stop and sglang.skip_tokenizer_init:
            use = f"set sglang.skip_tokenizer_init to false, or use {section}.stop_token_ids"
            yield f"{section}.stop needs the server's tokenizer: {use}."


def extra_args(config: GRPOConfig, explicit: Collection[str]) -> Iterator[str]:
    yield from refusals("sglang", config.sglang, FLAGS[config.sglang.version], RESERVED)


GRPO_RULES = [devices, options, extra_args]
