"""Sections `actor`, `ref` and `model`: train engine, optimizer, and the options of the policy loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_rl.config.options.limits import (
    AboveOne,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Share,
    ShareBelowHalf,
    ShareBelowOne,
)
from hpc_rl.config.options.megatron import MegatronConfig


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    type: Literal["adam", "empty"] = "adam"
    """`adam`, or `empty` for a model that is not trained (`ref`)."""
    lr: NonNegativeFloat = 2e-5
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.05
    """Decoupled weight decay."""
    decay_norms_and_biases: bool = True
    """Decay the weights of norms and biases, too. Hugging Face's Trainer does not, so ATLAS's `weight_decay`
    sets false. hpc-rl extension."""
    beta1: ShareBelowOne = 0.9
    """Decay rate of the first moment."""
    beta2: ShareBelowOne = 0.95
    """Decay rate of the second moment."""
    eps: PositiveFloat = 1e-5
    """Term added to the denominator."""
    min_lr_ratio: Share = 0.0
    """Final learning rate as a share of the peak."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up."""
    warmup_steps_proportion: Share = 0.001
    """Share of all updates spent on a linear warm-up; the number of updates is rounded down."""
    warmup_from_zero: bool = False
    """Start the warm-up at a rate of 0 and round its updates up, as Hugging Face's Trainer does; ATLAS's
    `warmup_ratio` sets true. If false, the first update has a rate above 0. hpc-rl extension."""
    gradient_clipping: PositiveFloat = 1.0
    """Largest gradient norm."""
    offload: bool = False
    """Keep moments and a second copy of the parameters in CPU memory, and update them there."""
    initial_loss_scale: PositiveFloat = 2.0**32
    """Initial loss scale (float16)."""
    min_loss_scale: PositiveFloat = 1.0
    """Smallest loss scale (float16)."""
    loss_scale_window: PositiveFloat = 5.0
    """Updates in a row without overflow before the loss scale is doubled (float16)."""
    hysteresis: PositiveInt = 2
    """Overflows before the loss scale is halved; each one after that halves it again, until it is doubled
    (float16)."""


@dataclass(kw_only=True)
class MicroBatchSpec:
    """How a train batch is divided into micro-batches. The result does not depend on it."""

    n_mbs: PositiveInt | None = 1
    """Smallest number of micro-batches; null means 1."""
    granularity: PositiveInt = 1
    """Number of consecutive sequences of a rank that stay in one micro-batch; 2 for a reward model (chosen
    and rejected)."""
    max_tokens_per_mb: PositiveInt | None = None
    """Largest number of tokens in a micro-batch; null means no limit. Defaults to 32768 with GPUs, or
    more for the longest sequence."""
    max_seqs_per_mb: PositiveInt | None = None
    """Largest number of sequences in a micro-batch; null means no limit. hpc-rl extension."""


@dataclass(kw_only=True)
class FSDPWrapPolicy:
    """Which modules are sharded individually."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Class names of modules; null means the layers that the model declares."""


@dataclass(kw_only=True)
class FSDPEngineConfig:
    """Options of the fsdp backend."""

    wrap_policy: FSDPWrapPolicy | None = None
    """Which modules are sharded individually; null means the model's layers."""
    offload_params: bool = False
    """Keep parameters in CPU memory, and the moments and updates of a trained model. A layer is on the GPU
    only during its computation."""
    offload_activations: bool = False
    """Keep the inputs of layers, from which `gradient_checkpointing` recomputes the rest, in CPU memory until
    the backward pass. hpc-rl extension."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass, and gather them again for the backward pass.
    false keeps them, which takes memory and saves messages. hpc-rl extension."""
    replicate_size: PositiveInt = 1
    """Number of groups of data ranks (HSDP). Each group has a whole copy of the model, divided among its
    ranks. 1 divides one copy among all ranks. hpc-rl extension."""
    float32_head: bool = False
    """Compute in float32 outside of the layers, so also the output head and the logits, with a `dtype` of 16
    bits. The log-probabilities are then closer to servers with a float32 head. hpc-rl extension."""


