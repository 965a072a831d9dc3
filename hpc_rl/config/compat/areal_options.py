"""AReaL's options in hpc-rl: defaults that differ, and options with one possible value, which we lack."""

from dataclasses import dataclass
from typing import Any

from hpc_rl.config.compat.areal_names import MODELS, NO_FP8

_GCONFIG = "null follows gconfig, so the two can't disagree"
_ATTENTION = "the same, but sdpa without GPUs, for dtype float32, and if flash-attn is not installed"
_REQUIRED = "required: without it there is nothing to train"
_AREALS = "actor.algorithm areal does as AReaL"

DEPARTURES: dict[str, tuple[str, str]] = {  # option -> AReaL's default, and how ours differs and why
    "cluster.fileroot": ("~/.cache/areal", "a directory on a file system that all nodes share"),
    "cluster.n_nodes": ("32", "1: a trial without this option must not request 32 nodes"),
    "cluster.name_resolve.nfs_record_root": (
        "/tmp/areal/name_resolve",
        "empty: names/ in the trial's directory, which all nodes see",
    ),
    "total_train_epochs": ("1", "the same, but null if total_train_steps or total_train_n_seqs is set"),
    "ref": ("required", "null: no reference model; options of the loss are accepted there without effect"),
    "rollout.consumer_batch_size": ("1", "null follows train_dataset.batch_size: there is one batch size"),
    "rollout.max_concurrent_rollouts": (
        "null: consumer_batch_size",
        "null means twice the batch size: the next batch is begun while the last prompts of this one run",
    ),
    "rollout.queue_size": (
        "null",
        "the same, but running prompts count too, and a full queue pauses generation; in AReaL it fails",
    ),
    "rollout.schedule_policy": ("round_robin", "least_loaded: long completions don't pile up on one server"),
    "rollout.setup_timeout": ("120.0", "600: servers load weights from a shared disk and compile first"),
    **{
        f"sglang.{name}": (theirs, f"the same, but {ours} without GPUs")
        for name, theirs, ours in (
            ("dtype", "bfloat16", "float32"),
            ("attention_backend", "fa3", "torch_native"),
            ("mem_fraction_static", "0.9", "null"),
            ("chunked_prefill_size", "-1", "null"),
            ("max_prefill_tokens", "32768", "null"),
            ("disable_overlap_schedule", "false", "true"),
        )
    },
    "train_dataset.num_workers": ("0", "the same, but threads that tokenize: the rows are in memory"),
    "train_dataset.drop_last": (
        "true",
        "the same, but per trial, not per pass: a batch may span two passes, so every row is used",
    ),
    "train_dataset.type": ("???", "follows the trainer: rl for grpo, sft for sft, rw for rw"),
    "launcher.slurm.srun_additional_args": (
        "--mpi=pmi2 -K --chdir $PWD",
        "empty: -K would kill the roles before they save, and the plan sets the rest",
    ),
    "launcher.slurm.mount": ("/storage:/storage", "empty: the trial's own directories are always bound"),
    "gconfig.greedy": (
        "false",
        "the same; log-probabilities are then recomputed at temperature 1, as servers report them, in AReaL "
        "at actor.temperature",
    ),
    **{
        f"{section}.optimizer.warmup_steps_proportion": (
            "0.001",
            "the same, but the first update has a rate above 0; in AReaL 0: see warmup_from_zero",
        )
        for section in ("actor", "model")
    },
    "gconfig.max_tokens": ("65536", "the same, or actor.mb_spec.max_tokens_per_mb if that is less"),
    **{
        f"{section}.max_length": (
            "null",
            "the same; if model.mb_spec.max_tokens_per_mb is set, this for sft and half of it for rw",
        )
        for section in ("train_dataset", "valid_dataset")
    },
    **{
        f"{section}.optimizer": ("null", "a section with its defaults: without one nothing would be trained")
        for section in ("actor", "model")
    },
    **{
        f"{section}.mb_spec.max_tokens_per_mb": (
            "null",
            "on GPUs 32768, or the longest sequence that may come: one micro-batch of all rows fits no GPU",
        )
        for section in ("actor", "model")
    },
    **{f"{section}.attn_impl": ("flash_attention_2", _ATTENTION) for section in ("actor", "model")},
    "model.is_critic": ("false", "the same, but true for rw, as AReaL's own script sets it"),
    "model.mb_spec.granularity": ("1", "the same, but 2 for rw, as AReaL's own script sets it"),
    "actor.ppo_n_minibatches": (
        "4",
        "the same, but not more than the rows of a batch: AReaL's defaults alone, with 1 row, are refused",
    ),
    "actor.overlong_reward_penalty": (
        "false",
        f"the same; the penalty is at most overlong_penalty_factor, in AReaL unbounded; {_AREALS}",
    ),
    "actor.mask_no_eos_with_zero": (
        "false",
        "the same; completions that the servers report as truncated leave the loss; in AReaL the longest of "
        f"a batch get no reward; {_AREALS}",
    ),
    "actor.dynamic_sampling": (
        "false",
        "the same, but groups are dropped before normalization and by their rewards without the overlong "
        f"penalty, as in DAPO; in AReaL after it and with the penalty; {_AREALS}",
    ),
    "saver": ("never", "the same, but one export is always written at the end"),
    "evaluator": ("never", "with a valid_dataset after the last step, and for grpo before the first"),
    "stats_logger.tensorboard.path": ("null: no files", "null means tensorboard/ in the trial's directory"),
    "recover.freq_secs": ("null", "the same, but 600 with a recover.mode that saves and no period"),
    "recover.retries": ("3 in all", "3 in a row: a new checkpoint starts the count again"),
    "actor.path": ("empty", _REQUIRED),
    "model.path": ("empty", _REQUIRED),
    "actor.group_size": ("1", _GCONFIG),
    "actor.temperature": ("1.0", _GCONFIG),
    "actor.max_new_tokens": ("1024", _GCONFIG),
    "actor.reward_norm.group_size": ("1", _GCONFIG),
    "actor.adv_norm.group_size": ("1", _GCONFIG),
    **{
        f"{section}.dtype": (
            "bfloat16",
            "the same, for compute and exports; parameters and moments are float32; without GPUs float32",
        )
        for section in ("actor", "model")
    },
    "actor.kl_ctl": ("0.1", "the same, but 0 without a section ref, or with beta"),
}

