"""Sections `gconfig`, `rollout`, `sglang` and `embedded`: how trajectories are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpc_rl.config.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare


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
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)


@dataclass(kw_only=True)
class InferenceEngineConfig:
    """The rollout role. `workflow`, `reward_fn`, `staleness_bound`, `batch_order`, `num_workers` and the retry numbers are ours.

    Args:
        max_concurrent_rollouts: Prompts in flight; null means twice the batch size.
        max_head_offpolicyness: How many versions the data may lag behind the trainer.
        staleness_bound: `soft` counts prompts (AReaL's rule), `hard` bounds every trajectory, `drop` rejects what is too old.
        batch_order: `ready` takes finished groups first, `in_order` takes them by prompt index.
        workflow: `single_turn`, or `package.module:name` of your own.
        reward_fn: `exact_match`, `contains`, or `package.module:name` of your own.
        reward_timeout_s: Seconds that one reward call may take; a trajectory whose reward takes longer is a rejected prompt.
        num_workers: Executor processes.
        setup_timeout: Seconds to wait for the first server.
        request_timeout: Seconds that one generation may take, weight updates included.
        request_retries: Times that a request is sent again to another server after a failure.
        prompt_retries: Times that a prompt is issued again after an exception before it is rejected.
    """

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


@dataclass(kw_only=True)
class SGLangConfig:
    """One SGLang server. What is not here goes into `extra_args`.

    Args:
        random_seed: Seed of the first server; server i adds i.
        dtype: Type of weights and compute; the default becomes float32 where the planned device is a CPU.
        attention_backend: Attention kernels; the default becomes `torch_native` where the planned device is a CPU.
        context_length: Largest sequence.
        mem_fraction_static: Share of the device for weights and KV cache.
        max_running_requests: Requests decoded at once; null leaves it to SGLang.
        max_total_tokens: Tokens of the KV cache; null leaves it to SGLang.
        log_level: Log level.
        extra_args: Further flags of `sglang.launch_server`, as they stand.
    """

    random_seed: NonNegativeInt = 1
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    attention_backend: str = "fa3"
    context_length: PositiveInt = 32768
    mem_fraction_static: PositiveShare = 0.9
    max_running_requests: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    log_level: str = "warning"
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
