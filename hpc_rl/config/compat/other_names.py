"""Names of TRL, verl, OpenRLHF, prime-rl and slime that hpc-rl lacks, each with a replacement.

These are hints, not aliases, because units and meanings differ a little. `{model}` is actor, or model in sft
and rw.
"""

# Sections of verl's files; their options are looked up by the last part of the name.
SECTIONS = ("actor_rollout_ref", "algorithm", "custom_reward_function", "data")
FIXED_NODES = (
    "The nodes of a trial are fixed when it is planned, as its ranks are: servers that come and go are "
    "launcher.slurm.layout jobs, and `hpc-rl recover TRIAL --n_nodes 4` continues on four."
)
_GPUS = "GPUs are counted by node: cluster.n_gpus_per_node, and --n_nodes for the nodes."
_MESH = "allocation_mode has it: t, p, c and e, as in sglang:d2t2+megatron:d2p2t2."
_ONCE = "a batch is trained on once, cut into actor.ppo_n_minibatches updates."
_KL = "a KL term has a coefficient, and a section ref: actor.beta is in the loss, actor.kl_ctl in the reward."
_EVALUATED = "evaluator.freq_steps, freq_epochs and freq_secs say when; valid_dataset is evaluated at once."
_MICRO = "micro-batches are cut by tokens: {model}.mb_spec.max_tokens_per_mb."
_KEPT = "rollout.keep_samples and evaluator.keep_samples say how many, `hpc-rl samples` shows them."
_COLUMN = "train_dataset.columns says which column is which, as {prompt: question}."
_STALE = "use rollout.max_head_offpolicyness."
_SAVED = "recover.freq_steps is for checkpoints, saver.freq_steps for exports."
_PLACE = "a trial writes below cluster.fileroot."

ROWS = {  # names -> replacement
    # devices
    "gpus n_gpus num_gpus gpus_per_node": _GPUS,
    "spare_nodes min_nodes max_nodes": FIXED_NODES,
    "tp_size pp_size tensor_parallel_size pipeline_parallel_size tensor_model_parallel_size": _MESH,
    "pipeline_model_parallel_size context_parallel_size data_parallel_size vllm_tensor_parallel_size": _MESH,
    "num_nodes": "use cluster.n_nodes.",
    "bf16": "use {model}.dtype bfloat16.",
    "fp16": "use {model}.dtype float16.",
    "deepspeed fsdp_config fsdp_strategy": "allocation_mode names the engine, fsdp or megatron.",
    "vllm_mode": "allocation_mode chooses the servers and their GPUs.",
    "param_offload": "use {model}.fsdp.offload_params.",
    "optimizer_offload": "use {model}.optimizer.offload.",
    "enable_gradient_checkpointing": "use {model}.gradient_checkpointing.",
    "torch_compile use_torch_compile": "use {model}.enable_torch_compile.",
    "use_liger_kernel use_liger_loss": "the loss never holds all logits. Remove this option.",
    "packing use_remove_padding use_dynamic_bsz": "always on: see {model}.mb_spec.max_tokens_per_mb.",
    # batches
    "train_batch_size rollout_batch_size global_batch_size": "use train_dataset.batch_size: prompts.",
    "mini_batch_size ppo_mini_batch_size": "use actor.ppo_n_minibatches, the number of updates of a step.",
    "steps_per_generation": "use actor.ppo_n_minibatches, the number of updates of a step.",
    "micro_batch_size micro_batch_size_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu": _MICRO,
    "log_prob_micro_batch_size_per_gpu micro_train_batch_size ppo_max_token_len_per_gpu": _MICRO,
    "num_iterations ppo_epochs": _ONCE,
    "max_response_length": "use gconfig.max_new_tokens.",
    "rollout_n rollouts_per_example n_samples_per_prompt n": "use gconfig.n_samples.",
    # data and rewards
    "dataset dataset_name train_files prompt_data": "use train_dataset.path.",
    "eval_dataset val_files": "use valid_dataset.path.",
    "prompt_key answer_key input_key label_key messages_key dataset_text_field": _COLUMN,
    "system_prompt": "rows have it: `messages` may begin with one whose role is system.",
    "chat_template chat_template_path": "the tokenizer's is used; tokenizer_path may name another directory.",
    "presence_penalty": "not built: the loss can't follow penalties. Evaluations may use "
    "gconfig.frequency_penalty or gconfig.repetition_penalty, in section eval_gconfig.",
    "truncation": "use train_dataset.too_long, drop or truncate_left.",
    "reward_funcs": "rollout.reward_fn has the functions, separated by commas.",
    "reward_function reward_manager custom_reward_function": "use rollout.reward_fn.",
    "reward_model": "name a pool in rollout.reward_fn, whose pools.NAME.path is the reward model.",
    "log_completions num_completions_to_print generate_during_eval log_val_generations": _KEPT,
    "keep_completions rollout_data_dir validation_data_dir": _KEPT,
    # the algorithm
    "adv_estimator advantage_estimator": "use actor.algorithm.",
    "epsilon clip_ratio clip_ratio_low clip_range cliprange": "use actor.eps_clip.",
    "epsilon_high clip_ratio_high": "use actor.eps_clip_higher.",
    "delta clip_ratio_c": "use actor.c_clip, which limits the loss of negative advantages.",
    "scale_rewards norm_adv_by_std_in_grpo": "use actor.reward_norm.std_level: group, batch or null.",
    "loss_type loss_agg_mode": "use actor.loss_aggregation: token_mean (dapo), sequence_mean (grpo) or "
    "constant_length (dr_grpo); for DAPO actor.eps_clip_higher and actor.dynamic_sampling, too.",
    "mask_truncated_completions": "use actor.mask_no_eos_with_zero.",
    "use_kl_loss use_kl_in_reward kl_loss_coef kl_coef kl_loss_type kl_penalty init_kl_coef": _KL,
    "top_entropy_quantile": "not built. Remove this option.",
    "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha": "the reference model stays as it is.",
    "max_off_policy_steps max_async_level max_staleness": _STALE,
    # the optimizer
    "lr_scheduler": "see {model}.optimizer.lr_scheduler_type.",
    "warmup_steps": "use {model}.optimizer.warmup_steps_proportion, a share of all updates.",
    "optim": "use {model}.optimizer.type.",
    "adam_beta1": "use {model}.optimizer.beta1.",
    "adam_beta2": "use {model}.optimizer.beta2.",
    "adam_epsilon": "use {model}.optimizer.eps.",
    # the trial
    "run_name project_name": "experiment_name and trial_name name a trial.",
    "output_dir logging_dir default_local_dir": _PLACE,
    "save_strategy save_freq save_interval": _SAVED,
    "eval_strategy evaluation_strategy test_freq eval_interval": _EVALUATED,
    "per_device_eval_batch_size val_batch_size": _EVALUATED,
    "eval_on_start val_before_train": "grpo with a valid_dataset always evaluates before the first step.",
    "resume_from_checkpoint resume_mode": "recover.mode auto resumes; by hand `hpc-rl recover TRIAL` does.",
    "push_to_hub hub_model_id": "nothing is uploaded: exports/ of the trial has what you upload.",
}
ANSWERS = {name: answer for names, answer in ROWS.items() for name in names.split()}