# Option -> AReaL's default since v0.5.3. Ours is v0.3.0's, because a file does not tell its release.
CHANGED_DEFAULTS: dict[str, Any] = {
    "gconfig.max_tokens": 32768,
    "rollout.setup_timeout": 300.0,
    "actor.gradient_checkpointing": False,
    "actor.weight_update_mode": "xccl",
    "actor.adv_norm.std_unbiased": True,
    "actor.reward_norm.std_unbiased": True,
    "actor.optimizer.lr": 0.001,
    "actor.optimizer.weight_decay": 0.01,
    "actor.optimizer.beta2": 0.999,
    "actor.optimizer.eps": 1e-8,
    "sglang.disable_radix_cache": True,
    "vllm.block_size": 16,
    "vllm.dtype": "bfloat16",
    "vllm.max_model_len": 32768,
    "vllm.max_num_seqs": 256,
    "vllm.no_enable_prefix_caching": True,
}

_FILES = "processes find each other by files on the shared file system; use nfs, or remove it"
_SERVICE = "hpc-rl has no scheduler service: Slurm places the roles; remove the section"
_REWARDS = "rewards are computed by the rollout role; use a function in rollout.reward_fn"
_OF_REWARDS = ("rollout.reward_fn",)
_REWARD_MODEL = "servers of the trial hold it: use pools.reward_model.path and rollout.reward_fn reward_model"
_OF_REWARD_MODEL = ("pools.reward_model.path", "rollout.reward_fn")
_FSDP2 = "use the fsdp backend, which is FSDP2"
_FLOAT32 = "parameters, gradients and moments of the optimizer are float32; more data ranks take less memory"
_DROPPED = "SGLang 0.5.23 lacks this option"
_OF_EXPERTS = ("sglang.ep_size", "sglang.extra_args")


@dataclass(frozen=True)
class OneValue:
    """The only value that an option of AReaL can have here (or several that mean the same), and why."""

    allowed: tuple[Any, ...]
    why: str
    related_options: tuple[str, ...] = ()  # that `why` names

    def is_allowed(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.allowed)

    def describe_allowed(self) -> str:
        words = {"": "empty", "{}": "empty", "none": "null"}
        texts = [str(value).lower() for value in self.allowed]
        return ", ".join(words.get(text, text) for text in texts)


