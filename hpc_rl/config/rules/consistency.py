"""Rules about options that must agree with each other, or have an effect only together."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from hpc_rl.config.load.fields import find_members, is_mapping, list_defaults, list_options
from hpc_rl.config.load.stored import REDACTED, VARIABLES, find_trainer, is_secret_variable
from hpc_rl.config.options.cluster import parse_environment
from hpc_rl.config.options.experiment import (
    ABSENT,
    LENGTH_OPTIONS,
    Config,
    GRPOConfig,
    TeacherConfig,
    get_value,
)
from hpc_rl.config.options.operations import FrequencyConfig
from hpc_rl.core.allocation import Servers, parse
from hpc_rl.core.backends import SERVER_BACKENDS, choose_server_backend
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal, make_idle_note, make_note
from hpc_rl.core.trial import check_name

METRICS = {  # trainer -> the metrics of its evaluations; the first is the default of saver.keep_best.metric
    "grpo": ("eval_reward",),
    "teacher": ("eval_accuracy_delta", "eval_reward", "eval_student_accuracy", "eval_baseline_accuracy"),
    "sft": ("eval_loss", "eval_token_accuracy"),
    "rw": ("eval_loss", "eval_accuracy"),
    "dpo": ("eval_loss", "eval_accuracy", "eval_margin"),
}
FOLLOWS = {  # option -> the option that it must equal and follows by default
    "actor.group_size": "gconfig.n_samples",
    "actor.reward_norm.group_size": "gconfig.n_samples",
    "actor.adv_norm.group_size": "gconfig.n_samples",
    "actor.max_new_tokens": "gconfig.max_new_tokens",
    "actor.temperature": "gconfig.temperature",
    "rollout.consumer_batch_size": "train_dataset.batch_size",
    **{f"{backend.section}.model_path": "actor.path" for backend in SERVER_BACKENDS.values()},
}
_KEYS_OF_SERVICES = {  # option -> what to do instead
    "stats_logger.wandb.wandb_api_key": "run `wandb login` once, or export WANDB_API_KEY before submitting",
    "stats_logger.swanlab.api_key": "run `swanlab login` once, or export SWANLAB_API_KEY before submitting",
}
_NORMS = ("actor.reward_norm", "actor.adv_norm")
_MODELS = ("actor", "critic", "ref", "model")
_TRAINED = ("actor", "critic", "model")
NEEDS = {  # option -> the option that it needs for an effect
    "evaluator.freq_epochs": "valid_dataset",
    "evaluator.freq_steps": "valid_dataset",
    "evaluator.freq_secs": "valid_dataset",
    "eval_gconfig": "valid_dataset",
    "evaluator.sets_column": "valid_dataset",
    "evaluator.sets": "valid_dataset",
    "recover.keep_best": "valid_dataset",
    "saver.keep_best": "valid_dataset",
    "train_dataset.pin_memory": "cluster.n_gpus_per_node",
    **{f"{model}.fsdp.offload_params": "cluster.n_gpus_per_node" for model in _MODELS},
    **{
        f"{model}.{option}": "cluster.n_gpus_per_node"
        for model in _TRAINED
        for option in ("optimizer.offload", "fsdp.offload_activations")
    },
    "actor.behav_imp_weight_cap": "actor.use_decoupled_loss",
    "actor.m2_threshold": "actor.use_decoupled_loss",
    "actor.log_agent_stats": "actor.log_agent_stats_keys",
    **{f"{norm}.mean_leave1out": f"{norm}.mean_level" for norm in _NORMS},
    **{f"{model}.pad_to_maximum": f"{model}.mb_spec.max_tokens_per_mb" for model in _MODELS},
    "launcher.slurm.mail_user": "launcher.slurm.mail_type",
    "environments.n_nodes": "environments.commands",
}
AT_MOST = {  # option -> the option that it must not exceed
    **{f"{section}.min_new_tokens": f"{section}.max_new_tokens" for section in ("gconfig", "eval_gconfig")},
    **{f"{model}.optimizer.min_loss_scale": f"{model}.optimizer.initial_loss_scale" for model in _TRAINED},
    "actor.rollout_correction.lower": "actor.rollout_correction.upper",
    "actor.aent.entropy_low": "actor.aent.entropy_high",
    "actor.aent.coeff_box_low": "actor.aent.coeff_box_high",
}
AT_LEAST = {  # option -> the option that is its least value
    "rollout.queue_size": "train_dataset.batch_size",
    **{f"{model}.mb_spec.max_seqs_per_mb": f"{model}.mb_spec.granularity" for model in _MODELS},
}


class Relation(NamedTuple):
    """The values that an option may have while another option has certain values."""

    option: str
    allowed: tuple[Any, ...]
    other: str
    when: tuple[Any, ...]
    why: str
    use: str
    kind: Kind = Kind.CONFLICT


_SLURM, _TYPE, _START = "launcher.slurm", "launcher.type", "launcher.trainer_start"
_LAYOUT, _SRUN_MPI = f"{_SLURM}.layout", f"{_SLURM}.srun_mpi"
_OF_SERVERS = ("jobs", "hetjob")
RELATIONS: tuple[Relation, ...] = (
    Relation(
        f"{_SLURM}.backend", ("sbatch",), _LAYOUT, _OF_SERVERS, "submitit submits single jobs only",
        "use backend sbatch, or layout allocation",
    ),
    Relation(
        f"{_SLURM}.backend", ("sbatch",), f"{_SLURM}.continue_by", ("successor",),
        "submitit requeues its job", "use backend sbatch, or continue_by requeue",
    ),
    Relation(
        _LAYOUT, ("allocation",), _TYPE, ("local",), "it needs Slurm", "use type slurm, or layout allocation"
    ),
    Relation(
        f"{_SLURM}.switches", (None,), _LAYOUT, ("hetjob",), "Slurm counts switches per component",
        "remove it, or use another layout",
    ),
    Relation(
        f"{_SLURM}.servers.time", (None,), _LAYOUT, ("hetjob",), "its components stop together",
        f"use {_SLURM}.time",
    ),
    Relation(
        _START, ("srun",), _LAYOUT, ("hetjob",), "only srun can start steps in one component of the job",
        "use layout allocation or jobs, or trainer_start srun",
    ),
    Relation(_SRUN_MPI, ("none",), _TYPE, ("local",), "it needs srun", "use type slurm"),
    Relation(
        _SRUN_MPI, ("none",), _START, ("mpiexec",), "mpiexec starts the ranks", "use srun, or remove it",
        Kind.NO_EFFECT,
    ),
    Relation(
        f"{_SLURM}.srun_args.trainer", ([],), _START, ("mpiexec",), "mpiexec starts the ranks",
        "use launcher.mpi.args", Kind.NO_EFFECT,
    ),
    Relation(
        "stats_logger.trackio.space_id", (None,), "stats_logger.trackio.mode", ("local",),
        "local metrics go to no Space", "use mode online, or remove it", Kind.NO_EFFECT,
    ),
    Relation(
        "stats_logger.trackio.mode", ("local", "disabled"), "stats_logger.trackio.space_id", (None,),
        "online metrics go to a Space", "set space_id, or use mode local",
    ),
    Relation(
        "stats_logger.mlflow.tracking_uri", ("",), "stats_logger.mlflow.mode", ("local",),
        "local metrics go to no server", "use mode online, or remove it", Kind.NO_EFFECT,
    ),
    Relation(
        "stats_logger.mlflow.logdir", (None,), "stats_logger.mlflow.mode", ("online",),
        "metrics go to the server", "use mode local, or remove it", Kind.NO_EFFECT,
    ),
    *(
        Relation(
            f"{_SLURM}.{image}", (None, "", "none"), f"{_SLURM}.container_type", ("none",),
            "no role has a container", "use apptainer, or omit the image",
        )
        for image in ("trainer_image", "rollout_image", "inference_server_image")
    ),
    Relation(
        f"{_SLURM}.mem_per_gpu", (None,), "cluster.n_gpus_per_node", (0,), "it needs GPUs",
        "use mem or mem_per_cpu",
    ),
    Relation(
        f"{_SLURM}.mem_per_cpu", (None,), f"{_SLURM}.cpus_per_task", (None,), "Slurm multiplies the two",
        "set both, or use mem",
    ),
    Relation(
        "actor.loss_aggregation", ("token_mean",), "actor.algorithm", ("areal",),
        "AReaL averages over tokens", "use token_mean",
    ),
    Relation(
        "model.label_smoothing", (0,), "model.loss_type", ("ipo",),
        "the IPO loss has no label smoothing", "remove it", Kind.NO_EFFECT,
    ),
    *(
        Relation(
            "actor.overlong_reward_penalty", (False,), f"actor.{needed}", (None,), "",
            f"set actor.{needed}, or remove the penalty",
        )
        for needed in ("overlong_tokens", "overlong_penalty_factor")
    ),
    *(
        Relation(
            f"{model}.fsdp.offload_activations", (False,), f"{model}.gradient_checkpointing", (False,),
            "it moves the inputs that checkpointing keeps", "set gradient_checkpointing true, or remove it",
            Kind.NO_EFFECT,
        )
        for model in _MODELS
    ),
    *(
        Relation(
            f"{model}.fsdp.float32_head", (False,), f"{model}.dtype", ("float32",),
            "the whole model is float32", "remove it", Kind.NO_EFFECT,
        )
        for model in _MODELS
    ),
    *(
        Relation(
            f"{model}.fsdp.float32_head", (False,), f"{model}.use_lora", (True,),
            "LoRA freezes the head, and frozen weights have the type `dtype`", "remove one of the two",
        )
        for model in _MODELS
    ),
)  # fmt: skip


def _list_relations(model: str) -> Iterator[Relation]:
    """Yield the relations of the options of a trained model."""
    optimizer, ddp = f"{model}.optimizer", f"{model}.megatron.ddp"
    granularity = f"{model}.megatron.recompute_granularity"
    yield Relation(
        f"{optimizer}.offload", (False,), f"{model}.fsdp.offload_params", (True,),
        "fsdp.offload_params keeps the optimizer state in CPU memory as well", "remove it", Kind.NO_EFFECT,
    )  # fmt: skip
    yield Relation(
        f"{optimizer}.min_lr_ratio", (0,), f"{optimizer}.lr_scheduler_type", ("constant",),
        "the learning rate stays the same", "use linear or cosine", Kind.NO_EFFECT,
    )  # fmt: skip
    yield Relation(
        f"{ddp}.check_for_nan_in_grad", (False,), f"{model}.dtype", ("float16",),
        "float16 gradients overflow until the loss scale is small, and this check would end the trial",
        "remove it, or use dtype bfloat16",
    )  # fmt: skip
    needed = {
        "overlap_param_gather": ("overlap_grad_reduce", "use_distributed_optimizer"),
        "align_param_gather": ("overlap_param_gather",),
    }
    for option, other in ((option, other) for option, others in needed.items() for other in others):
        use = f"set {other} true, or remove {option}"
        yield Relation(f"{ddp}.{option}", (False,), f"{ddp}.{other}", (False,), "", use)
    use = "set overlap_grad_reduce true, or remove bucket_size"
    yield Relation(f"{ddp}.bucket_size", (None,), f"{ddp}.overlap_grad_reduce", (False,), "", use)
    yield Relation(
        granularity, ("full", "selective"), f"{model}.gradient_checkpointing", (True,),
        "null recomputes nothing", f"use {model}.gradient_checkpointing false",
    )  # fmt: skip
    for option in ("recompute_method", "recompute_num_layers"):
        why, use = "this option is for whole layers", "remove it"
        yield Relation(f"{model}.megatron.{option}", (None,), granularity, ("selective",), why, use)
    option, why = f"{model}.megatron.recompute_modules", "this option is for parts of layers"
    yield Relation(option, (None,), granularity, (None, "full"), why, "use selective, or remove it")


def list_server_pools(config: Config) -> tuple[Servers, ...]:
    """Return the pools of `allocation_mode`, or of a derived one; empty if the plan will refuse it."""
    if not config.allocation_mode.strip():
        return (Servers(choose_server_backend(config.cluster.n_gpus_per_node)),)
    try:
        return parse(config.allocation_mode).pools
    except ConfigError:
        return ()


def find_server_backend(config: Config, pool: str = "") -> str:
    """Return the backend of a pool, by default the trained one; empty if it has no servers."""
    others = config.pools if isinstance(config, GRPOConfig) else {}
    named = (
        one for one in list_server_pools(config) if one.pool == pool or (not pool and one.pool not in others)
    )
    return next((one.backend for one in named), "")


def find_context_option(config: GRPOConfig, pool: str = "") -> str:
    """Return the option that limits the tokens of a sequence in the servers; empty if no option does."""
    backend = SERVER_BACKENDS.get(find_server_backend(config, pool))
    return f"{backend.section}.{backend.context_option}" if backend and backend.context_option else ""


def has_period(section: FrequencyConfig) -> bool:
    """Return whether any period is set."""
    return any(value is not None for value in (section.freq_epochs, section.freq_steps, section.freq_secs))


def is_default(config: Config, name: str) -> bool:
    """Return whether an option has its default value; a file may spell out defaults."""
    cls: type = type(config)
    return get_value(config, name) == list_defaults(cls, members=find_members(cls, [name])).get(name, ABSENT)


def list_members(config: Config) -> tuple[str, ...]:
    """Return the members of a configuration, such as `pools.student`."""
    cls: type = type(config)
    mappings = [name for name, hint in list_options(cls).items() if is_mapping(hint)]
    return tuple(f"{name}.{key}" for name in mappings for key in get_value(config, name))


def list_given(config: Config, explicit: Collection[str], prefixes: str | tuple[str, ...]) -> list[str]:
    """Return the options with these prefixes that were set to another value than their default."""
    return [name for name in sorted(explicit) if name.startswith(prefixes) and not is_default(config, name)]


def check_names(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for option in ("experiment_name", "trial_name"):
        try:
            check_name(option, getattr(config, option))
        except ConfigError as error:
            yield from error.refusals


def check_equal(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for name, other in FOLLOWS.items():
        value, expected = get_value(config, name), get_value(config, other)
        if value not in (ABSENT, None, "", expected):
            why, use = f"must equal {other} {expected}", "remove it: it defaults to that"
            yield Refusal(option=name, value=value, kind=Kind.CONFLICT, why=why, use=use, related=(other,))


def check_needs(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for name, needed in NEEDS.items():
        if needed == "valid_dataset" and needed in explicit:
            continue  # `valid_dataset=null` turns evaluation off, and the file may keep its options
        if get_value(config, name) and not get_value(config, needed):
            what = "GPUs (cluster.n_gpus_per_node 0)" if needed == "cluster.n_gpus_per_node" else needed
            why = f"has no effect without {what}: set both, or remove this option"
            yield Refusal(option=name, kind=Kind.NO_EFFECT, why=why, related=(needed,))


def check_relations(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse values that the value of another option excludes."""
    for row in (*RELATIONS, *(row for model in _TRAINED for row in _list_relations(model))):
        value, other = get_value(config, row.option), get_value(config, row.other)
        if value is ABSENT or value in row.allowed or other not in row.when:
            continue
        what = "has no effect" if row.kind is Kind.NO_EFFECT else "can't be used"
        yield Refusal(
            option=row.option,
            value=_format_value(value),
            kind=row.kind,
            why=f"{what} with {row.other} {_format_value(other)}" + (f": {row.why}" if row.why else ""),
            use=row.use,
            related=(row.other,),
        )


