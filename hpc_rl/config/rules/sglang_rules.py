"""Rules about the section `sglang`; each server backend has such a file."""

from collections.abc import Collection, Iterator

from hpc_rl.config.flags import check_flags
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.rules.consistency import list_server_pools
from hpc_rl.config.rules.training_rules import list_samplings, refuse_without_gpus
from hpc_rl.config.sglang_versions import FLAGS, RESERVED
from hpc_rl.core.refusal import Kind, Refusal


def check_devices(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    if config.cluster.n_gpus_per_node:
        return
    uses_sglang = any(pool.backend == "sglang" for pool in list_server_pools(config))
    backend, allowed = config.sglang.attention_backend, ("torch_native", "intel_amx")
    if backend is not None and backend not in allowed:
        yield refuse_without_gpus("sglang.attention_backend", backend, ", ".join(allowed))
    if config.sglang.dtype == "float16":
        yield refuse_without_gpus("sglang.dtype", "float16", "bfloat16, float32")
    # otherwise SGLang 0.5.23 ends at the first request
    if not config.sglang.disable_overlap_schedule and uses_sglang:
        yield refuse_without_gpus("sglang.disable_overlap_schedule", "false", "true")


def check_options(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    sglang = config.sglang
    for section, g in list_samplings(config).items():
        if g.stop and sglang.skip_tokenizer_init:
            skip, ids = "sglang.skip_tokenizer_init", f"{section}.stop_token_ids"
            why = f"needs the server's tokenizer: set {skip} to false, or use {ids}"
            yield Refusal(option=f"{section}.stop", kind=Kind.CONFLICT, why=why, related=(skip, ids))


def check_extra_args(config: GRPOConfig, explicit: Collection[str]) -> Iterator[Refusal]:
    yield from check_flags("sglang", config.sglang, FLAGS[config.sglang.version], RESERVED)


GRPO_RULES = [check_devices, check_options, check_extra_args]
