"""Sections `gconfig`, `rollout`, `sglang`, `vllm` and `embedded`: how trajectories are generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_rl.config.options.limits import (
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
    """Sampling of completions."""

    n_samples: PositiveInt = 1
    """Trajectories per prompt."""
    max_new_tokens: PositiveInt = 16384
    """Largest number of tokens in a completion."""
    min_new_tokens: NonNegativeInt = 0
    """Smallest number of tokens in a completion."""
    max_tokens: PositiveInt = 65536
    """Largest number of tokens in prompt and completion together."""
    greedy: bool = False
    """Always take the most likely token: `temperature` has no effect. Log-probabilities, in training too, are
    at temperature 1."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling: probability mass to sample from; 1 means all."""
    top_k: PositiveInt = 100_000_000
    """Number of most likely tokens to sample from; 100000000 means all."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature."""
    min_p: ShareBelowOne = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 disables it. hpc-rl extension."""
    repetition_penalty: PositiveFloat = 1.0
    """Values above 1 make tokens that already occurred less likely; 1 disables it. hpc-rl extension."""
    stop: list[str] | None = None
    """Texts that end a completion; null means none. Needs sglang or vllm servers."""
    frequency_penalty: Penalty = 0.0
    """Values above 0 make tokens less likely the more often they occurred. Needs sglang or vllm servers."""
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)
    """Tokens that end a completion, in addition to the tokenizer's end-of-sequence token."""


REWARDS = (
    *("exact_match", "contains", "final_answer", "math_verify"),
    *("format", "length", "countdown", "code_tests", "judge", "none"),
)
_JUDGE = """\
Question:
{question}

Answer:
{completion}

How good is this answer? Check whether it is right and complete, step by step. Then write one number between
<score> and </score>: 1 for a perfect answer, 0 for a useless one, or a number in between."""


@dataclass(kw_only=True)
class JudgeConfig:
    """A model of another pool that scores completions. hpc-rl extension."""

    pool: str = "judge"
    """Pool of the judge, in section `pools`."""
    template: str = _JUDGE
    """Prompt of the judge, one turn of a user. A name in braces stands for a value: {question}, {completion}
    or a column of the row; other braces are text. The score is the number between <score> and </score>."""
    temperatures: list[NonNegativeFloat] = field(default_factory=lambda: [0.2, 0.5, 0.8])
    """The judge scores once at each of these temperatures; the reward is the mean."""
    retries: NonNegativeInt = 2
    """Number of repeated questions at each temperature if the answer has no score. Temperatures that give no
    score are skipped; without any score the prompt is rejected."""


@dataclass(kw_only=True)
class InferenceEngineConfig:
    """The rollout role."""

    queue_size: PositiveInt | None = None
    """Largest number of prompts in flight plus finished groups not yet in a batch, at least a batch. null
    means that only the staleness bound limits it."""
    consumer_batch_size: PositiveInt | None = None
    """Must equal `train_dataset.batch_size`; null follows it."""
    enable_rollout_tracing: bool = False
    """Log every generation request when it is sent and when it is answered."""
    check_trajectory_format: bool = False
    """Check shapes and types of the trajectories of a workflow; a bad one rejects the prompt, with the
    reason. """
    schedule_policy: Literal["least_loaded", "round_robin"] = "least_loaded"
    """Server for a request: the one with the fewest requests of this trial, or one after the other."""
    max_concurrent_rollouts: PositiveInt | None = None
    """Largest number of prompts in flight; null means twice the batch size."""
    max_head_offpolicyness: NonNegativeInt = 0
    """Number of weight versions that the data may lag behind the trainer; see `staleness_bound`."""
    staleness_bound: Literal["soft", "hard", "drop"] = "soft"
    """`soft` limits the number of prompts issued, as AReaL does: a slow trajectory may lag further behind.
    `hard` bounds every trajectory, `drop` rejects trajectories that lag further. hpc-rl extension."""
    batch_order: Literal["ready", "in_order"] = "ready"
    """`ready` takes groups as they finish, `in_order` by prompt index. hpc-rl extension."""
    workflow: str = "single_turn"
    """`single_turn`; `multi_turn`, which lets the model try a second time; `teacher`, the default of trainer
    teacher; `agent`, any program that uses OpenAI's API; or your own `package.module:name`. hpc-rl
    extension."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the workflow's class, or of its `create` after the configuration, by name:
    `max_turns`, `turn_discount`, `max_tokens_per_trajectory`, `feedback`, `tools`, `tool_timeout_s`,
    `credit_by_turn` for `multi_turn`; `command`, `function`, `timeout_s`, `retries`, `failure_reward`,
    `max_calls`, `max_episodes`, `keep_tokens` for `agent`; any for your own. hpc-rl extension."""
    reward_fn: str = "exact_match"
    """`exact_match`; `contains`; `final_answer`, which compares the last answer in a completion by value,
    the default of trainer teacher; `math_verify`, which compares formulas as well, the default for answers
    as of GSM8K (`#### 42`) and MATH; `format`, which wants `<think>…</think><answer>…</answer>`; `length`, 1
    for an empty completion, 0 for gconfig.max_new_tokens; `countdown` (columns nums and target);
    `code_tests`, the share of the texts in the column tests that the code passes; `judge`, which asks the
    model of `judge`; `none`, always 0, for a distillation without rewards; the name of a pool whose model is
    a reward model, such as `reward_model`; or your own `package.module:name`. Several, separated by commas,
    are added up, and each is logged as `reward/NAME`. hpc-rl extension."""
    reward_weights: list[float] | None = None
    """Factor of each function of `reward_fn`, in their order; null means 1 each. hpc-rl extension."""
    judge: JudgeConfig | None = None
    """The judge of `reward_fn: judge`; null means none."""
    reward_timeout_s: PositiveFloat = 15.0
    """Time limit of one reward call in seconds; exceeding it rejects the prompt. hpc-rl extension."""
    sandbox: Literal["available", "required"] = "available"
    """Sandbox for the code that `code_tests` runs: `available` confines it as well as the machine can,
    `required` ends the trial on a machine that can't protect everything. hpc-rl extension."""
    num_workers: PositiveInt = 1
    """Number of executor processes. hpc-rl extension."""
    setup_timeout: PositiveFloat = 600.0
    """Seconds to wait while no server is available; in layout `jobs` also the longest time that all servers
    may be missing."""
    request_timeout: PositiveFloat = 3600.0
    """Time limit of one generation request in seconds, weight updates included."""
    request_retries: NonNegativeInt = 3
    """Number of times in a row that a failed request is sent again without a new token, if possible to
    another server; then its prompt is rejected."""
    keep_samples: NonNegativeInt = 1
    """Number of groups per step whose completions are kept for `hpc-rl samples`. hpc-rl extension."""
    prompt_retries: NonNegativeInt = 2
    """Number of times that a prompt is issued again after an exception of the workflow; then it is rejected.
    hpc-rl extension."""

    @property
    def reward_functions(self) -> list[str]:
        """The functions of `reward_fn`."""
        return [name.strip() for name in self.reward_fn.split(",")]