def _format_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_limits(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Refuse numbers beyond the limit that another option sets."""
    for words, sign, table in (("must not exceed", 1, AT_MOST), ("must be at least", -1, AT_LEAST)):
        for name, other in table.items():
            value, limit = get_value(config, name), get_value(config, other)
            if value in (ABSENT, None) or limit in (ABSENT, None) or sign * (value - limit) <= 0:
                continue
            why = f"{words} {other} {limit:g}"
            yield Refusal(option=name, value=f"{value:g}", kind=Kind.CONFLICT, why=why, related=(other,))


def check_length(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    if all(getattr(config, name) is None for name in LENGTH_OPTIONS):
        first, *others = LENGTH_OPTIONS
        why = f", {', '.join(others)} are all null, so the trial would never stop"
        yield Refusal(option=first, kind=Kind.MISSING, why=why, use="set one of them", related=tuple(others))


def check_datasets(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    wanted = "rl" if isinstance(config, GRPOConfig) else find_trainer(config)
    for section in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, section)
        if dataset and dataset.type != wanted:
            yield Refusal(
                option=f"{section}.type",
                value=dataset.type,
                kind=Kind.CONFLICT,
                why=f"can't be used with trainer {config.trainer}, which needs rows of type {wanted}",
                related=("trainer",),
            )


def check_evaluation(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    keep, allowed = config.saver.keep_best, METRICS[find_trainer(config)]
    if isinstance(config, TeacherConfig):
        allowed += tuple(f"eval_reward_{part.rpartition(':')[2]}" for part in config.teacher.reward_parts)
    if keep is None or keep.metric is None or keep.metric in allowed:
        return
    sets = config.evaluator.sets if isinstance(config, GRPOConfig) else {}
    if keep.metric.startswith(tuple(f"eval_{name}/" for name in sets)):
        return
    workflow = config.rollout.workflow if isinstance(config, GRPOConfig) else ""
    fills_stats = workflow == "agent" or ":" in workflow
    if not (fills_stats and keep.metric.startswith("eval_")):
        yield Refusal(
            option="saver.keep_best.metric",
            value=keep.metric,
            kind=Kind.CONFLICT,
            why=f"can't be used: trainer {config.trainer} measures {', '.join(allowed)}",
            related=("trainer",),
        )


def check_environments(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for name in VARIABLES:
        option = f"launcher.{name}"
        try:
            found = parse_environment(option, getattr(config.launcher, name))
        except ConfigError as error:
            yield from error.refusals
            continue
        for variable, value in found.items():
            if value == REDACTED and is_secret_variable(variable):
                why = f": {variable} is {REDACTED}, a redacted secret"
                yield Refusal(option=option, kind=Kind.VALUE, why=why, use="write the secret itself")


def check_keys_absent(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for name, use in _KEYS_OF_SERVICES.items():
        if get_value(config, name):
            why = f"can't be used: a key does not belong in a file that others may read; {use}"
            yield Refusal(option=name, value=REDACTED, kind=Kind.UNSUPPORTED, why=why)


RULES = [
    check_names,
    check_equal,
    check_needs,
    check_relations,
    check_limits,
    check_length,
    check_datasets,
    check_evaluation,
    check_environments,
    check_keys_absent,
]


def list_idle_notes(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    """Yield notes about options without effect; AReaL's files often contain them."""
    names = ("batch_size", "sequences_per_rank", "shuffle", "drop_last", "pin_memory")
    idle = [f"valid_dataset.{name}" for name in names if f"valid_dataset.{name}" in explicit]
    if idle and config.valid_dataset is not None:
        yield make_idle_note(idle, "an evaluation uses every held-out row once, in order")
    if isinstance(config, GRPOConfig):
        used = list(dict.fromkeys(pool.backend for pool in list_server_pools(config)))
        for name, backend in SERVER_BACKENDS.items():
            is_set = any(option.startswith(f"{backend.section}.") for option in explicit)
            if used and name not in used and is_set:
                why = f"has no effect: the trial has {' and '.join(used)} servers"
                yield make_note(backend.section, why, Kind.NO_EFFECT)
        return
    unused = ("launcher.rollout_", "launcher.inference_server_")
    roles = [name for name in sorted(explicit) if name.startswith(unused)]
    if roles:
        yield make_idle_note(roles, f"trainer {config.trainer} has no servers and no rollout role")