ONE_VALUE: dict[str, OneValue] = {
    "cluster.name_resolve.type": OneValue(("nfs",), _FILES),
    "scheduler.endpoint": OneValue(("http://localhost:8081",), _SERVICE),
    "scheduler.deploy_mode": OneValue(
        ("separation",), "allocation_mode decides it; remove it", ("allocation_mode",)
    ),
    "scheduler.functioncall_service_domain": OneValue(("http://localhost:8080",), _REWARDS, _OF_REWARDS),
    "scheduler.reward_functioncall_config": OneValue(({},), _REWARDS, _OF_REWARDS),
    "scheduler.reward_model_path": OneValue(("",), _REWARD_MODEL, _OF_REWARD_MODEL),
    "scheduler.reward_model_service_url": OneValue(
        ("http://localhost:30000/classify",), _REWARD_MODEL, _OF_REWARD_MODEL
    ),
    "sglang.dp_size": OneValue(
        (1,), "allocation_mode sets the number of servers, such as sglang:d4", ("allocation_mode",)
    ),
    "sglang.enable_dp_attention": OneValue(
        (False,), "it divides a server by sglang.dp_size, which is 1 here; use more servers: sglang:dN"
    ),
    "sglang.enable_ep_moe": OneValue(
        (False,), f"{_DROPPED}; use sglang.ep_size, and --moe-a2a-backend in sglang.extra_args", _OF_EXPERTS
    ),
    "sglang.torchao_config": OneValue(
        ("",), f"{_DROPPED}; use --quantization in sglang.extra_args", ("sglang.extra_args",)
    ),
    "sglang.enable_nan_detection": OneValue((False,), f"{_DROPPED}; remove it"),
    "{model}.ds_auto_tp.autotp_size": OneValue(
        (1, None),
        "allocation_mode has the tensor-parallel size: t2, as fsdp:d2t2; remove it",
        ("allocation_mode",),
    ),
    "{model}.megatron.wrap_with_ddp": OneValue(
        (True,), "gradients must be summed over data ranks; remove it"
    ),
    "{model}.megatron.use_torch_fsdp2": OneValue((False,), _FSDP2),
    "{model}.megatron.use_custom_fsdp": OneValue((False,), _FSDP2),
    "{model}.megatron.ddp.average_in_collective": OneValue(
        (False,), "losses are divided by the tokens of the whole batch, once; remove it"
    ),
    "{model}.megatron.ddp.fp8_param_gather": OneValue((False,), NO_FP8, ("actor.dtype",)),
    "{model}.megatron.overlap_param_gather_with_optimizer_step": OneValue(
        (False,), "use megatron.ddp.overlap_param_gather, which overlaps with the forward pass"
    ),
    "{model}.megatron.use_precision_aware_optimizer": OneValue((False,), _FLOAT32),
    "{model}.megatron.main_grads_dtype": OneValue(("float32",), _FLOAT32),
    "{model}.megatron.main_params_dtype": OneValue(("float32",), _FLOAT32),
    "{model}.megatron.exp_avg_dtype": OneValue(("float32",), _FLOAT32),
    "{model}.megatron.exp_avg_sq_dtype": OneValue(("float32",), _FLOAT32),
    "{model}.megatron.async_save": OneValue(
        (False,), "use recover.async_save, which every backend has", ("recover.async_save",)
    ),
    "{model}.megatron.use_checkpoint_opt_param_scheduler": OneValue(
        (True,), "the schedule continues at the step of the checkpoint, with the rates of this configuration"
    ),
    "{model}.megatron.distribute_saved_activations": OneValue(
        (False, None), "with t above 1 sequence parallelism divides them already; remove it"
    ),
}
# Each model in the trainer has its own row.
ONE_VALUE |= {
    name.replace("{model}", model): row
    for name, row in ONE_VALUE.items()
    if "{model}" in name
    for model in MODELS
}

# AReaL repeats the identity of a trial in most sections; here it has one, and these options must equal it.
IDENTITY = {
    f"{section}.{name}": root
    for section in ("saver", "evaluator", "recover", "checkpointer", "stats_logger", "rollout", *MODELS)
    for name, root in (
        ("experiment_name", "experiment_name"),
        ("trial_name", "trial_name"),
        ("fileroot", "cluster.fileroot"),
    )
    if name != "fileroot" or section not in ("rollout", *MODELS)
}
