"""Sections `gconfig`, `rollout`, `sglang` and `embedded`: how trajectories are made."""

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
    """How one completion is sampled.

    Args:
        n_samples: Trajectories per prompt.
        max_new_tokens: Largest number of tokens of a completion.
        min_new_tokens: Smallest number of tokens of a completion.
        max_tokens: Largest number of tokens of prompt and completion.
        greedy: Take the likeliest token; temperature 0.
        top_p: Nucleus; 1 means all.
        top_k: Number of likeliest tokens to sample from; 100000000 means all.
        temperature: Sampling temperature.
        min_p: Leaves out tokens less likely than this share of the likeliest; 0 means none (ours).
        repetition_penalty: Above 1 makes tokens that occurred less likely; 1 means none (ours).
        stop: Texts that end a completion; null means none. Needs sglang servers.
        frequency_penalty: Above 0 makes tokens less likely the more often they occurred. Needs sglang servers.
        stop_token_ids: Tokens that end a completion, besides the tokenizer's end-of-sequence token.
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
    """The rollout role. `workflow`, `reward_fn`, `staleness_bound`, `batch_order`, `num_workers` and the retry numbers are ours.

    Args:
        experiment_name: The root's `experiment_name`; null follows it.
        trial_name: The root's `trial_name`; null follows it.
        queue_size: Prompts in flight and finished groups that wait for their batch, together; null leaves that to staleness.
        consumer_batch_size: The same as `train_dataset.batch_size`; null follows it.
        enable_rollout_tracing: Log every generation request when it is sent and when it is answered.
        check_trajectory_format: Also reject groups with a trajectory without tokens of the model, or with a positive log-probability.
            Array types, equal lengths, finite log-probabilities and rewards are always checked.
        schedule_policy: Which server gets a request: the one with the fewest of ours, or one after the other.
        max_concurrent_rollouts: Prompts in flight; null means twice the batch size.
        max_head_offpolicyness: How many versions the data may lag behind the trainer.
        staleness_bound: `soft` counts prompts (AReaL's rule), `hard` bounds every trajectory, `drop` rejects what is too old.
        batch_order: `ready` takes finished groups first, `in_order` takes them by prompt index.
        workflow: `single_turn`, or `package.module:name` of your own.
        reward_fn: `exact_match`, `contains`, or `package.module:name` of your own.
        reward_timeout_s: Seconds that one reward call may take; a trajectory whose reward takes longer is a rejected prompt.
        num_workers: Executor processes.
        setup_timeout: Seconds to wait for a server while none serves; in layout jobs as long as all of them may be away.
        request_timeout: Seconds that one generation may take, weight updates included.
        request_retries: Times that a request is sent again to another server after a failure.
        prompt_retries: Times that a prompt is issued again after an exception before it is rejected.
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


# What version 0.5.23 accepts; a further backend, of a plug-in: null here, and its flag in extra_args.
AttentionBackend = Literal[
    "aiter", "ascend", "compressed", "cutedsl_mla", "dsa", "dsv4", "fa3", "fa4", "flashinfer", "flashmla", "flex_attention",
    "hpc_ops", "intel_amx", "intel_xpu", "llada2_cfg_flashinfer", "minicpm_flashattn", "minicpm_flashinfer", "nsa", "qsa",
    "tokenspeed_mla", "torch_native", "triton", "trtllm_mha", "trtllm_mla", "wave",
]  # fmt: skip
SamplingBackend = Literal["ascend", "flashinfer", "intel_xpu", "pytorch"]
KVCacheDtype = Literal["auto", "bf16", "bfloat16", "fp4_mx_block16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4"]
SchedulePolicy = Literal[
    "lpm", "dfs-weight", "fcfs", "hrrn", "lof", "priority", "random", "routing-key", "shortest-prefill-first",
]  # fmt: skip
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(kw_only=True)
class SGLangConfig:
    """One SGLang server; `config/tables/sglang_versions.py` has the flags by version. What is not here goes into `extra_args`.

    Args:
        version: Version of SGLang that the servers have; its table of flags is used (ours).
        model_path: The policy's path, `actor.path`; empty follows it.
        random_seed: Seed of the first server; server i adds i.
        skip_tokenizer_init: Start without a tokenizer: the rollout role sends and takes token ids.
        disable_cuda_graph: No CUDA graphs, neither in prefill nor in decode.
        disable_radix_cache: No prefix cache.
        disable_cuda_graph_padding: No CUDA graph where the batch would have to be padded.
        enable_nccl_nvls: NCCL's NVLS for prefill.
        disable_outlines_disk_cache: No disk cache of grammars.
        disable_custom_all_reduce: NCCL in place of the custom all-reduce.
        disable_overlap_schedule: Do not overlap the scheduler with the model.
        enable_mixed_chunk: Mix prefill and decode in one batch.
        enable_dp_attention: Data-parallel attention; needs dp_size above 1, which is not implemented.
        enable_ep_moe: Expert-parallel MoE layers of older versions.
        enable_torch_compile: Compile the model.
        torch_compile_max_bs: Largest batch that is compiled.
        cuda_graph_max_bs: Largest batch with a CUDA graph (decode); null leaves it to SGLang.
        cuda_graph_bs: Batch sizes with a CUDA graph (decode); null leaves it to SGLang.
        torchao_config: Quantization by torchao in older versions.
        enable_nan_detection: Look for NaN in older versions.
        enable_p2p_check: Check peer access between GPUs first.
        triton_attention_reduce_in_fp32: Triton attention reduces in float32.
        triton_attention_num_kv_splits: KV splits of Triton's decode kernel.
        num_continuous_decode_steps: Decode steps between two looks at the queue.
        enable_memory_saver: Let memory be released and taken again.
        allow_auto_truncate: Cut inputs that are too long in place of refusing them.
        attention_backend: Attention kernels; null leaves it to SGLang; the default becomes `torch_native` where the planned
            device is a CPU.
        enable_multimodal: Serve the other modalities of a multimodal model.
        sampling_backend: Sampling kernels; null leaves it to SGLang, `pytorch` on a CPU.
        context_length: Largest sequence; null means the model's.
        mem_fraction_static: Share of the device for weights and KV cache; null leaves it to SGLang, and is the default where
            there is no GPU.
        max_running_requests: Requests decoded at once; null leaves it to SGLang.
        max_total_tokens: Tokens of the KV cache; null leaves it to SGLang (ours).
        chunked_prefill_size: Tokens of a chunk of prefill; -1 means whole prompts, null leaves it to SGLang, and is the
            default where there is no GPU.
        max_prefill_tokens: Tokens of one prefill batch; null leaves it to SGLang, and is the default where there is no GPU.
        schedule_policy: Order of waiting requests within a server.
        schedule_conservativeness: Above 1 admits fewer requests, so that fewer are put back.
        cpu_offload_gb: Weights kept in host memory, in GB.
        dtype: Type of weights and compute; the default becomes float32 where the planned device is a CPU.
        kv_cache_dtype: Type of the KV cache; `auto` is the model's.
        dp_size: Replicas within one server; only 1: replicas are servers here, `allocation_mode` says how many.
        ep_size: Expert-parallel size within a server's GPUs.
        log_level: Log level.
        log_level_http: Log level of the HTTP server; null means `log_level`.
        log_requests: Log requests.
        log_requests_level: How much of a request is logged.
        show_time_cost: Log the time of marked sections.
        enable_metrics: Prometheus metrics.
        decode_log_interval: Decode batches between two log lines.
        extra_args: Further flags of `sglang.launch_server`, as they stand (ours).
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
    """The engine on transformers that needs no GPU (ours).

    Args:
        max_running_requests: Sequences decoded at once.
        batch_invariant: Decode every sequence by itself, so that its tokens do not depend on its neighbours; slow.
        dtype: Type of weights and compute.
    """

    max_running_requests: PositiveInt = 256
    batch_invariant: bool = False
    dtype: Literal["bfloat16", "float32"] = "float32"
