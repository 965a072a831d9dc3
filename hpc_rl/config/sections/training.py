"""Sections `actor` and `ref` (GRPO) and `model` (SFT): the train engine, its optimizer, and the policy-gradient settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpc_rl.config.sections.limits import (
    AboveOne,
    NonNegativeFloat,
    PathText,
    PositiveFloat,
    PositiveInt,
    Share,
    ShareBelowOne,
    ShareInside,
)


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    Args:
        type: `empty` means none, for a model that is not trained (`ref`).
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay.
        beta1: First moment decay.
        beta2: Second moment decay.
        eps: Denominator term.
        min_lr_ratio: Share of the peak rate at which the schedule ends.
        lr_scheduler_type: Shape after the warm-up.
        warmup_steps_proportion: Share of all steps spent on a linear warm-up.
        gradient_clipping: Largest gradient norm.
        offload: Moments and a second copy of the parameters live in CPU memory, where the update is computed.
        initial_loss_scale: With dtype float16: what the loss is multiplied with at the start.
        min_loss_scale: With dtype float16: where halving the scale ends.
        loss_scale_window: With dtype float16: the scale doubles after so many updates in a row without an overflow.
        hysteresis: With dtype float16: so many overflows are put up with before each halving.
    """

    type: Literal["adam", "empty"] = "adam"
    lr: NonNegativeFloat = 2e-5
    weight_decay: NonNegativeFloat = 0.05
    beta1: ShareBelowOne = 0.9
    beta2: ShareBelowOne = 0.95
    eps: PositiveFloat = 1e-5
    min_lr_ratio: Share = 0.0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps_proportion: Share = 0.001
    gradient_clipping: PositiveFloat = 1.0
    offload: bool = False
    initial_loss_scale: PositiveFloat = 2.0**32
    min_loss_scale: PositiveFloat = 1.0
    loss_scale_window: PositiveFloat = 5.0
    hysteresis: PositiveInt = 2


@dataclass(kw_only=True)
class MicroBatchSpec:
    """How a train batch is cut into micro-batches; the result does not depend on it.

    Args:
        n_mbs: Smallest number of micro-batches; null means 1.
        granularity: So many neighbouring sequences stay in one micro-batch; a reward model needs 2 (chosen and rejected).
        max_tokens_per_mb: Largest number of tokens of one micro-batch; null means no bound.
    """

    n_mbs: PositiveInt | None = 1
    granularity: PositiveInt = 1
    max_tokens_per_mb: PositiveInt | None = None


@dataclass(kw_only=True)
class FSDPWrapPolicy:
    """Which modules are sharded one by one.

    Args:
        transformer_layer_cls_to_wrap: Class names of modules; null means the layers that the model itself names.
    """

    transformer_layer_cls_to_wrap: list[str] | None = None


@dataclass(kw_only=True)
class FSDPEngineConfig:
    """Settings of the fsdp backend.

    Args:
        wrap_policy: Which modules are sharded one by one; null means the model's layers.
        offload_params: Not implemented: parameters in CPU memory.
    """

    wrap_policy: FSDPWrapPolicy | None = None
    offload_params: bool = False


@dataclass(kw_only=True)
class DeepSpeedAutoTPEngineConfig:
    """Settings of AReaL's DeepSpeed backend, which is not implemented.

    Args:
        autotp_size: Tensor-parallel size; only 1 is possible.
    """

    autotp_size: PositiveInt = 1


@dataclass(kw_only=True)
class TrainEngineConfig:
    """A model under training.

    Args:
        experiment_name: As AReaL files repeat it: must equal the trial's; null means the trial's.
        trial_name: The same for the trial's name.
        path: Directory of a Hugging Face checkpoint.
        init_from_scratch: Random weights, from the architecture at `path`.
        attn_impl: Attention of transformers; the default becomes `sdpa` where the planned device is a CPU.
        is_critic: The model ends in one number, not in a vocabulary: true for a reward model, and only there.
        pad_to_maximum: Every micro-batch has `mb_spec.max_tokens_per_mb` tokens: no fragmented memory, but more to compute.
        dtype: Type of parameters and compute; the default becomes float32 where the planned device is a CPU.
        grad_reduce_dtype: Type in which gradients are summed over ranks.
        backend: `fsdp`; empty means fsdp. `megatron` is planned and rendered, but not implemented: submit refuses it.
        fsdp: Settings of the fsdp backend.
        ds_auto_tp: Settings of a backend that is not implemented.
        gradient_checkpointing: Recompute activations in the backward pass.
        disable_dropout: Set all dropout probabilities to 0.
        mb_spec: How a train batch is cut.
        optimizer: Optimizer and schedule; null only where nothing is trained (`ref`).
    """

    experiment_name: str | None = None
    trial_name: str | None = None
    path: PathText
    init_from_scratch: bool = False
    is_critic: bool = False
    pad_to_maximum: bool = False
    attn_impl: str = "flash_attention_2"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    backend: Literal["", "fsdp", "megatron"] = ""
    fsdp: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    ds_auto_tp: DeepSpeedAutoTPEngineConfig = field(default_factory=DeepSpeedAutoTPEngineConfig)
    gradient_checkpointing: bool = True
    disable_dropout: bool = False
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)