@dataclass(kw_only=True)
class TrainEngineConfig:
    """A model in the trainer."""

    path: PathText
    """Directory of a Hugging Face checkpoint."""
    init_from_scratch: bool = False
    """Start from random weights, with the architecture at `path`."""
    is_critic: bool = False
    """Whether the model has a scalar head: true for a reward model and for a critic, and only there."""
    pad_to_maximum: bool = False
    """Pad every micro-batch to `mb_spec.max_tokens_per_mb` tokens: no memory fragmentation, but more compute.
    """
    attn_impl: str = "flash_attention_2"
    """Attention: sdpa, eager, and on GPUs flash_attention_2, flash_attention_3 (packages flash-attn and
    flash-attn-3) and flex_attention. Defaults to the flash attention of the trainer's Python, else to sdpa,
    which on GPUs is PyTorch's flash attention. Without GPUs, or with `dtype` float32, defaults to sdpa."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the computation, and of published and exported weights. The optimizer's parameters and
    moments are float32. Defaults to float32 without GPUs."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the gradients while they are summed over ranks."""
    backend: Literal["", "fsdp", "megatron"] = ""
    """Train engine; empty means fsdp."""
    fsdp: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    """Options of the fsdp backend."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Options of the megatron backend."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass."""
    enable_torch_compile: bool = False
    """Compile the model's layers with torch.compile, for the fsdp backend. The first passes take up to some
    minutes more. Needs a C++ compiler on the trainer's nodes, with GPUs a C compiler and Triton. hpc-rl
    extension."""
    disable_dropout: bool = False
    """Set all dropout probabilities to 0."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """How a train batch is divided into micro-batches."""
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """Optimizer and schedule; null only for a model that is not trained (`ref`)."""
    use_lora: bool = False
    """Train an adapter (LoRA): two thin matrices beside each matrix of `target_modules`. The model at `path`
    is frozen. Needs about 10 times the learning rate of full training."""
    peft_type: Literal["lora"] = "lora"
    """Kind of adapter."""
    lora_rank: PositiveInt = 32
    """Rank of the adapter: the width of its thin matrices."""
    lora_alpha: PositiveInt = 16
    """The adapter's output is multiplied by `lora_alpha` / `lora_rank`."""
    target_modules: list[str] = field(default_factory=list)
    """The adapted linear layers, by the last part of their names, as q_proj; `all-linear`, or nothing, means
    all of them but the output head and the experts of a mixture."""
    lora_path: PathText = ""
    """Directory of an adapter in peft's format to start from; empty starts a new one. hpc-rl extension."""


@dataclass(kw_only=True)
class PPOCriticConfig(TrainEngineConfig):
    """The critic of PPO: a model with a scalar head, which predicts the rest of the reward at each token."""

    is_critic: bool = True
    """A critic has a scalar head: always true."""
    ppo_n_minibatches: PositiveInt = 4
    """Optimizer updates per train batch; each uses a part of its rows, with about the same number of
    tokens."""
    eps_clip: PositiveFloat = 0.5
    """The loss of a value counts only while it is within this distance of the value before the step."""
    mask_no_eos_with_zero: bool = False
    """Leave truncated completions (finish_reason length) out of the loss."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps that train the critic alone. The learning-rate schedule of the actor continues
    meanwhile. hpc-rl extension."""


@dataclass(kw_only=True)
class DPOEngineConfig(TrainEngineConfig):
    """The policy of direct preference optimization."""

    beta: PositiveFloat = 0.1
    """Strength of the bond to the reference model: the reward of a completion is beta times the log of its
    probability over its probability by the reference model."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: the loss of DPO; `ipo`: a squared loss, least where the rewards of a pair differ by 1/2."""
    label_smoothing: ShareBelowHalf = 0.0
    """Share of pairs that are assumed to be in the wrong order (conservative DPO), below 0.5; for `loss_type`
    sigmoid. hpc-rl extension."""


