"""Command line of SGLang: a table for each version that we know, and the flags of one replica. Pure.

A version that is not in the table gets the newest one that is, with a warning: SGLang itself refuses a flag that it does
not know, and the server's error shows its words.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from hpc_rl.config.generation import SGLangConfig
from hpc_rl.config.sglang_versions import DROPPED

# our name -> SGLang's flag, or for a switch the words that stand for it. What a version no longer has: config/sglang_versions.py.
_0_5_23: dict[str, str | tuple[str, ...]] = {
    "model_path": "--model-path",
    "tokenizer_path": "--tokenizer-path",
    "host": "--host",
    "port": "--port",
    "weight_version": "--weight-version",
    "random_seed": "--random-seed",
    "dtype": "--dtype",
    "device": "--device",
    "skip_tokenizer_init": "--skip-tokenizer-init",
    "disable_radix_cache": "--disable-radix-cache",
    "disable_cuda_graph_padding": "--disable-cuda-graph-padding",
    "enable_nccl_nvls": "--enable-nccl-nvls",
    "disable_outlines_disk_cache": "--disable-outlines-disk-cache",
    "disable_custom_all_reduce": "--disable-custom-all-reduce",
    "disable_overlap_schedule": "--disable-overlap-schedule",
    "enable_mixed_chunk": "--enable-mixed-chunk",
    "enable_torch_compile": "--enable-torch-compile",
    "torch_compile_max_bs": "--torch-compile-max-bs",
    "enable_p2p_check": "--enable-p2p-check",
    "triton_attention_reduce_in_fp32": "--triton-attention-reduce-in-fp32",
    "triton_attention_num_kv_splits": "--triton-attention-num-kv-splits",
    "num_continuous_decode_steps": "--num-continuous-decode-steps",
    "enable_memory_saver": "--enable-memory-saver",
    "allow_auto_truncate": "--allow-auto-truncate",
    "attention_backend": "--attention-backend",
    "enable_multimodal": "--enable-multimodal",
    "sampling_backend": "--sampling-backend",
    "context_length": "--context-length",
    "mem_fraction_static": "--mem-fraction-static",
    "max_running_requests": "--max-running-requests",
    "max_total_tokens": "--max-total-tokens",
    "chunked_prefill_size": "--chunked-prefill-size",
    "max_prefill_tokens": "--max-prefill-tokens",
    "schedule_policy": "--schedule-policy",
    "schedule_conservativeness": "--schedule-conservativeness",
    "cpu_offload_gb": "--cpu-offload-gb",
    "kv_cache_dtype": "--kv-cache-dtype",
    "ep_size": "--ep-size",
    "log_level": "--log-level",
    "log_level_http": "--log-level-http",
    "log_requests": "--log-requests",
    "log_requests_level": "--log-requests-level",
    "show_time_cost": "--show-time-cost",
    "enable_metrics": "--enable-metrics",
    "decode_log_interval": "--decode-log-interval",
    "sampling_defaults": "--sampling-defaults",
    "tensor_parallel_size": "--tp-size",
    "config_file": "--config",
    "cuda_graph_max_bs": "--cuda-graph-max-bs-decode",
    "cuda_graph_bs": "--cuda-graph-bs-decode",
    "disable_cuda_graph": ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
}
FLAGS: dict[str, dict[str, str | tuple[str, ...]]] = {"0.5.23": _0_5_23}

Flags = dict[str, str | tuple[str, ...]]
Setting = str | int | float | bool | list[int]

CPU_MAX_TOTAL_TOKENS = 65536  # without a bound SGLang takes a share of the host's memory


# options of the section that are no flags: ours, set elsewhere, refused at other values, or dropped by every version we know
NOT_FLAGS = {
    "version",
    "extra_args",
    "model_path",
    "dp_size",
    "enable_dp_attention",
    *(n for gone in DROPPED.values() for n in gone),
}


@dataclass(frozen=True, kw_only=True)
class SGLangLaunch:
    """What one replica is started with, before model and ports are known; `version` is the one that was configured."""

    python: str
    env: dict[str, str]
    settings: dict[str, Setting]
    version: str = ""
    extra_args: list[str] = field(default_factory=list)


def table_for(version: str, configured: str = "") -> tuple[Flags, str]:
    """The flags of an installed version, and a warning where it is not the configured one, or one that we don't know."""
    if version in FLAGS:
        other = f"SGLang is {version}, but sglang.version, by which the options were checked, is {configured}"
        return FLAGS[version], other if configured and version != configured else ""
    newest = max(FLAGS, key=_numbers)
    return FLAGS[newest], f"SGLang {version} is not in the flag table (known: {', '.join(FLAGS)}): taking the flags of {newest}"


def settings_of(config: SGLangConfig, device: str, tensor_parallel_size: int, index: int) -> dict[str, Setting]:
    """What the configuration says, and what a CPU needs besides. Values that are None are left to SGLang."""
    own = {field.name for field in dataclasses.fields(config)} - NOT_FLAGS
    settings: dict[str, Setting | None] = {name: getattr(config, name) for name in sorted(own)}
    settings |= {
        "host": "127.0.0.1",
        "random_seed": config.random_seed + index,
        "tensor_parallel_size": tensor_parallel_size,
        "sampling_defaults": "openai",  # what a request does not say must not come from the model's generation config
    }
    if device == "cpu":
        backend = config.sampling_backend or "pytorch"
        settings |= {"device": "cpu", "sampling_backend": backend, "disable_overlap_schedule": True}
        settings["max_total_tokens"] = config.max_total_tokens or CPU_MAX_TOTAL_TOKENS
    return {name: value for name, value in settings.items() if value is not None and value is not False and value != ""}


def arguments(settings: dict[str, Setting], extra_args: list[str], flags: Flags) -> list[str]:
    """argv behind the interpreter."""
    argv = ["-m", "sglang.launch_server"]
    for name, value in settings.items():
        flag = flags[name]
        if value is True:
            argv += [flag] if isinstance(flag, str) else flag
        elif value is not False:
            assert isinstance(flag, str)
            argv += [flag, *map(str, value if isinstance(value, list) else [value])]
    return [*argv, *extra_args]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