@dataclass(kw_only=True)
class NormConfig:
    """Normalization of rewards or advantages.

    Args:
        mean_level: Over what the mean is taken; null leaves the mean.
        std_level: Over what the deviation is taken; null leaves the scale.
        group_size: Trajectories of a group; null means `gconfig.n_samples`, another value is refused.
        mean_leave1out: The mean of an entry is that of the others.
        std_unbiased: The deviation divides by the count less one.
        eps: Added to the deviation.
    """

    mean_level: Literal["batch", "group"] | None = "batch"
    std_level: Literal["batch", "group"] | None = "batch"
    group_size: PositiveInt | None = None
    mean_leave1out: bool = False
    std_unbiased: bool = False
    eps: PositiveFloat = 1e-5


@dataclass(kw_only=True)
class PPOActorConfig(TrainEngineConfig):
    """The policy of GRPO and PPO.

    Args:
        group_size: Trajectories per prompt; null means `gconfig.n_samples`, another value is refused.
        ppo_n_minibatches: Optimizer updates per train batch.
        eps_clip: The ratio is clipped to [1 - eps_clip, 1 + eps_clip].
        eps_clip_higher: Upper clip where it differs.
        c_clip: Dual clip for negative advantages, above 1; null means none.
        temperature: Sampling temperature of the behaviour policy; null means `gconfig.temperature`.
        reward_norm: Normalization of rewards; null means none.
        reward_scaling: Factor on the reward.
        reward_bias: Added to the reward before the factor.
        reward_clip: Rewards are clipped to plus and minus this.
        overlong_reward_penalty: Completions that enter the last `overlong_tokens` of `gconfig.max_new_tokens` lose reward:
            nothing at the start of that tail, `overlong_penalty_factor` at its end.
        overlong_tokens: Tokens of that tail.
        overlong_penalty_factor: Largest loss of reward.
        max_new_tokens: Budget of a completion; null means `gconfig.max_new_tokens`, another value is refused.
        mask_no_eos_with_zero: Completions that were cut off (finish_reason length) are left out of the loss; in the baseline of
            their group they count.
        dynamic_sampling: Groups whose rewards are all equal are dropped before anything is normalized, so batches differ in size.
            Where that drops all of them, the step makes no update.
        loss_aggregation: `token_mean`: each token of a minibatch counts the same; `sequence_mean`: each completion does;
            `constant_length`: the sum over a completion divided by `gconfig.max_new_tokens` (Dr.GRPO, with std_level null).
        compat: `areal` computes rewards, advantages and dynamic sampling as AReaL v0.3 did, mistakes included.
        log_agent_stats: Log the numbers of `Trajectory.stats` that `log_agent_stats_keys` names.
        log_agent_stats_keys: Names of numbers that the workflow puts into `Trajectory.stats`.
        adv_norm: Normalization of advantages; null means none.
        recompute_logprob: Old log-probabilities come from the trainer at the start of the step.
        use_decoupled_loss: Clip around the recomputed (proximal) policy, weigh by proximal over behaviour.
        behav_imp_weight_cap: Tokens with a larger behaviour weight are left out; above 1.
        discount: Discount of later rewards.
        gae_lambda: GAE's lambda.
        kl_ctl: Coefficient of the divergence from the reference model as a reward at each token (k1); without a section `ref`
            the default becomes 0.
        beta: Coefficient of the divergence from the reference model in the loss (k3); needs a section `ref`.
    """

    group_size: PositiveInt | None = None
    ppo_n_minibatches: PositiveInt = 4
    eps_clip: ShareInside = 0.2
    eps_clip_higher: PositiveFloat | None = None
    c_clip: AboveOne | None = None
    temperature: PositiveFloat | None = None
    reward_norm: NormConfig | None = None
    reward_scaling: PositiveFloat = 1.0
    reward_bias: float = 0.0
    reward_clip: PositiveFloat = 20.0
    overlong_reward_penalty: bool = False
    overlong_tokens: PositiveInt | None = None
    overlong_penalty_factor: NonNegativeFloat | None = None
    max_new_tokens: PositiveInt | None = None
    mask_no_eos_with_zero: bool = False
    dynamic_sampling: bool = False
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    compat: Literal["areal"] | None = None
    log_agent_stats: bool = False
    log_agent_stats_keys: list[str] = field(default_factory=list)
    adv_norm: NormConfig | None = None
    recompute_logprob: bool = False
    use_decoupled_loss: bool = False
    behav_imp_weight_cap: AboveOne | None = None
    discount: Share = 1.0
    gae_lambda: Share = 1.0
    kl_ctl: NonNegativeFloat = 0.1
    beta: NonNegativeFloat = 0.0