@dataclass(kw_only=True)
class NormConfig:
    """Normalization of rewards or advantages."""

    mean_level: Literal["batch", "group"] | None = "batch"
    """Scope of the mean that is subtracted; null subtracts none."""
    std_level: Literal["batch", "group"] | None = "batch"
    """Scope of the standard deviation to divide by; null divides by none."""
    group_size: PositiveInt | None = None
    """Trajectories per group. Must equal `gconfig.n_samples`; null follows it."""
    mean_leave1out: bool = False
    """Exclude an entry from the mean that is subtracted from it."""
    std_unbiased: bool = False
    """Use the unbiased standard deviation."""
    eps: PositiveFloat = 1e-5
    """Term added to the standard deviation."""


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """Correction of tokens that the servers sampled with other probabilities than the trainer's."""

    level: Literal["token", "sequence"] = "token"
    """`token`: each token has its weight, proximal over behavior. `sequence`: all tokens of a completion have
    the geometric mean of their weights."""
    mode: Literal["truncate", "mask", "icepop"] = "truncate"
    """`truncate` moves weights beyond a bound to the bound. `mask` and `icepop` leave these tokens or
    completions out of the loss and its divisor. `icepop` has two bounds by default."""
    lower: PositiveFloat | None = None
    """Smallest weight; null means no bound. Defaults to 0.5 with `icepop`."""
    upper: PositiveFloat | None = 2.0
    """Largest weight; null means no bound. Defaults to 5 with `icepop`."""


@dataclass(kw_only=True)
class AEntConfig:
    """AEnt: an entropy bonus whose coefficient keeps the entropy within a band (arXiv 2509.03493)."""

    entropy_coeff: NonNegativeFloat = 0.0002
    """Coefficient of the mean entropy, which is subtracted from the loss; the initial one with
    `adaptive_coeff`."""
    entropy_clamp: ShareBelowOne = 0.0
    """Share of the vocabulary, the least probable tokens, that the entropy leaves out. The vocabulary must
    not be divided among ranks (`t`)."""
    adaptive_coeff: bool = False
    """Adapt the coefficient after each step."""
    entropy_low: NonNegativeFloat = 0.1
    """Entropy below which the coefficient grows."""
    entropy_high: NonNegativeFloat = 0.3
    """Entropy above which the coefficient shrinks."""
    coeff_lr: NonNegativeFloat = 0.001
    """Change of the coefficient per step and unit of entropy outside of the band."""
    coeff_box_low: NonNegativeFloat = 0.0
    """Smallest coefficient."""
    coeff_box_high: NonNegativeFloat = 0.01
    """Largest coefficient."""
    warmup_steps: NonNegativeInt = 0
    """Steps before the coefficient is adapted."""


