"""Names of AReaL v0.3.0 to v1.0.4 that hpc-rl lacks, and values of its files without a meaning here.

`{model}` stands for each model in the trainer: actor, critic, ref and model.
"""

from dataclasses import dataclass
from typing import Any

ANY = object()  # matches every value


@dataclass(frozen=True)
class OtherName:
    """The meaning of an AReaL name."""

    to: str = ""  # our option, if any
    idle: tuple[Any, ...] = ()  # values without effect; other values are refused
    why: str = ""  # the reason, and a replacement

    def describe(self) -> str:
        if self.to or ANY in self.idle:
            return f"`{self.to}`" if self.to else f"no effect: {self.why}"
        if not self.idle:
            return f"refused: {self.why}"
        words = {"none": "null", "": "empty", "{}": "empty"}
        texts = [words.get(text, text) for text in (str(value).lower() for value in self.idle)]
        return f"only {', '.join(texts)}: {self.why}"


MODELS = ("actor", "critic", "ref", "model")
WORKFLOW = "rollout.workflow"
WORKFLOW_ARGS = "rollout.workflow_args"
# Top-level keys of AReaL's multi-turn, search, tool and agent examples, for their workflows.
OF_WORKFLOWS = (
    "agent_run_args", "agent_type", "econfig", "export_style", "judge_engine", "log_agent_stats",
    "log_agent_stats_keys", "max_llm_calls_per_run", "max_tokens_per_trajectory", "max_turns", "n_trajs",
    "tir", "turn_discount",
)  # fmt: skip
CODE_OF_WORKFLOWS = ("agent_builder_path", "eval_workflow", "workflow")  # which name AReaL's own code
# The keys of AReaL's multi-turn-math example, whose workflow is multi_turn here. Other examples have some of
# these, too: camel all but `max_turns`, the search agent `max_turns` alone.
OF_MULTI_TURN = frozenset({"max_turns", "turn_discount", "max_tokens_per_trajectory", "n_trajs"})
AT_TOP = (
    *OF_WORKFLOWS, *CODE_OF_WORKFLOWS, "checkpointer", "dynamic_bs", "enable_offload", "memory_profiler",
    "model_path", "perf_tracer", "reward_fn_path", "scheduler", "server_only",
)  # fmt: skip
_LORA_OF_SERVERS = OtherName(idle=(ANY,), why="servers take the settings of the adapter from actor.use_lora")
# FP8 would learn something else: such a file must not train in another type without the user's decision
NO_FP8 = "FP8 training needs kernels that hpc-rl does not have; remove it to train in actor.dtype bfloat16"
_TOKENS = "requests have token ids, with a tokenizer in the server or without"