# The choices of version 0.5.23. For a plug-in's backend use null, and its flag in extra_args.
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
    """Options of each SGLang server; further flags go into `extra_args`."""

    version: Literal["0.5.23"] = "0.5.23"
    """SGLang version of the servers; selects the table of flags. hpc-rl extension."""
    model_path: PathText = ""
    """Must equal `actor.path`; empty follows it."""
    random_seed: NonNegativeInt = 1
    """Seed of the first server; server i adds i."""
    skip_tokenizer_init: bool = False
    """Start without a tokenizer: the rollout role exchanges token ids only."""
    disable_cuda_graph: bool = False
    """Use no CUDA graphs, neither in prefill nor in decode."""
    disable_radix_cache: bool = False
    """Disable the prefix cache."""
    disable_cuda_graph_padding: bool = False
    """Use no CUDA graph when the batch would have to be padded."""
    enable_nccl_nvls: bool = False
    """Use NCCL's NVLS for prefill."""
    disable_outlines_disk_cache: bool = False
    """Disable the disk cache of grammars."""
    disable_custom_all_reduce: bool = False
    """Use NCCL instead of the custom all-reduce."""
    disable_overlap_schedule: bool = False
    """Do not overlap the scheduler with the model. Defaults to true without GPUs."""
    enable_mixed_chunk: bool = False
    """Mix prefill and decode in one batch."""
    enable_torch_compile: bool = False
    """Compile the model."""
    torch_compile_max_bs: PositiveInt = 32
    """Largest batch size that is compiled."""
    cuda_graph_max_bs: PositiveInt | None = None
    """Largest batch size with a CUDA graph (decode); null leaves it to SGLang."""
    cuda_graph_bs: list[PositiveInt] | None = None
    """Batch sizes with a CUDA graph (decode); null leaves it to SGLang."""
    enable_p2p_check: bool = False
    """Check peer access between GPUs first."""
    triton_attention_reduce_in_fp32: bool = False
    """Reduce in float32 in Triton attention."""
    triton_attention_num_kv_splits: PositiveInt = 8
    """Number of KV splits in Triton's decode kernel."""
    num_continuous_decode_steps: PositiveInt = 1
    """Decode steps between two checks of the queue."""
    enable_memory_saver: bool = False
    """Allow memory to be released and taken again."""
    allow_auto_truncate: bool = False
    """Truncate inputs that are too long instead of refusing them."""
    attention_backend: AttentionBackend | None = "fa3"
    """Attention kernels; null leaves it to SGLang. Defaults to `torch_native` without GPUs."""
    enable_multimodal: bool = False
    """Serve the other modalities of a multimodal model."""
    sampling_backend: SamplingBackend | None = None
    """Sampling kernels; null leaves it to SGLang, or means `pytorch` without GPUs."""
    context_length: PositiveInt | None = 32768
    """Longest sequence; null means the model's limit."""
    mem_fraction_static: PositiveShare | None = 0.9
    """Share of GPU memory for weights and KV cache; null leaves it to SGLang. Defaults to null without GPUs.
    """
    max_running_requests: PositiveInt | None = None
    """Largest number of requests decoded at once; null leaves it to SGLang."""
    max_total_tokens: PositiveInt | None = None
    """Tokens in the KV cache; null leaves it to SGLang. hpc-rl extension."""
    chunked_prefill_size: ChunkTokens | None = -1
    """Tokens per prefill chunk; -1 means whole prompts, null leaves it to SGLang. Defaults to null without
    GPUs."""
    max_prefill_tokens: PositiveInt | None = 32768
    """Tokens per prefill batch; null leaves it to SGLang. Defaults to null without GPUs."""
    schedule_policy: SchedulePolicy = "lpm"
    """Order of waiting requests in a server."""
    schedule_conservativeness: PositiveFloat = 1.0
    """Values above 1 admit fewer requests, so fewer are retracted."""
    cpu_offload_gb: NonNegativeInt = 0
    """GB of weights kept in host memory."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights and compute. Defaults to float32 without GPUs."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Data type of the KV cache; `auto` means the model's."""
    ep_size: PositiveInt = 1
    """Expert-parallel size within a server."""
    log_level: LogLevel = "warning"
    """Log level."""
    log_level_http: LogLevel | None = "warning"
    """Log level of the HTTP server; null means `log_level`."""
    log_requests: bool = False
    """Log requests."""
    log_requests_level: Literal[0, 1, 2, 3] = 0
    """How much of a request is logged."""
    show_time_cost: bool = False
    """Log the time of marked sections."""
    enable_metrics: bool = True
    """Serve Prometheus metrics."""
    decode_log_interval: PositiveInt = 1
    """Decode batches between two log lines."""
    extra_args: list[str] = field(default_factory=list)
    """Further flags of `sglang.launch_server`, passed as they are. hpc-rl extension."""