@dataclass(kw_only=True)
class PPOActorConfig(TrainEngineConfig):
    """The policy of GRPO and PPO."""

    group_size: PositiveInt | None = None
    """Trajectories per prompt. Must equal `gconfig.n_samples`; null follows it."""
    ppo_n_minibatches: PositiveInt = 4
    """Optimizer updates per train batch; each uses a part of its rows, with about the same number of
    tokens."""
    eps_clip: Share = 0.2
    """Clip range of the probability ratio: [1 - eps_clip, 1 + eps_clip]. 1 means no lower bound."""
    eps_clip_higher: PositiveFloat | None = None
    """Upper clip range, if it differs."""
    c_clip: AboveOne | None = None
    """Dual clip for negative advantages, above 1; null disables it."""
    temperature: PositiveFloat | None = None
    """Sampling temperature of the behavior policy. Must equal `gconfig.temperature`; null follows it."""
    reward_norm: NormConfig | None = None
    """Normalization of rewards; null means none."""
    reward_scaling: PositiveFloat = 1.0
    """Factor applied to rewards."""
    reward_bias: float = 0.0
    """Added to rewards before scaling."""
    reward_clip: PositiveFloat = 20.0
    """Rewards are clipped to plus and minus this value."""
    length_penalty: NonNegativeFloat = 0.0
    """Weight of a reward for short completions: from half of it for the shortest of a group to minus half for
    the longest; without a reward above 0 for the task, at most 0. hpc-rl extension."""
    overlong_reward_penalty: bool = False
    """Reduce the reward of completions that reach into the last `overlong_tokens` tokens of
    `gconfig.max_new_tokens`, linearly up to `overlong_penalty_factor` at the end."""
    overlong_tokens: PositiveInt | None = None
    """Number of tokens at the end of `gconfig.max_new_tokens` that are penalized."""
    overlong_penalty_factor: NonNegativeFloat | None = None
    """Largest penalty."""
    max_new_tokens: PositiveInt | None = None
    """Largest number of tokens in a completion. Must equal `gconfig.max_new_tokens`; null follows it."""
    mask_no_eos_with_zero: bool = False
    """Leave truncated completions (finish_reason length) out of the loss; they still count in the baseline of
    their group."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards, without the overlong penalty, are all equal. They are dropped before
    normalization, so batches differ in size. A step whose groups are all dropped makes no update."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """`token_mean`: every token of a minibatch has the same weight; `sequence_mean`: every completion has the
    same weight; `constant_length`: the sum over a completion is divided by `gconfig.max_new_tokens` (Dr.GRPO,
    with std_level null). hpc-rl extension."""
    algorithm: str = "grpo"
    """Name of an algorithm, or `package.module:name` of yours: see Algorithms in the documentation. A name
    sets the defaults of its options. `areal` computes rewards, credit and dynamic sampling exactly as AReaL
    v0.3 did, mistakes included. hpc-rl extension."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """`sequence` selects the algorithm `gspo`."""
    use_sapo_loss: bool = False
    """true selects the algorithm `sapo`."""
    sapo_tau_pos: PositiveFloat = 1.0
    """Temperature of SAPO's gate for positive credit."""
    sapo_tau_neg: PositiveFloat = 1.05
    """Temperature of SAPO's gate for negative credit."""
    m2_threshold: PositiveFloat | None = None
    """Largest second moment of log proximal / behavior; a value selects the algorithm `m2po`."""
    algorithm_args: dict[str, Any] = field(default_factory=dict)
    """Options of your algorithm that this section lacks. hpc-rl extension."""
    log_agent_stats: bool = False
    """Log the entries of `Trajectory.stats` that `log_agent_stats_keys` names."""
    log_agent_stats_keys: list[str] = field(default_factory=list)
    """Keys of `Trajectory.stats`, which the workflow fills."""
    adv_norm: NormConfig | None = None
    """Normalization of advantages; null means none."""
    recompute_logprob: bool = False
    """Recompute the old log-probabilities with the trainer at the start of the step."""
    use_decoupled_loss: bool = False
    """Clip around the recomputed (proximal) policy, and weight by proximal over behavior probabilities."""
    behav_imp_weight_cap: AboveOne | None = None
    """Leave out tokens whose behavior weight exceeds this, above 1; null disables it. They still count in the
    divisor of the loss; `rollout_correction` leaves them out of that, too."""
    rollout_correction: RolloutCorrectionConfig | None = None
    """Weigh tokens by proximal over behavior probabilities, within bounds; null means no correction. Needs
    recomputed log-probabilities. hpc-rl extension."""
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = "recompute"
    """Proximal log-probabilities of the decoupled loss. `recompute`: a forward pass at the start of the step.
    `loglinear`: without that pass, between behavior and current log-probabilities by their versions.
    `metrics`: as `recompute`, and logs the error of `loglinear`."""
    weight_update_mode: Literal["disk", "xccl"] = "disk"
    """How servers get new weights. `disk`: from the trial directory, where each version is a difference to
    the one before. `xccl`: over process groups of the trainer and each server (NCCL between GPUs, else gloo),
    whole; servers that have not joined, or whose group fails, load them from the trial directory."""
    lora_publish: Literal["adapter", "merged"] = "adapter"
    """What servers get with `use_lora`: the adapter alone, or whole models with the adapter merged into
    them. hpc-rl extension."""
    discount: Share = 1.0
    """Discount factor of later rewards."""
    gae_lambda: Share = 1.0
    """Lambda of generalized advantage estimation."""
    kl_ctl: NonNegativeFloat = 0.1
    """Coefficient of the KL divergence from the reference model as a reward per token. Defaults to 0 without
    a section `ref`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of the KL divergence in the reward."""
    beta: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence from the reference model in the loss; needs a section `ref`. ATLAS
    name; hpc-rl extension."""
    kl_loss_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL divergence in the loss. hpc-rl extension."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the mean entropy, which is subtracted from the loss. hpc-rl extension."""
    aent: AEntConfig | None = None
    """AEnt's entropy bonus; null means none. Its defaults are hpc-rl's."""
