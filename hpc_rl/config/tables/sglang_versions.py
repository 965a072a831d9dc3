"""For each version of SGLang that we know: its flags, and which of our options it no longer has and what replaced them."""

from __future__ import annotations

Flags = dict[str, str | tuple[str, ...]]

_DROPPED_0_5_23 = {
    "enable_ep_moe": "use sglang.ep_size, and --moe-a2a-backend in sglang.extra_args",
    "torchao_config": "use --quantization in sglang.extra_args",
    "enable_nan_detection": "it was removed without one; leave it out",
}
DROPPED: dict[str, dict[str, str]] = {"0.5.23": _DROPPED_0_5_23}
VERSIONS = tuple(DROPPED)

# our name -> SGLang's flag, or for a switch the words that stand for it
_FLAGS_0_5_23: Flags = {
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
    "disable_cuda_graph": (
        "--cuda-graph-backend-decode",
        "disabled",
        "--cuda-graph-backend-prefill",
        "disabled",
    ),
}
FLAGS: dict[str, Flags] = {"0.5.23": _FLAGS_0_5_23}

# what SGLang calls the same flags besides, and what the trial sets and has no option for: not to be given in extra_args
ALSO: dict[str, str] = {
    "--model": "--model-path",
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--ep": "--ep-size",
    "--expert-parallel-size": "--ep-size",
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
}
SET_BY_THE_TRIAL = (
    "--dp-size",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
    "--api-key",
    "--admin-api-key",
)
