"""Sections `gconfig`, `rollout`, `sglang` and `embedded`: how trajectories are generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpc_rl.config.sections.limits import (
    ChunkTokens,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    Penalty,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ShareBelowOne,
)


@dataclass(kw_only=True)
class GenerationHyperparameters:
    """Sampling of completions.

    Args:
        n_samples: Trajectories per prompt.
        max_new_tokens: Largest number of tokens in a completion.
        min_new_tokens: Smallest number of tokens in a completion.
        max_tokens: Largest number of tokens in prompt and completion together.
        greedy: Always take the most likely token (temperature 0).
        top_p: Nucleus sampling: probability mass to sample from; 1 means all.
        top_k: Number of most likely tokens to sample from; 100000000 means all.
        temperature: Sampling temperature.
        min_p: Drop tokens less likely than this share of the most likely one; 0 disables it. hpc-rl
            extension.
        repetition_penalty: Values above 1 make tokens that already occurred less likely; 1 disables it.
            hpc-rl extension.
        stop: Texts that end a completion; null means none. Needs sglang servers.
        frequency_penalty: Values above 0 make tokens less likely the more often they occurred. Needs sglang
            servers.
        stop_token_ids: Tokens that end a completion, in addition to the tokenizer's end-of-sequence token.
    """

    n_samples: PositiveInt = 1
    max_new_tokens: PositiveInt = 16384
    min_new_tokens: NonNegativeInt = 0
    max_tokens: PositiveInt = 65536
    greedy: bool = False
    top_p: PositiveShare = 1.0
    top_k: PositiveInt = 100_000_000
    temperature: NonNegativeFloat = 1.0
    min_p: ShareBelowOne = 0.0
    repetition_penalty: PositiveFloat = 1.0
    stop: list[str] | None = None
    frequency_penalty: Penalty = 0.0
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)


@dataclass(kw_only=True)
class InferenceEngineConfig:
    """The rollout role.

    Args:
        experiment_name: The root's `experiment_name`; null follows it.
        trial_name: The root's `trial_name`; null follows it.
        queue_size: Largest number of prompts in flight plus finished groups not yet in a batch; null leaves
            it to the staleness bound.
        consumer_batch_size: Must equal `train_dataset.batch_size`; null follows it.
        enable_rollout_tracing: Log every generation request when it is sent and when it is answered.
        check_trajectory_format: Check shapes and types of what a workflow returns; a bad trajectory rejects
            the prompt, with the reason.
        schedule_policy: Server for a request: the one with the fewest requests of this trial, or one after
            the other.
        max_concurrent_rollouts: Largest number of prompts in flight; null means twice the batch size.
        max_head_offpolicyness: Largest number of weight versions that the data may lag behind the trainer.
        staleness_bound: `soft` limits the number of prompts issued (AReaL's rule), `hard` every trajectory,
            `drop` rejects stale trajectories. hpc-rl extension.
        batch_order: `ready` takes groups as they finish, `in_order` by prompt index. hpc-rl extension.
        workflow: `single_turn`; `multi_turn`, which lets the model try a second time; or
            `package.module:name` of your own. hpc-rl extension.
        reward_fn: `exact_match`, `contains`, or `package.module:name` of your own. hpc-rl extension.
        reward_timeout_s: Time limit of one reward call in seconds; exceeding it rejects the prompt. hpc-rl
            extension.
        num_workers: Number of executor processes. hpc-rl extension.
        setup_timeout: Seconds to wait while no server is available; in layout `jobs` also the longest time
            that all servers may be missing.
        request_timeout: Time limit of one generation request in seconds, weight updates included.
        request_retries: Times that a failed request is sent again, to another server.
        prompt_retries: Times that a prompt is issued again after an exception before it is rejected. hpc-rl
            extension.
    """

    experiment_name: str | None = None
    trial_name: str | None = None
    queue_size: PositiveInt | None = None
    consumer_batch_size: PositiveInt | None = None
    enable_rollout_tracing: bool = False
    check_trajectory_format: bool = False
    schedule_policy: Literal["least_loaded", "round_robin"] = "least_loaded"
    max_concurrent_rollouts: PositiveInt | None = None
    max_head_offpolicyness: NonNegativeInt = 0
    staleness_bound: Literal["soft", "hard", "drop"] = "soft"
    batch_order: Literal["ready", "in_order"] = "ready"
    workflow: str = "single_turn"
    reward_fn: str = "exact_match"
    reward_timeout_s: PositiveFloat = 15.0
    num_workers: PositiveInt = 1
    setup_timeout: PositiveFloat = 600.0
    request_timeout: PositiveFloat = 3600.0
    request_retries: NonNegativeInt = 3
    prompt_retries: NonNegativeInt = 2


# The choices of version 0.5.23. For the backend of a plug-in: null here, and its flag in extra_args.
AttentionBackend = Literal[
    "aiter", "ascend", "compressed", "cutedsl_mla", "dsa", "dsv4", "fa3", "fa4", "flashinfer", "flashmla",
    "flex_attention", "hpc_ops", "intel_amx", "intel_xpu", "llada2_cfg_flashinfer", "minicpm_flashattn",
    "minicpm_flashinfer", "nsa", "qsa", "tokenspeed_mla", "torch_native", "triton", "trtllm_mha",
    "trtllm_mla", "wave",
]  # fmt: skip
SamplingBackend = Literal["ascend", "flashinfer", "intel_xpu", "pytorch"]
KVCacheDtype = Literal["auto", "bf16", "bfloat16", "fp4_mx_block16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4"]
SchedulePolicy = Literal[
    "lpm", "dfs-weight", "fcfs", "hrrn", "lof", "priority", "random", "routing-key", "shortest-prefill-first",
]  # fmt: skip
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(kw_only=True)
class SGLangConfig:
    """Options of each SGLang server; further flags go into `extra_args`.

    Args:
        version: SGLang version of the servers; selects the table of flags. hpc-rl extension.
        model_path: Must equal `actor.path`; empty follows it.
        random_seed: Seed of the first server; server i adds i.
        skip_tokenizer_init: Start without a tokenizer: the rollout role exchanges token ids only.
        disable_cuda_graph: Use no CUDA graphs, neither in prefill nor in decode.
        disable_radix_cache: Disable the prefix cache.
        disable_cuda_graph_padding: Use no CUDA graph when the batch would have to be padded.
        enable_nccl_nvls: Use NCCL's NVLS for prefill.
        disable_outlines_disk_cache: Disable the disk cache of grammars.
        disable_custom_all_reduce: Use NCCL instead of the custom all-reduce.
        disable_overlap_schedule: Do not overlap the scheduler with the model.
        enable_mixed_chunk: Mix prefill and decode in one batch.
        enable_dp_attention: Data-parallel attention; needs dp_size above 1, which is not implemented.
        enable_ep_moe: Expert-parallel MoE layers, in older versions.
        enable_torch_compile: Compile the model.
        torch_compile_max_bs: Largest batch size that is compiled.
        cuda_graph_max_bs: Largest batch size with a CUDA graph (decode); null leaves it to SGLang.
        cuda_graph_bs: Batch sizes with a CUDA graph (decode); null leaves it to SGLang.
        torchao_config: Quantization by torchao, in older versions.
        enable_nan_detection: Detect NaN, in older versions.
        enable_p2p_check: Check peer access between GPUs first.
        triton_attention_reduce_in_fp32: Reduce in float32 in Triton attention.
        triton_attention_num_kv_splits: Number of KV splits in Triton's decode kernel.
        num_continuous_decode_steps: Decode steps between two checks of the queue.
        enable_memory_saver: Allow memory to be released and taken again.
        allow_auto_truncate: Truncate inputs that are too long instead of refusing them.
        attention_backend: Attention kernels; null leaves it to SGLang. Defaults to `torch_native` without
            GPUs.
        enable_multimodal: Serve the other modalities of a multimodal model.
        sampling_backend: Sampling kernels; null leaves it to SGLang, or means `pytorch` without GPUs.
        context_length: Longest sequence; null means the model's limit.
        mem_fraction_static: Share of GPU memory for weights and KV cache; null leaves it to SGLang. Defaults
            to null without GPUs.
        max_running_requests: Largest number of requests decoded at once; null leaves it to SGLang.
        max_total_tokens: Tokens in the KV cache; null leaves it to SGLang. hpc-rl extension.
        chunked_prefill_size: Tokens per prefill chunk; -1 means whole prompts, null leaves it to SGLang.
            Defaults to null without GPUs.
        max_prefill_tokens: Tokens per prefill batch; null leaves it to SGLang. Defaults to null without GPUs.
        schedule_policy: Order of waiting requests in a server.
        schedule_conservativeness: Values above 1 admit fewer requests, so fewer are retracted.
        cpu_offload_gb: GB of weights kept in host memory.
        dtype: Data type of weights and compute. Defaults to float32 without GPUs.
        kv_cache_dtype: Data type of the KV cache; `auto` means the model's.
        dp_size: Replicas within one server; only 1 is accepted, because `allocation_mode` sets the number of
            servers.
        ep_size: Expert-parallel size within a server.
        log_level: Log level.
        log_level_http: Log level of the HTTP server; null means `log_level`.
        log_requests: Log requests.
        log_requests_level: How much of a request is logged.
        show_time_cost: Log the time of marked sections.
        enable_metrics: Serve Prometheus metrics.
        decode_log_interval: Decode batches between two log lines.
        extra_args: Further flags of `sglang.launch_server`, passed as they are. hpc-rl extension.
    """

    version: Literal["0.5.23"] = "0.5.23"
    model_path: PathText = ""
    random_seed: NonNegativeInt = 1
    skip_tokenizer_init: bool = False
    disable_cuda_graph: bool = False
    disable_radix_cache: bool = False
    disable_cuda_graph_padding: bool = False
    enable_nccl_nvls: bool = False
    disable_outlines_disk_cache: bool = False
    disable_custom_all_reduce: bool = False
    disable_overlap_schedule: bool = False
    enable_mixed_chunk: bool = False
    enable_dp_attention: bool = False
    enable_ep_moe: bool = False
    enable_torch_compile: bool = False
    torch_compile_max_bs: PositiveInt = 32
    cuda_graph_max_bs: PositiveInt | None = None
    cuda_graph_bs: list[PositiveInt] | None = None
    torchao_config: str = ""
    enable_nan_detection: bool = False
    enable_p2p_check: bool = False
    triton_attention_reduce_in_fp32: bool = False
    triton_attention_num_kv_splits: PositiveInt = 8
    num_continuous_decode_steps: PositiveInt = 1
    enable_memory_saver: bool = False
    allow_auto_truncate: bool = False
    attention_backend: AttentionBackend | None = "fa3"
    enable_multimodal: bool = False
    sampling_backend: SamplingBackend | None = None
    context_length: PositiveInt | None = 32768
    mem_fraction_static: PositiveShare | None = 0.9
    max_running_requests: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    chunked_prefill_size: ChunkTokens | None = -1
    max_prefill_tokens: PositiveInt | None = 32768
    schedule_policy: SchedulePolicy = "lpm"
    schedule_conservativeness: PositiveFloat = 1.0
    cpu_offload_gb: NonNegativeInt = 0
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    kv_cache_dtype: KVCacheDtype = "auto"
    dp_size: PositiveInt = 1
    ep_size: PositiveInt = 1
    log_level: LogLevel = "warning"
    log_level_http: LogLevel | None = "warning"
    log_requests: bool = False
    log_requests_level: Literal[0, 1, 2, 3] = 0
    show_time_cost: bool = False
    enable_metrics: bool = True
    decode_log_interval: PositiveInt = 1
    extra_args: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class EmbeddedConfig:
    """The embedded engine, on transformers, which needs no GPU.

    Args:
        max_running_requests: Largest number of sequences decoded at once.
        batch_invariant: Decode each sequence by itself, so that its tokens do not depend on the others; slow.
        dtype: Data type of weights and compute.
    """

    max_running_requests: PositiveInt = 256
    batch_invariant: bool = False
    dtype: Literal["bfloat16", "float32"] = "float32"
