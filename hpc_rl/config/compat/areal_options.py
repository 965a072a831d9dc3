"""AReaL's options in hpc-rl: defaults that differ, and options that accept only some values."""

from dataclasses import dataclass
from typing import Any

_IDENTITY = "follows the root: a trial has one identity"
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
    **{
        f"{section}.{name}": ("???", _IDENTITY)
        for section in ("actor", "model", "saver", "evaluator", "recover", "stats_logger")
        for name in ("experiment_name", "trial_name", "fileroot")
        if name != "fileroot" or section not in ("actor", "model")
    },
}

_FILES = "processes find each other by files on the shared file system; use nfs, or remove it"
_SERVICE = "hpc-rl has no scheduler service: Slurm places the roles; remove the section"
_REWARDS = "rewards are computed by the rollout role; use a function in rollout.reward_fn"
_OF_REWARDS = ("rollout.reward_fn",)
_REWARD_MODEL = "servers of the trial hold it: use pools.reward_model.path and rollout.reward_fn reward_model"
_OF_REWARD_MODEL = ("pools.reward_model.path", "rollout.reward_fn")
_FSDP2 = "use the fsdp backend, which is FSDP2"
_FLOAT32 = "parameters, gradients and moments of the optimizer are float32; more data ranks take less memory"
_NO_FP8 = "FP8 is not used for training; use actor.dtype bfloat16"
_KEY = "a key does not belong in a file that others may read"


@dataclass(frozen=True)
class Unavailable:
    """The values that an option accepts, and why it accepts no others."""

    allowed: tuple[Any, ...]
    why: str
    related_options: tuple[str, ...] = ()  # that `why` names

    def describe_allowed(self) -> str:
        words = {"": "empty", "{}": "empty", "none": "null"}
        texts = [str(value).lower() for value in self.allowed]
        return ", ".join(words.get(text, text) for text in texts)


UNAVAILABLE: dict[str, Unavailable] = {
    "cluster.name_resolve.type": Unavailable(("nfs",), _FILES),
    "cluster.name_resolve.etcd3_addr": Unavailable(("localhost:2379",), _FILES),
    "cluster.name_resolve.ray_actor_name": Unavailable(("ray_kv_store",), _FILES),
    "scheduler.endpoint": Unavailable(("http://localhost:8081",), _SERVICE),
    "scheduler.deploy_mode": Unavailable(
        ("separation",), "allocation_mode decides it; remove it", ("allocation_mode",)
    ),
    "scheduler.functioncall_service_domain": Unavailable(("http://localhost:8080",), _REWARDS, _OF_REWARDS),
    "scheduler.reward_functioncall_config": Unavailable(({},), _REWARDS, _OF_REWARDS),
    "scheduler.reward_model_path": Unavailable(("",), _REWARD_MODEL, _OF_REWARD_MODEL),
    "scheduler.reward_model_service_url": Unavailable(
        ("http://localhost:30000/classify",), _REWARD_MODEL, _OF_REWARD_MODEL
    ),
    "stats_logger.wandb.wandb_api_key": Unavailable(
        ("",), f"{_KEY}; run `wandb login` once, or export WANDB_API_KEY before submitting"
    ),
    "stats_logger.swanlab.api_key": Unavailable(
        ("",), f"{_KEY}; run `swanlab login` once, or export SWANLAB_API_KEY before submitting"
    ),
    "sglang.dp_size": Unavailable(
        (1,), "allocation_mode sets the number of servers, such as sglang:d4", ("allocation_mode",)
    ),
    "sglang.enable_dp_attention": Unavailable(
        (False,),
        "it divides a server by sglang.dp_size, which is 1 here; use more servers: sglang:dN",
        ("sglang.dp_size",),
    ),
}
MODEL_UNAVAILABLE: dict[str, Unavailable] = {  # options of each model in the trainer: actor, ref, model
    "megatron.wrap_with_ddp": Unavailable((True,), "gradients must be summed over data ranks; remove it"),
    "megatron.use_torch_fsdp2": Unavailable((False,), _FSDP2),
    "megatron.use_custom_fsdp": Unavailable((False,), _FSDP2),
    "megatron.ddp.average_in_collective": Unavailable(
        (False,), "losses are divided by the tokens of the whole batch, once; remove it"
    ),
    "megatron.ddp.fp8_param_gather": Unavailable((False,), _NO_FP8, ("actor.dtype",)),
    "megatron.overlap_param_gather_with_optimizer_step": Unavailable(
        (False,), "use megatron.ddp.overlap_param_gather, which overlaps with the forward pass"
    ),
    "megatron.use_precision_aware_optimizer": Unavailable((False,), _FLOAT32),
    "megatron.main_grads_dtype": Unavailable(("float32",), _FLOAT32),
    "megatron.main_params_dtype": Unavailable(("float32",), _FLOAT32),
    "megatron.exp_avg_dtype": Unavailable(("float32",), _FLOAT32),
    "megatron.exp_avg_sq_dtype": Unavailable(("float32",), _FLOAT32),
    "megatron.async_save": Unavailable(
        (False,), "use recover.async_save, which every backend has", ("recover.async_save",)
    ),
    "megatron.use_checkpoint_opt_param_scheduler": Unavailable(
        (True,), "the schedule continues at the step of the checkpoint, with the rates of this configuration"
    ),
    "megatron.distribute_saved_activations": Unavailable(
        (False, None), "with t above 1 sequence parallelism divides them already; remove it"
    ),
}