NAMES: dict[str, OtherName] = {
    # v0.3.0 to v0.3.2
    "{model}.mb_spec.max_tokens_per_gpu": OtherName("{model}.mb_spec.max_tokens_per_mb"),
    "{model}.fsdp.ulysses_sp_size": OtherName(
        idle=(1,), why="allocation_mode has this size: c, as in fsdp:d2c4"
    ),
    "checkpointer.freq_epochs": OtherName("recover.freq_epochs"),
    "checkpointer.freq_steps": OtherName("recover.freq_steps"),
    "checkpointer.freq_secs": OtherName("recover.freq_secs"),
    "server_only": OtherName(idle=(False,), why="use `hpc-rl serve` for servers without a trainer"),
    **dict.fromkeys(
        ("cluster.name_resolve.etcd3_addr", "cluster.name_resolve.ray_actor_name"),
        OtherName(idle=(ANY,), why="cluster.name_resolve.type is nfs"),
    ),
    # v0.3.3 to v0.4.1
    "rollout.pause_grace_period": OtherName(
        idle=(ANY,), why="requests in flight at an update continue with the new weights at once"
    ),
    "rollout.dump_to_file": OtherName(idle=(ANY,), why="`hpc-rl samples` shows completions"),
    "rollout.fileroot": OtherName(idle=(ANY,), why="a trial writes below cluster.fileroot"),
    "rollout.tokenizer_path": OtherName(idle=(ANY,), why="all roles use tokenizer_path"),
    "scheduler.type": OtherName(idle=(None, "slurm", "local"), why="launcher.type says where a trial runs"),
    "enable_offload": OtherName(
        idle=(ANY,), why="memory is released if servers and trainer share GPUs, and only then"
    ),
    "{model}.offload": OtherName(idle=(False,), why="see {model}.fsdp.offload_params"),
    "perf_tracer": OtherName(idle=(ANY,), why="the times of a step are always among the metrics"),
    **dict.fromkeys(
        ("critic.weight_update_mode", "ref.weight_update_mode", "model.weight_update_mode"),
        OtherName(idle=(ANY,), why="only the actor's weights are sent to servers"),
    ),
    "{model}.megatron.virtual_pipeline_parallel_size": OtherName("{model}.megatron.virtual_pipeline_size"),
    **dict.fromkeys(
        (
            f"{{model}}.megatron.moe_{name}"
            for name in ("token_dispatcher_type", "shared_expert_overlap", "enable_deepep", "permute_fusion")
        ),
        OtherName(
            idle=(ANY,),
            why="all-to-all without fused kernels moves tokens to experts; the losses are the same",
        ),
    ),
    "{model}.megatron.fp8_config": OtherName(idle=(None,), why=NO_FP8),
    "{model}.megatron.moe_router_dtype": OtherName(
        idle=(ANY,), why="a router of experts computes in the data type of the model"
    ),
    **dict.fromkeys(
        (
            f"{section}.{name}"
            for section in ("sglang", "vllm")
            for name in (
                *("enable_lora", "max_lora_rank", "max_loaded_loras", "max_loras", "lora_paths"),
                *("lora_backend", "lora_modules", "lora_target_modules", "max_loras_per_batch"),
            )
        ),
        _LORA_OF_SERVERS,
    ),
    "gconfig.lora_name": _LORA_OF_SERVERS,
    "gconfig.use_beam_search": OtherName(
        idle=(False,), why="hpc-rl samples completions and has no beam search"
    ),
    "gconfig.ignore_eos": OtherName(
        idle=(False,),
        why="a completion ends at the EOS token; gconfig.min_new_tokens sets a minimum length",
    ),
    "gconfig.skip_special_tokens": OtherName(idle=(ANY,), why="servers return token ids, not text"),
    **dict.fromkeys(
        ("ref.aent", "ref.rejection_sampling"),
        OtherName(idle=(ANY,), why="the reference model is not trained"),
    ),
    "actor.rejection_sampling.level": OtherName("actor.rollout_correction.level"),
    "actor.rejection_sampling.action": OtherName("actor.rollout_correction.mode"),
    "actor.rejection_sampling.lower": OtherName("actor.rollout_correction.lower"),
    "actor.rejection_sampling.upper": OtherName("actor.rollout_correction.upper"),
    "actor.rejection_sampling.metric": OtherName(
        idle=("ratio",), why="actor.rollout_correction compares the ratio of probabilities with its bounds"
    ),
    "actor.rejection_sampling.agg": OtherName(
        idle=("mean",), why="actor.rollout_correction takes the mean log ratio of a sequence"
    ),
    "actor.rejection_sampling": OtherName(
        idle=(None,), why="importance weights of tokens need actor.use_decoupled_loss"
    ),
    "vllm.model": OtherName(idle=(None, "", "${actor.path}"), why="servers have the weights of actor.path"),
    "vllm.skip_tokenizer_init": OtherName(idle=(ANY,), why=_TOKENS),
    "vllm.worker_extension_cls": OtherName(idle=(ANY,), why="hpc-rl has its own way to load new weights"),
    "vllm.distributed_executor_backend": OtherName(
        idle=("mp",), why="set it as --distributed-executor-backend in vllm.extra_args"
    ),
    "vllm.enable_sleep_mode": OtherName(idle=(ANY,), why="hpc-rl sets it if servers and trainer share GPUs"),
    "vllm.disable_sliding_window": OtherName(
        idle=(True, False), why="vLLM disables it if a model needs that; to force it, use vllm.extra_args"
    ),
    "vllm.swap_space": OtherName(idle=(4,), why="vLLM removed this option; see vllm.cpu_offload_gb"),
    "vllm.max_seq_len_to_capture": OtherName(idle=(ANY,), why="vLLM removed this option"),
    "sglang.enable_multithread_load": OtherName(idle=(ANY,), why="new weights are loaded tensor by tensor"),
    "sglang.enable_fast_load": OtherName(idle=(ANY,), why="new weights are loaded tensor by tensor"),
    # v0.5.3 to v1.0.4
    "dynamic_bs": OtherName("actor.dynamic_sampling"),
    "reward_fn_path": OtherName(
        idle=("areal.reward.gsm8k.gsm8k_reward_fn",),
        why="use rollout.reward_fn, which is math_verify for rows of GSM8K",
    ),
    **dict.fromkeys(
        CODE_OF_WORKFLOWS, OtherName(idle=(ANY,), why=f"{WORKFLOW} names the workflow, also of evaluations")
    ),
    "memory_profiler": OtherName(idle=(None,), why="hpc-rl can't record memory profiles"),
    "model_path": OtherName(why="use actor.path"),
    "actor.behave_imp_weight_cap": OtherName("actor.behav_imp_weight_cap"),
    "rollout.use_lora": _LORA_OF_SERVERS,
    **dict.fromkeys(
        ("rollout.agent", "rollout.openai"),
        OtherName(idle=(ANY,), why=f"{WORKFLOW} runs the agent, or an environment does at the gateway"),
    ),
    **dict.fromkeys(
        ("rollout.agent.turn_discount", "rollout.openai.turn_discount"),
        OtherName(idle=(1.0,), why="the workflow discounts turns, as multi_turn by turn_discount"),
    ),
    **dict.fromkeys(
        ("rollout.agent.mode", "rollout.openai.mode"),
        OtherName(
            idle=("inline", "subproc"),
            why="an agent outside of the trial runs as an environment (section environments)",
        ),
    ),
    **dict.fromkeys(
        ("rollout.admin_api_key", "rollout.provider_api_key"),
        OtherName(idle=(ANY,), why="each trial creates its own API keys"),
    ),
    "rollout._version": OtherName(idle=("v1",), why="hpc-rl does not have AReaL's service of version 2"),
    "rollout.api_url": OtherName(idle=(None,), why="the trial starts its servers; see allocation_mode"),
    "rollout.model": OtherName(idle=(ANY,), why="the servers of the trial have the model of actor.path"),
    "rollout.poll_interval": OtherName(
        idle=(ANY,), why="hpc-rl waits for the answers of servers and does not poll"
    ),
    "rollout.routing_strategy": OtherName(idle=("round_robin",), why="use rollout.schedule_policy"),
    **dict.fromkeys(
        ("rollout.return_routed_experts", "sglang.enable_return_routed_experts"),
        OtherName(idle=(False,), why="the trainer routes tokens to experts itself"),
    ),
    "{model}._version": OtherName(idle=("v1",), why="hpc-rl does not have AReaL's service of version 2"),
    "{model}.admin_api_key": OtherName(idle=(ANY,), why="each trial creates its own API keys"),
    **dict.fromkeys(
        ("{model}.request_timeout", "{model}.setup_timeout"),
        OtherName(idle=(ANY,), why="a trainer that makes no progress is restarted; see recover.hang_min_s"),
    ),
    "{model}.log_level": OtherName(idle=(ANY,), why="each role writes one log"),
    "{model}.use_kernels": OtherName(idle=(ANY,), why="attn_impl chooses kernels; the losses are the same"),
    "{model}.enable_tree_training": OtherName(
        idle=(ANY,), why="the common prefix of rows is computed for each row; the losses are the same"
    ),
    "{model}.archon": OtherName(
        idle=(ANY,), why="hpc-rl has no archon engine and trains with fsdp or megatron"
    ),
    "{model}.archon.fp8_config": OtherName(idle=(ANY,), why=NO_FP8),
    "{model}.archon.fp8_config.mode": OtherName(idle=("disabled",), why=NO_FP8),
    "{model}.archon.enable_compile": OtherName(
        idle=(ANY,), why="hpc-rl has no archon engine; the fsdp engine has {model}.enable_torch_compile"
    ),
    "{model}.archon.offload_params": OtherName("{model}.fsdp.offload_params"),
    **dict.fromkeys(
        ("{model}.mb_spec.n_mbs_divisor", "{model}.mb_spec.packing_algorithm"),
        OtherName(
            idle=(ANY,), why="hpc-rl has one way to cut micro-batches; the result does not depend on it"
        ),
    ),
    **dict.fromkeys(
        ("{model}.megatron.bridge_type", "{model}.megatron.use_mbridge_save"),
        OtherName(idle=(ANY,), why="hpc-rl reads and writes Hugging Face checkpoints itself"),
    ),
    "{model}.fsdp.memory_efficient_load": OtherName(
        idle=(ANY,), why="a rank reads only its own part of the weights"
    ),
    "{model}.fsdp.per_layer_optim_step": OtherName(idle=(False,), why="use optimizer.offload"),
    "{model}.fsdp.optim_step_prefetch_layers": OtherName(
        idle=(ANY,), why="it is for per_layer_optim_step, which hpc-rl does not have"
    ),
    "{model}.fsdp.shard_vision_across_sp": OtherName(idle=(ANY,), why="only models of text are trained"),
    **dict.fromkeys(
        ("critic.temperature", "model.temperature"),
        OtherName(idle=(ANY,), why="only the policy generates completions"),
    ),
    **dict.fromkeys(
        (
            f"{section}.{name}"
            for section in ("train_dataset", "valid_dataset")
            for name in ("num_dataset_workers", "scheduling_spec", "setup_timeout")
        ),
        OtherName(idle=(ANY,), why="the roles read the data themselves; see num_workers"),
    ),
    **{
        f"{section}.{name}": OtherName(idle=idle, why="path is a file or directory that has these rows")
        for section in ("train_dataset", "valid_dataset")
        for name, idle in (("split", (ANY,)), ("dataset_kwargs", ({}, None)))
    },
    "evaluator.eval_before_train": OtherName(
        idle=(ANY,), why="grpo evaluates before the first step, the other trainers do not"
    ),
    **dict.fromkeys(
        ("recover.no_load_optim", "recover.no_save_optim"),
        OtherName(idle=(False,), why="a checkpoint always has the state of the optimizer"),
    ),
    "saver.mode": OtherName(idle=(ANY,), why="exports are always written during the next steps"),
}
NAMES |= {
    name.replace("{model}", model): OtherName(
        row.to.replace("{model}", model), row.idle, row.why.replace("{model}", model)
    )
    for name, row in NAMES.items()
    if "{model}" in name
    for model in MODELS
}