# The choices of version 0.32.0.
VLLMCacheDtype = Literal[
    "auto", "bfloat16", "float16", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "fp8_inc",
    "fp8_per_token_head", "int4_per_token_head", "int8_per_token_head", "nvfp4", "nvfp4_4over6",
    "nvfp4_ds_mla",
]  # fmt: skip


@dataclass(kw_only=True)
class VLLMConfig:
    """Options of each vLLM server; further flags go into `extra_args`. hpc-rl extension."""

    version: Literal["0.32.0"] = "0.32.0"
    """vLLM version of the servers; selects the table of flags."""
    seed: NonNegativeInt = 1
    """Seed of the first server; server i adds i."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of weights and compute; `auto` means the model's, or bfloat16 for one in float32. Defaults to
    float32 without GPUs."""
    max_model_len: PositiveInt | None = None
    """Longest sequence; null means the model's limit."""
    gpu_memory_utilization: PositiveShare | None = 0.9
    """Share of GPU memory for weights and KV cache; null leaves it to vLLM. Defaults to null without GPUs."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Bytes of the KV cache of each GPU; null derives it from `gpu_memory_utilization`, or means 4 GiB
    without GPUs."""
    kv_cache_dtype: VLLMCacheDtype = "auto"
    """Data type of the KV cache; `auto` means the model's."""
    block_size: PositiveInt | None = None
    """Tokens in a block of the KV cache; null leaves it to vLLM."""
    max_num_seqs: PositiveInt | None = None
    """Largest number of requests decoded at once; null leaves it to vLLM."""
    max_num_batched_tokens: PositiveInt | None = None
    """Largest number of tokens in one step of the model; null leaves it to vLLM."""
    no_enable_chunked_prefill: bool = False
    """Prefill whole prompts only."""
    no_enable_prefix_caching: bool = False
    """Disable the prefix cache."""
    enforce_eager: bool = False
    """Use no CUDA graphs and do not compile the model. Defaults to true without GPUs."""
    attention_backend: str | None = None
    """Attention kernels, by vLLM's name; null leaves it to vLLM."""
    disable_custom_all_reduce: bool = False
    """Use NCCL instead of the custom all-reduce."""
    enable_expert_parallel: bool = False
    """Divide the experts of MoE layers among the GPUs of a server, instead of dividing each expert."""
    cpu_offload_gb: NonNegativeInt = 0
    """GiB of weights of each GPU kept in host memory."""
    enable_log_requests: bool = False
    """Log requests."""
    uvicorn_log_level: LogLevel = "warning"
    """Log level of the HTTP server."""
    extra_args: list[str] = field(default_factory=list)
    """Further flags of `vllm serve`, passed as they are."""


@dataclass(kw_only=True)
class EmbeddedConfig:
    """The embedded engine, on transformers, which needs no GPU."""

    max_running_requests: PositiveInt = 256
    """Largest number of sequences decoded at once."""
    batch_invariant: bool = False
    """Decode each sequence alone, so that its tokens do not depend on others; slow."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Data type of weights and compute."""