# Option -> AReaL's default, which its saved config.yaml spells out, and the option that our default follows.
# In a file such a value counts as not written, so our default follows or adapts.
AS_UNWRITTEN: dict[str, tuple[Any, str]] = {
    "actor.group_size": (1, "gconfig.n_samples"),
    "actor.reward_norm.group_size": (1, "gconfig.n_samples"),
    "actor.adv_norm.group_size": (1, "gconfig.n_samples"),
    "actor.max_new_tokens": (1024, "gconfig.max_new_tokens"),
    "actor.temperature": (1.0, "gconfig.temperature"),
    "rollout.consumer_batch_size": (1, "train_dataset.batch_size"),
    "gconfig.max_tokens": (65536, ""),
    "train_dataset.max_length": (None, ""),
    "valid_dataset.max_length": (None, ""),
    "model.is_critic": (False, ""),
    "critic.is_critic": (False, ""),
    **{f"{model}.attn_impl": ("flash_attention_2", "") for model in MODELS},
    "model.mb_spec.granularity": (1, ""),
    "stats_logger.wandb.id_suffix": (None, ""),
    "stats_logger.swanlab.mode": (None, ""),
    "stats_logger.swanlab.api_key": (None, ""),
}
MEGATRON_LAYERS = {  # in target_modules, where hpc-rl has the names of Hugging Face's layers
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
SRUN_ARGS = {"--unbuffered", "--mpi=pmi2", "-K", "--chdir", "$PWD"}  # all of AReaL's own
MOUNT = "/storage:/storage"
